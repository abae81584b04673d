"""One VM's supervisor: owns its process, its channel, and what becomes of them.

Two watchers run as long as the VM does: one waits for its end and reports it, one reconnects the channel when it breaks
(the guest restarted its agent, say). `destroy` is the undo of everything; `detach` lets go and leaves the VM running.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from forkyard.errors import ForkyardError, GuestUnreachable
from forkyard.guest.base import Connector, Guest
from forkyard.host.journal import Entry
from forkyard.hosts.base import Incarnation
from forkyard.vmm.base import Vm, VmExit

log = structlog.get_logger(__name__)

RECONNECT_TIMEOUT_S = 30.0


class Machine:
    def __init__(
        self,
        entry: Entry,
        vm: Vm,
        guest: Guest | None,
        connect: Connector,
        on_end: Callable[[Incarnation, VmExit], None],
    ) -> None:
        assert entry.sandbox_id is not None
        self.entry = entry
        self.vm = vm
        self.incarnation = Incarnation(entry.sandbox_id, entry.incarnation)
        self._guest = guest
        self._connect = connect
        self._on_end = on_end
        self._exit: VmExit | None = None
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

    async def _watch_end(self) -> None:
        self._exit = await self.vm.wait()
        log.info("vm ended", vm=self.entry.vm_id, kind=self._exit.kind, detail=self._exit.detail)
        self._on_end(self.incarnation, self._exit)

    async def _watch_channel(self) -> None:
        pause_s = 0.05
        while True:
            if self._guest is not None:
                await self._guest.closed.wait()
                await self._guest.aclose()
            try:
                self._guest = await self._connect(str(self.vm.agent_socket), timeout_s=RECONNECT_TIMEOUT_S)
                pause_s = 0.05
            except ForkyardError as error:
                log.warning("agent unreachable", vm=self.entry.vm_id, error=error.message)
                self._guest = None
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, 5.0)

    async def detach(self) -> None:
        await self._stop_watching()
        if self._guest is not None:
            await self._guest.aclose()
        await self.vm.detach()

    async def kill(self) -> None:
        await self._stop_watching()
        if self._guest is not None:
            await self._guest.aclose()
        await self.vm.kill()

    async def _stop_watching(self) -> None:
        for task in self._watchers:
            task.cancel()
        for task in self._watchers:
            with contextlib.suppress(asyncio.CancelledError):
                await task
