"""The way in and out of one machine: its slot, and the door in it.

Owns: the door's life. It is open from before the machine runs as somebody's until its process is let go. Without a door
(a template being built, a machine in the pool, one just adopted) every connection of the guest is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, cast

import structlog

from forkyard.errors import ForkyardError, GuestUnreachable, HostFailure, PortClosed
from forkyard.guest.base import Guest, SocketOwner
from forkyard.models.network import EgressRecord
from forkyard.net import namespace
from forkyard.net.base import GUEST_ADDRESS, Listeners, Network, OwnerOf, Traffic
from forkyard.net.slots import open_listeners, open_socket

log = structlog.get_logger(__name__)

CONNECT_TIMEOUT_S = 10.0

Sink = Callable[[EgressRecord], None]


class Door(Protocol):
    @property
    def traffic(self) -> Traffic: ...
    def start(self) -> None: ...
    def update(self, network: Network) -> None: ...
    async def close(self) -> None: ...


NewDoor = Callable[[str, Listeners, Network, OwnerOf, Sink], Door]


class Doorway:
    def __init__(self, slot: Path, new_door: NewDoor | None, sink: Sink) -> None:
        self._slot = slot
        self._new_door = new_door
        self._sink = sink
        self._door: Door | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._visits: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        #: Who is asked whose connection it is; None while there is nobody to ask.
        self.guest: Callable[[], Guest] | None = None

    async def open(self, sandbox_id: str, network: Network) -> None:
        """Let through what this network allows; from now on, if it was open already."""
        async with self._opening:
            if self._door is not None:
                self._door.update(network)
            elif self._new_door is not None and not self._closed:
                listeners = await open_listeners(self._slot)
                self._door = self._new_door(sandbox_id, listeners, network, self._owner, self._sink)
                self._door.start()

    async def close(self) -> None:
        async with self._opening:
            self._closed = True
            for visit in self._visits:  # there is nobody any more who would tell their other end
                with contextlib.suppress(OSError):
                    visit.shutdown(socket.SHUT_RDWR)
            door, self._door = self._door, None
            if door is not None:
                await door.close()

    async def connect(self, port: int) -> socket.socket:
        """To the guest's loopback; a server that listens on the other address only is found there."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                for address in ("127.0.0.1", GUEST_ADDRESS):
                    connection = await self._connect(address, port)
                    if connection is not None:
                        return connection
        except TimeoutError:
            raise GuestUnreachable(
                f"port {port} of the sandbox did not answer within {CONNECT_TIMEOUT_S:.0f} s; "
                "it may be overloaded, or drop what comes in"
            ) from None
        raise PortClosed(f"nothing listens on port {port} in the sandbox")

    async def _connect(self, address: str, port: int) -> socket.socket | None:
        try:
            made = await open_socket(self._slot)
        except OSError as error:
            raise HostFailure(f"no way into {self._slot.name}: {error}") from error
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(made, (address, port))
        except BaseException as error:
            made.close()
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
                    return None
                raise GuestUnreachable(f"port {port} of the sandbox cannot be reached: {error.strerror}") from error
            raise
        self._visits.add(made)
        return made

    async def guest_ports(self) -> set[int]:
        """The guest's ends of all TCP connections there are in the slot."""
        return await namespace.inside(self._slot, _peer_ports)

    async def quiet(self) -> bool:
        """Whether no connection leads outside, nor did a moment ago: the kernel remembers each for seconds after its end."""
        return await namespace.inside(self._slot, lambda: not _remembered() and not _peer_ports())

    @property
    def traffic(self) -> Traffic:
        return self._door.traffic if self._door is not None else Traffic()

    async def _owner(self, protocol: str, source_port: int, address: str, port: int) -> SocketOwner | None:
        """The guest's word; a guest that cannot say is no reason to hold up a connection."""
        if self.guest is None:
            return None
        try:
            kind = cast(Literal["tcp", "udp"], protocol)
            return await self.guest().socket_owner(kind, source_port, address, port)
        except ForkyardError as error:
            log.debug("a connection has no known owner", slot=self._slot.name, error=error.message)
            return None


def _remembered() -> int:
    return int(Path("/proc/sys/net/netfilter/nf_conntrack_count").read_text())


def _peer_ports() -> set[int]:
    lines = Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]
    return {int(line.split()[2].partition(":")[2], 16) for line in lines} - {0}
