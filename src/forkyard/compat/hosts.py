"""Names that the API is reached by, as opposed to those of sandboxes; and what is never another's there. Pure."""

from __future__ import annotations

import functools
import ipaddress

#: Our own API, whoever asks.
OWN = "/api/"


@functools.lru_cache(4096)
def host_name(header: str) -> str:
    """The name in a Host header: lower case, without port, brackets and the dot of the root."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def is_local(name: str) -> bool:
    """A name that nobody can point elsewhere."""
    if name in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
