"""TLS for previews: with certificates the user brings, or with one of our own authority for each name that is asked for.

Only names that could be a preview, a user's domain or this machine get one of ours; a client that names none gets that of
`localhost`, or the first that was brought.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable

from forkyard.gateway import names
from forkyard.gateway.certificates import Brought
from forkyard.net.authority import Authority

_HERE = ("localhost", "127.0.0.1", "::1")


def context(
    authority: Authority, domain: str, is_mapped: Callable[[str], bool], brought: Brought | None = None
) -> ssl.SSLContext:
    """`is_mapped`: whether a name is a user's domain. Asked during a handshake, so it must be quick."""
    api = (f"api.{domain}", f"sandbox.{domain}")  # where clients of E2B look for it
    first = None if brought is None else brought.first

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> int | None:
        name = None if name is None else name.lower()
        if brought is not None and (found := brought.of(name)) is not None:
            connection.context = found
            return None
        if name is None or (name in _HERE and first is None):
            return None
        known = name == domain or name in api or isinstance(names.of_host(name, domain), names.Target)
        if is_mapped(name) or (known and first is None):
            connection.context = authority.context_for([name])
        elif brought is not None and first is not None:
            connection.context = brought.first or first  # made for other names; it is what there is
        else:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        return None

    made = first or authority.context_for([*_HERE, domain] if domain not in _HERE else _HERE)
    made.sni_callback = choose
    return made
