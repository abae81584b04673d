"""Why a port of a guest cannot be reached although something may listen there."""

from __future__ import annotations

import asyncio

from forkyard.errors import ForkyardError, PortClosed
from forkyard.hosts.base import Host, Incarnation

LOOK_S = 5.0
_TABLE = "/proc/net/tcp6"
_TABLE_BYTES = 256 * 1024
_LISTENS = "0A"
_IPV6_LOOPBACK = "00000000000000000000000001000000"


async def explained(closed: PortClosed, host: Host, incarnation: Incarnation, port: int) -> PortClosed:
    """The same with a hint, if the guest says that a server is on its IPv6 loopback: no way leads there."""
    table = bytearray()
    try:
        guest = host.guest(incarnation)
        async with asyncio.timeout(LOOK_S), guest.read_file(_TABLE, length=_TABLE_BYTES) as pieces:
            async for piece in pieces:
                table += piece
    except (ForkyardError, TimeoutError):
        return closed
    if not _on_ipv6_loopback(table.decode("ascii", "replace"), port):
        return closed
    return PortClosed(
        f"a server listens on port {port} of the sandbox, but on [::1] only, which cannot be reached from outside; "
        "let it listen on localhost, 127.0.0.1 or 0.0.0.0"
    )


def _on_ipv6_loopback(table: str, port: int) -> bool:
    for line in table.splitlines()[1:]:
        columns = line.split()
        if len(columns) > 3 and columns[3] == _LISTENS and columns[1] == f"{_IPV6_LOOPBACK}:{port:04X}":
            return True
    return False
