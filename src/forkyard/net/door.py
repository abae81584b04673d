"""The door of one machine: everything it sends arrives here, and leaves only if the policy says so.

Owns the listening sockets inside the machine's slot, the connections, and the counts. What is decided and how is beside
this file: `connection.py` for TCP, `dns.py` for names, `policy.py` for the rules. It never trusts the guest, and does
nothing of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Callable, Coroutine

import structlog

from forkyard.net.base import Listeners, Network, OwnerOf, Traffic
from forkyard.net.connection import Connection
from forkyard.net.dns import DnsServer
from forkyard.net.outside import Outside
from forkyard.net.relay import reset
from forkyard.net.watch import Sink, Watch

log = structlog.get_logger(__name__)

#: At once, of one machine. More are reset as they come.
MOST_CONNECTIONS = 512
_ACCEPTS_PER_TURN = 32
#: Of those that are refused as they come, how many may wait for the guest to say whose they are, and for how long.
_REFUSED_AT_ONCE = 16
_OWNER_GRACE_S = 0.25
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REST_S = 0.2
_IDLE_S = 2 * 3600.0
_SWEEP_S = 60.0
_SO_ORIGINAL_DST = 80


def original_destination(guest: socket.socket) -> tuple[str, int]:
    """Where the guest wanted to go, before the slot redirected it here. Raises `OSError` if it was not redirected."""
    raw = guest.getsockopt(socket.SOL_IP, _SO_ORIGINAL_DST, 16)
    port, address = struct.unpack_from("!2xH4s", raw)
    return socket.inet_ntoa(address), port


class Door:
    def __init__(
        self,
        sandbox_id: str,
        listeners: Listeners,
        network: Network,
        owner_of: OwnerOf,
        sink: Sink,
        outside: Outside,
        *,
        destination_of: Callable[[socket.socket], tuple[str, int]] = original_destination,
    ) -> None:
        self._watch = Watch(sandbox_id, network, owner_of, sink, outside)
        self._listener = listeners.tcp
        self._dns = DnsServer(self._watch, listeners.dns_udp, listeners.dns_tcp)
        self._destination_of = destination_of
        self._connections: dict[asyncio.Task[None], Connection] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._open = False

    @property
    def traffic(self) -> Traffic:
        meter = self._watch.meter
        return Traffic(meter.bytes_out, meter.bytes_in, meter.connections, meter.denied)

    def start(self) -> None:
        self._open = True
        self._listener.setblocking(False)
        self._accept_again()
        self._dns.start()
        self._sweep()

    def update(self, network: Network) -> None:
        """From now on. Open connections that are no longer allowed are ended."""
        self._watch.update(network)
        self._reconsider()
        if self._watch.gate.denied_names and self._connections:
            self._run(self._reconsider_unnamed())

    def _reconsider(self) -> None:
        for connection in list(self._connections.values()):
            connection.reconsider()

    async def _reconsider_unnamed(self) -> None:
        await self._watch.learn_denied()
        self._reconsider()

    def _run(self, errand: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task

    async def close(self) -> None:
        """End all connections and close the sockets. Idempotent."""
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
        for timer in (self._sweeper, self._rest):
            if timer is not None:
                timer.cancel()
        self._listener.close()
        tasks = [*self._connections, *self._errands]
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._dns.close(), self._watch.close(), *tasks, return_exceptions=True)

    def _accept_again(self) -> None:
        if self._open:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                guest, (_, source_port) = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    log.warning("a door cannot accept", sandbox_id=self._watch.sandbox_id, error=str(error))
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listener.fileno())
                self._rest = loop.call_later(_REST_S, self._accept_again)
                return
            self._admit(guest, source_port)

    def _admit(self, guest: socket.socket, source_port: int) -> None:
        watch = self._watch
        try:
            guest.setblocking(False)
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            address, port = self._destination_of(guest)
        except OSError:
            reset(guest)  # it is gone already
            return
        refusal = None
        if len(self._connections) >= MOST_CONNECTIONS:
            refusal = f"more than {MOST_CONNECTIONS} connections at once"
        elif not watch.meter.connect():
            limit = watch.gate.allowance.connections_per_minute or 0
            refusal = f"more than {limit} connections in a minute; {watch.how(f'--connections {2 * limit}')}"
        if refusal is not None:
            if len(self._errands) < _REFUSED_AT_ONCE:
                self._run(self._refuse(guest, source_port, address, port, refusal)).add_done_callback(
                    lambda _: guest.close()
                )
            else:
                reset(guest)
                watch.record("tcp", "denied", refusal, address=address, port=port)
            return
        connection = Connection(watch, guest, source_port, address, port)
        task = asyncio.get_running_loop().create_task(connection.run())
        self._connections[task] = connection
        task.add_done_callback(self._gone)

    async def _refuse(self, guest: socket.socket, source_port: int, address: str, port: int, reason: str) -> None:
        """Whose it is can be told while it is open only."""
        owner = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OWNER_GRACE_S):
                    owner = await self._watch.owner("tcp", source_port, address, port)
        finally:
            reset(guest)
            self._watch.record("tcp", "denied", reason, owner=owner, address=address, port=port)

    def _gone(self, task: asyncio.Task[None]) -> None:
        del self._connections[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection broke its door", sandbox_id=self._watch.sandbox_id, exc_info=error)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        for connection in list(self._connections.values()):
            if loop.time() - connection.last_s > _IDLE_S:
                connection.end(TimeoutError(f"nothing was sent for {_IDLE_S / 3600:.0f} hours"))
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)
