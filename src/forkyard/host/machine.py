"""One VM's supervisor: owns its process, its channel, and what becomes of them.

Two watchers run as long as the VM does: one waits for its end and reports it, one reconnects the channel when it breaks
(the guest restarted its agent, say). `kill` ends the VM; `detach` lets go and leaves it running.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from forkyard.errors import CommandNotFound, ForkyardError, GuestUnreachable
from forkyard.guest.base import Connector, ExecSpec, Guest
from forkyard.host.doorway import Doorway
from forkyard.host.journal import Entry
from forkyard.hosts.base import Incarnation
from forkyard.vmm.base import Vm, VmExit

log = structlog.get_logger(__name__)

RECONNECT_TIMEOUT_S = 30.0

OnEnd = Callable[[Incarnation, VmExit], None]


class Machine:
    def __init__(
        self, entry: Entry, vm: Vm, guest: Guest | None, connect: Connector, on_end: OnEnd, doorway: Doorway
    ) -> None:
        self.entry = entry
        self.vm = vm
        self.doorway = doorway
        doorway.guest = lambda: self.guest
        self._guest = guest
        self._connect = connect
        self._on_end = on_end
        self._exit: VmExit | None = None
        #: Whether it may have connections of a machine that it was restored from.
        self.has_old_connections = False
        #: While its CPUs are stopped no agent can answer, and nobody should ask.
        self._awake = asyncio.Event()
        self._watchers = [asyncio.create_task(self._watch_end()), asyncio.create_task(self._watch_channel())]

    @property
    def alive(self) -> bool:
        return self._exit is None

    @property
    def guest(self) -> Guest:
        if self._guest is None or self._guest.closed.is_set():
            raise GuestUnreachable(
                "the agent inside the sandbox does not answer (it may be restarting, or was killed); try again shortly"
            )
        return self._guest

    @property
    def runs(self) -> bool:
        return self.alive and self._awake.is_set()

    def awake(self, awake: bool) -> None:
        if awake:
            self._awake.set()
        else:
            self._awake.clear()

    async def reachable(self, timeout_s: float) -> Guest:
        """The guest, once it can be talked to."""
        async with asyncio.timeout(timeout_s):
            while self._guest is None or self._guest.closed.is_set():
                await asyncio.sleep(0.005)
            return self._guest

    async def _watch_end(self) -> None:
        self._exit = await self.vm.wait()
        log.info("vm ended", vm=self.entry.vm_id, kind=self._exit.kind, detail=self._exit.detail)
        if self.entry.owner is not None:
            self._on_end(self.entry.owner, self._exit)

    async def _watch_channel(self) -> None:
        pause_s = 0.05
        while True:
            if self._guest is not None:
                await self._guest.closed.wait()
                await self._guest.aclose()
            await self._awake.wait()
            try:
                self._guest = await self._connect(str(self.vm.agent_socket), timeout_s=RECONNECT_TIMEOUT_S)
                pause_s = 0.05
            except ForkyardError as error:
                log.warning("agent unreachable", vm=self.entry.vm_id, error=error.message)
                self._guest = None
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, 5.0)

    def drop_old_connections(self) -> None:
        """It was restored elsewhere: what was open then has no other end here. Whoever waits for it learns that soon."""
        self.has_old_connections = True
        self._watchers.append(asyncio.create_task(self._drop_old_connections()))

    async def connected(self) -> bool:
        """Whether a copy of it, made a moment ago, may have connections whose other end is elsewhere."""
        if self.has_old_connections:
            return True
        try:
            return not await self.doorway.quiet()
        except OSError as error:
            log.warning("the connections of a machine are not known", vm=self.entry.vm_id, error=str(error))
            return True

    async def _drop_old_connections(self) -> None:
        try:
            open_ = await self.guest.connections()
            if open_:
                # Asked for in this order, what was opened since is known here.
                known = await self.doorway.guest_ports()
                await self.guest.disconnect([name for name, port in open_.items() if port not in known])
            self.has_old_connections = False
        except (ForkyardError, OSError) as error:
            log.warning("old connections were not dropped", vm=self.entry.vm_id, error=str(error))

    async def detach(self) -> None:
        await self._let_go()
        await self.vm.detach()

    async def kill(self) -> None:
        await self._let_go()
        await self.vm.kill()

    async def shut_down(self, command: str, alone: list[str], timeout_s: float) -> None:
        """Ask the guest to end; whatever it does, it has ended when this returns. `alone`: where there is no shell."""
        self._watchers[0].cancel()
        with contextlib.suppress(ForkyardError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                try:
                    await self.guest.start(ExecSpec(command))
                except CommandNotFound:
                    await self.guest.start(ExecSpec(alone))
                await self.vm.wait()
        await self.kill()

    async def _let_go(self) -> None:
        for task in self._watchers:
            task.cancel()
        for task in self._watchers:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self.doorway.close()
        if self._guest is not None:
            await self._guest.aclose()
