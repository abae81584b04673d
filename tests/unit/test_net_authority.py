"""The authority: what it makes is trusted by those who trust it, and by nobody else."""

from __future__ import annotations

import contextlib
import ssl
import stat
from pathlib import Path

import pytest

from forkyard.errors import HostFailure
from forkyard.net.authority import CERTIFICATE_NAME, KEY_NAME, Authority


def handshake(server: ssl.SSLContext, authority: Authority, name: str) -> ssl.SSLObject:
    """A TLS connection in memory; raises what the client would."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.load_verify_locations(cadata=authority.certificate_pem)
    client_context.set_alpn_protocols(["h2", "http/1.1"])
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    peer = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, peer):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return client


def test_a_certificate_is_valid_for_its_names_only(tmp_path: Path) -> None:
    authority = Authority.load_or_make(tmp_path)
    context = authority.context_for(["api.example.test", "*.apps.example.test", "192.0.2.7"])
    for name in ("api.example.test", "3000-x.apps.example.test", "192.0.2.7"):
        assert handshake(context, authority, name).selected_alpn_protocol() == "http/1.1"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(context, authority, "other.example.test")


def test_a_stranger_does_not_trust_it(tmp_path: Path) -> None:
    mine, other = Authority.load_or_make(tmp_path / "a"), Authority.load_or_make(tmp_path / "b")
    assert mine.fingerprint != other.fingerprint
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(mine.context_for(["x.test"]), other, "x.test")


def test_it_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    first, again = Authority.load_or_make(tmp_path), Authority.load_or_make(tmp_path)
    assert first.certificate_pem == again.certificate_pem
    assert stat.S_IMODE((tmp_path / KEY_NAME).stat().st_mode) == 0o600
    handshake(first.context_for(["x.test"]), again, "x.test")


def test_contexts_are_kept(tmp_path: Path) -> None:
    authority = Authority.load_or_make(tmp_path)
    assert authority.context_for(["x.test"]) is authority.context_for(["x.test"])
    assert authority.context_for(["x.test"]) is not authority.context_for(["y.test"])


def test_a_long_name_is_no_obstacle(tmp_path: Path) -> None:
    authority = Authority.load_or_make(tmp_path)
    name = ".".join(["a" * 60] * 3) + ".test"
    handshake(authority.context_for([name]), authority, name)


def test_a_damaged_one_says_what_to_do(tmp_path: Path) -> None:
    Authority.load_or_make(tmp_path)
    (tmp_path / CERTIFICATE_NAME).write_text("nonsense")
    with pytest.raises(HostFailure, match="remove ca-key"):
        Authority.load_or_make(tmp_path)
