"""What all doors of a daemon share: names of the outside, presets, and what looks into connections.

Owns the seam to interception: `door.py` decides and carries, an `Interceptor` answers or rewrites what passes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

from forkyard.models.network import Verdict
from forkyard.net.base import Network
from forkyard.net.presets import Presets

_CONNECT_TIMEOUT_S = 10.0


class Resolver(Protocol):
    async def resolve(self, name: str) -> list[str]:
        """IPv4 addresses of a name; empty if it has none. Raises `OSError` (`TimeoutError` among them) if nobody knows
        for now."""
        ...


@dataclass(frozen=True)
class Request:
    """One HTTP request, for the log."""

    method: str
    target: str  # as asked; what follows a `?` is not written down
    status: int | None = None
    verdict: Verdict = "allowed"
    reason: str | None = None
    bytes_out: int = 0  # of its body, and
    bytes_in: int = 0  # of the answer's
    duration_s: float = 0.0


@dataclass(frozen=True)
class Intercepted:
    """One connection that is to be looked into. It was checked against the policy."""

    sandbox_id: str
    name: str  # by SNI or Host, lower case
    port: int
    tls: bool
    network: Network  # as it is now; a change ends the connection if it matters
    #: Opens the connection to the real host: TCP only, non-blocking, the caller's to close. Raises `OSError`. What
    #: passes is already metered on the guest's side.
    connect: Callable[[], Awaitable[socket.socket]]
    #: What the record of this connection is to say; the last word counts. Default: allowed.
    note: Callable[[Verdict, str | None], None]
    #: Called for each request, when it is over.
    record: Callable[[Request], None]


class Interceptor(Protocol):
    def wants(self, network: Network, name: str, tls: bool) -> bool:
        """Whether a connection to this name is to be looked into. Quick, asked for each connection."""
        ...

    async def replays(self, network: Network, name: str) -> bool:
        """Whether there is anything of this host in what this network replays."""
        ...

    async def serve(self, guest: socket.socket, what: Intercepted) -> None:
        """Serve the guest's side until it is over. `guest` is a non-blocking stream socket with nothing read from it yet
        (so `loop.connect_accepted_socket(..., ssl=...)` works on it), the callee's to close. Cancelled when the policy no
        longer allows it. An exception is recorded as a failure and ends only this connection."""
        ...


async def tcp_connect(address: str, port: int) -> socket.socket:
    """A non-blocking socket. Raises `OSError`, `TimeoutError` among them."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except BaseException:
        sock.close()
        raise
    return sock


@dataclass(frozen=True)
class Outside:
    """One per daemon."""

    resolver: Resolver
    presets: Presets = field(default_factory=Presets)
    intercept: Interceptor | None = None
    connect: Callable[[str, int], Coroutine[None, None, socket.socket]] = tcp_connect
