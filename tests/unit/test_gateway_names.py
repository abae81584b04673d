"""Host names and paths of previews: whatever a client sends, it is a target, a clear refusal, or not ours."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.gateway import names
from forkyard.gateway.names import Malformed, PathTarget, Target

ID = "q7m2v9x4k1c8b3n6d5f0"
IDS = st.from_regex(r"[a-z][a-z0-9]{19}", fullmatch=True)
PORTS = st.integers(1, 65535)


@pytest.mark.parametrize(
    ("header", "name", "port"),
    [
        ("localhost", "localhost", None),
        ("LocalHost:7070", "localhost", 7070),
        ("[::1]:80", "::1", 80),
        ("[::1]", "::1", None),
        ("example.com.", "example.com", None),
        (" a.b:99999 ", "a.b", 99999),
        ("", "", None),
        ("a:b:c", "a", None),
    ],
)
def test_the_parts_of_a_host_header(header: str, name: str, port: int | None) -> None:
    assert (names.host_name(header), names.host_port(header)) == (name, port)


@given(IDS, PORTS)
def test_names_and_paths_lead_to_their_target(sandbox_id: str, port: int) -> None:
    target = Target(sandbox_id, port)
    assert names.of_host(f"{port}-{sandbox_id}.localhost") == target
    assert names.of_host(f"{port}-{sandbox_id}.p.example.com", "p.example.com") == target
    prefix = f"/s/{sandbox_id}/{port}".encode()
    assert names.of_path(prefix) == PathTarget(target, prefix, b"")
    assert names.of_path(prefix + b"/a//b") == PathTarget(target, prefix, b"/a//b")


@pytest.mark.parametrize("port", ["0", "65536", "70000", "999999", "-1", "", "1e3", "٣٠٠٠", "+80", " 80"])
def test_what_is_no_port_is_said_so(port: str) -> None:
    for found in (names.of_host(f"{port}-{ID}.localhost"), names.of_host(f"{port}-{ID}.x.org", "x.org")):
        assert isinstance(found, Malformed)
        assert "is no port" in found.why or "is no sandbox id" in found.why
    if port.isascii() and port:
        assert isinstance(names.of_path(f"/s/{ID}/{port}/".encode()), Malformed)


@pytest.mark.parametrize("sandbox_id", ["", "a", ID[:-1], ID + "a", "1" + ID[1:], ID.upper(), f"{ID}.x"])
def test_what_is_no_id_is_said_so(sandbox_id: str) -> None:
    assert isinstance(names.of_host(f"3000-{sandbox_id}.localhost"), Malformed)
    assert isinstance(names.of_path(f"/s/{sandbox_id}/3000/".encode()), Malformed)


@pytest.mark.parametrize(
    "name", ["localhost", "api.localhost", "my-app.localhost", f"3000-{ID}.example.com", f"3000-{ID}", ""]
)
def test_other_names_are_not_ours(name: str) -> None:
    assert names.of_host(name) is None


def test_below_our_domain_every_name_is_ours() -> None:
    assert isinstance(names.of_host("www.p.example.com", "p.example.com"), Malformed)
    assert names.of_host("p.example.com", "p.example.com") is None
    assert names.of_host(f"3000-{ID}.evilp.example.com", "p.example.com") is None


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("localhost", True),
        ("a.localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("", True),
        ("localhost.evil", False),
    ],
)
def test_names_that_nobody_can_point_elsewhere(name: str, local: bool) -> None:
    assert names.is_local(name) is local


@given(st.text(), st.one_of(st.none(), st.text(min_size=1)))
def test_no_host_is_too_strange(header: str, domain: str | None) -> None:
    name = names.host_name(header)
    names.host_port(header)
    names.is_local(name)
    _check(names.of_host(name, domain))


@given(st.from_regex(r"[0-9a-z-]{0,30}(\.localhost)?(:[0-9]{0,6})?"))
def test_no_label_is_too_strange(header: str) -> None:
    _check(names.of_host(names.host_name(header)))


@given(st.one_of(st.binary(), st.binary().map(lambda rest: b"/s/" + rest)))
def test_no_path_is_too_strange(path: bytes) -> None:
    found = names.of_path(path)
    if isinstance(found, PathTarget):
        assert found.prefix + found.rest == path
        assert found.rest[:1] in (b"", b"/")
        _check(found.target)
    else:
        _check(found)


def _check(found: Target | Malformed | None) -> None:
    if isinstance(found, Target):
        assert re.fullmatch(r"[a-z][a-z0-9]{19}", found.sandbox_id)
        assert 1 <= found.port <= 65535
    elif found is not None:
        assert len(found.why) < 1000
