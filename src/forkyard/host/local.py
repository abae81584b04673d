"""This machine as a host: implements the `hosts.base.Host` seam over a VM driver.

Owns: the journal, the user ids of VMs, one `Machine` per running VM, templates. Every acquired thing is pushed on an
exit stack before the next is acquired, so a create that fails or is cancelled at any line leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import structlog

from forkyard.errors import NoCapacity, OperationTimeout, SandboxNotFound
from forkyard.guest.base import Connector, Guest, Identity
from forkyard.host.journal import Entry, Journal, host_boot_id
from forkyard.host.machine import Machine
from forkyard.host.templates import Templates
from forkyard.hosts.base import Created, CreateSpec, Ended, Incarnation, Recovered
from forkyard.images import BaseImage
from forkyard.models import Check, Milestone, SandboxLogs, Shape
from forkyard.settings import Settings
from forkyard.vmm.base import Driver, VmExit, VmUsage

log = structlog.get_logger(__name__)

CONSOLE_TAIL_BYTES = 64 * 1024


def log_progress(step: str, fraction: float | None = None) -> None:
    log.info(step, done=None if fraction is None else f"{fraction:.0%}")


class LocalHost:
    def __init__(
        self,
        settings: Settings,
        driver: Driver,
        connect: Connector,
        image: BaseImage,
    ) -> None:
        self._settings = settings
        self._driver = driver
        self._connect = connect
        self._journal = Journal(settings.state_dir / "vms")
        self._uids: set[int] = set()
        self._machines: dict[Incarnation, Machine] = {}
        self._dead: dict[Incarnation, Entry] = {}
        self._ended: asyncio.Queue[Ended] = asyncio.Queue()
        self.templates = Templates(
            cache_dir=settings.cache_dir,
            ram_dir=settings.ram_dir,
            driver=driver,
            connect=connect,
            journal=self._journal,
            allocate_uid=self._allocate_uid,
            release_uid=self._uids.discard,
            image=image,
            boot_timeout_s=settings.boot_timeout_s,
        )

    @property
    def accel(self) -> str:
        return self._driver.accel

    async def start(self) -> Recovered:
        boot_id = host_boot_id()
        entries = self._journal.entries()
        rebooted = bool(entries) and all(entry.boot_id != boot_id for entry in entries)
        for path in self._journal.stray_directories():
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        await asyncio.gather(*(self._recover(entry, boot_id) for entry in entries))
        self.templates.forget_ram({machine.entry.template for machine in self._machines.values()})
        return Recovered(frozenset(self._machines), frozenset(self._dead), rebooted)

    async def _recover(self, entry: Entry, boot_id: str) -> None:
        record = self._journal.record(entry)
        vm = None
        if entry.ready and entry.boot_id == boot_id:
            vm = await self._driver.adopt(record)
        if vm is not None:
            machine = Machine(entry, vm, None, self._connect, self._machine_ended)
            self._machines[machine.incarnation] = machine
            self._uids.add(entry.uid)
            log.info("vm adopted", vm=entry.vm_id, pid=vm.pid)
            return
        await self._driver.reclaim(record)
        if entry.ready and entry.sandbox_id is not None:
            self._dead[Incarnation(entry.sandbox_id, entry.incarnation)] = entry
        else:
            log.info("half-made vm removed", vm=entry.vm_id)
            await asyncio.to_thread(self._journal.forget, entry)

    async def stop(self, *, destroy: bool = False) -> None:
        if destroy:
            for incarnation in [*self._machines, *self._dead]:
                await self.destroy(incarnation)
            await asyncio.to_thread(shutil.rmtree, self._settings.ram_dir, ignore_errors=True)
            return
        for machine in list(self._machines.values()):
            await machine.detach()
        self._machines.clear()

    async def create(self, incarnation: Incarnation, spec: CreateSpec) -> Created:
        template = await self.templates.ensure(spec.shape, log_progress)
        started = time.monotonic()
        milestones: list[Milestone] = []

        def note(name: str) -> None:
            milestones.append(Milestone(name=name, at_ms=round((time.monotonic() - started) * 1000, 1)))

        async with contextlib.AsyncExitStack() as undo:
            uid = self._allocate_uid()
            undo.callback(self._uids.discard, uid)
            entry = Entry(
                vm_id=str(incarnation),
                uid=uid,
                shape=spec.shape,
                boot_id=host_boot_id(),
                sandbox_id=incarnation.sandbox_id,
                incarnation=incarnation.number,
                template=template.key,
            )
            undo.callback(self._journal.forget, entry)
            record = self._journal.begin(entry)
            undo.push_async_callback(self._driver.reclaim, record)
            try:
                async with asyncio.timeout(self._settings.create_timeout_s):
                    vm = await self._driver.restore(record, template.snapshot)
                    undo.push_async_callback(vm.kill)
                    note("restored")
                    await vm.cont()
                    guest = await self._connect(
                        str(vm.agent_socket), timeout_s=self._settings.create_timeout_s, fresh=True
                    )
                    undo.push_async_callback(guest.aclose)
                    note("agent-connected")
                    await guest.adopt_identity(
                        Identity(incarnation.sandbox_id, incarnation.sandbox_id, os.urandom(64), spec.env, new=True)
                    )
                    note("ready")
            except TimeoutError:
                raise OperationTimeout(
                    f"the machine did not answer within {self._settings.create_timeout_s:.0f} s; `forkyard doctor` "
                    "may tell why (an overloaded host is the usual reason)"
                ) from None
            entry = self._journal.mark_ready(entry, milestones)
            self._machines[incarnation] = Machine(entry, vm, guest, self._connect, self._machine_ended)
            undo.pop_all()
        return Created(template.key, milestones)

    async def destroy(self, incarnation: Incarnation) -> None:
        machine = self._machines.pop(incarnation, None)
        entry = machine.entry if machine else self._dead.get(incarnation)
        if machine is not None:
            await machine.kill()
        if entry is None:
            return
        await self._driver.reclaim(self._journal.record(entry))
        await asyncio.to_thread(self._journal.forget, entry)
        self._dead.pop(incarnation, None)
        self._uids.discard(entry.uid)

    def guest(self, incarnation: Incarnation) -> Guest:
        return self._machine(incarnation).guest

    async def logs(self, incarnation: Incarnation) -> SandboxLogs:
        machine = self._machines.get(incarnation)
        entry = machine.entry if machine else self._dead.get(incarnation)
        if entry is None:
            raise SandboxNotFound(f"no machine of sandbox {incarnation.sandbox_id} is on this host")
        console = await self._driver.console(self._journal.record(entry), CONSOLE_TAIL_BYTES)
        return SandboxLogs(
            template_boot=self.templates.milestones(entry.template), create=entry.milestones, console=console
        )

    async def usage(self, incarnation: Incarnation) -> VmUsage:
        return await self._machine(incarnation).vm.usage()

    async def checks(self) -> list[Check]:
        return [*await self._driver.checks(), _free_space(self._settings.state_dir)]

    async def ended(self) -> AsyncIterator[Ended]:
        while True:
            yield await self._ended.get()

    async def prepare(self, shape: Shape) -> str:
        return (await self.templates.ensure(shape, log_progress)).key

    def _machine(self, incarnation: Incarnation) -> Machine:
        machine = self._machines.get(incarnation)
        if machine is None or not machine.alive:
            raise SandboxNotFound(f"sandbox {incarnation.sandbox_id} does not run on this host")
        return machine

    def _machine_ended(self, incarnation: Incarnation, exit_: VmExit) -> None:
        self._ended.put_nowait(Ended(incarnation, exit_))

    def _allocate_uid(self) -> int:
        base, count = self._settings.vm_uid_base, self._settings.vm_uid_count
        uid = next((uid for uid in range(base, base + count) if uid not in self._uids), None)
        if uid is None:
            raise NoCapacity(
                f"all {count} user ids for VMs are in use; delete sandboxes, or raise FORKYARD_VM_UID_COUNT"
            )
        self._uids.add(uid)
        return uid


def _free_space(directory: Path) -> Check:
    free_gib = shutil.disk_usage(directory).free / 2**30
    if free_gib < 5:
        return Check(
            name="disk",
            status="warning",
            summary=f"{free_gib:.1f} GiB free at {directory}",
            advice="Free some space, or set FORKYARD_STATE_DIR to a larger disk.",
        )
    return Check(name="disk", status="ok", summary=f"{free_gib:.0f} GiB free at {directory}")
