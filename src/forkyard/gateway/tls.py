"""TLS for previews: with a certificate the user brings, or one of our own authority for each name that is asked for.

Only names that could be a preview, a user's domain or this machine get one; a client that names none gets that of
`localhost`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from forkyard.errors import HostFailure
from forkyard.gateway import names
from forkyard.net.authority import Authority

_HERE = ("localhost", "127.0.0.1", "::1")


def brought(certificate: Path, key: Path) -> ssl.SSLContext:
    """Blocking."""
    context = _plain()
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise HostFailure(
            f"the certificate {certificate} with the key {key} cannot be used: {error}; check FORKYARD_TLS_CERT_FILE "
            "and FORKYARD_TLS_KEY_FILE"
        ) from error
    return context


def made_here(authority: Authority, domain: str, is_mapped: Callable[[str], bool]) -> ssl.SSLContext:
    """`is_mapped`: whether a name is a user's domain. Asked during a handshake, so it must be quick."""
    api = (f"api.{domain}", f"sandbox.{domain}")  # where clients of E2B look for it

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> int | None:
        if name is None or (name := name.lower()) in _HERE:
            return None
        known = name == domain or name in api or isinstance(names.of_host(name, domain), names.Target)
        if not (known or is_mapped(name)):
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        connection.context = authority.context_for([name])
        return None

    context = authority.context_for([*_HERE, domain] if domain not in _HERE else _HERE)
    context.sni_callback = choose
    return context


def _plain() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
