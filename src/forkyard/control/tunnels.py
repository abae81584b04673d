"""Bytes between a client and a port of a guest, for those who forward ports.

Owns: what a tunnel does while its sandbox sleeps. Being only open it does not keep a sandbox awake; every piece that
flows is a sign of life, and one from the client wakes it. Memory that went to disk comes back in a new machine, which
has dropped the connections of the old one: then the tunnel ends.
"""

from __future__ import annotations

import asyncio
import contextlib

from forkyard.control.ground import Ground
from forkyard.control.sandboxes import Sandboxes
from forkyard.errors import GuestUnreachable

PIECE_BYTES = 256 * 1024


class Tunnel:
    def __init__(
        self,
        tunnels: Tunnels,
        sandbox_id: str,
        incarnation: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._tunnels = tunnels
        self._sandbox_id = sandbox_id
        self._incarnation = incarnation
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        """From the guest; empty at its end, also at one that came rudely."""
        try:
            data = await self._reader.read(PIECE_BYTES)
        except OSError:
            return b""
        self._tunnels.alive(self._sandbox_id)
        self._tunnels.passed(self._sandbox_id, bytes_out=len(data))
        return data

    async def write(self, data: bytes) -> None:
        """`GuestUnreachable` if nobody takes it any more."""
        with self._tunnels.using(self._sandbox_id):
            await self._tunnels.awake(self._sandbox_id, self._incarnation)
            try:
                self._writer.write(data)
                await self._writer.drain()
            except OSError as error:
                raise GuestUnreachable(f"the connection to sandbox {self._sandbox_id} broke: {error}") from error
        self._tunnels.passed(self._sandbox_id, bytes_in=len(data))

    async def end(self) -> None:
        """The client has nothing more to say."""
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    async def aclose(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Tunnels:
    def __init__(self, ground: Ground, sandboxes: Sandboxes) -> None:
        self._ground = ground
        self._sandboxes = sandboxes
        self.alive = ground.activity.touch
        self.using = ground.activity.using
        self.passed = ground.ingress.passed

    async def open(self, sandbox_id: str, port: int) -> Tunnel:
        """Wakes the sandbox. `PortClosed` if nothing listens there."""
        with self.using(sandbox_id):
            socket = await self._sandboxes.connect(sandbox_id, port)
            incarnation = (await self._ground.record(sandbox_id)).incarnation
            reader, writer = await asyncio.open_connection(sock=socket, limit=PIECE_BYTES)
        return Tunnel(self, sandbox_id, incarnation, reader, writer)

    async def awake(self, sandbox_id: str, incarnation: int) -> None:
        """Looks at memory first: this is asked for every piece. A sandbox that falls asleep, or sleeps, has a verb
        under way or is hot; one that is cold has lost its connections and is found out by its incarnation."""
        if sandbox_id not in self._ground.hot and not self._ground.turns.busy(sandbox_id):
            return
        now, _ = await self._sandboxes.entered(sandbox_id)
        if now.number != incarnation:
            raise GuestUnreachable(f"sandbox {sandbox_id} slept meanwhile, and this connection did not; connect again")
