"""A host that is only memory: the seam's fake, for tests of the control plane and the API.

Owns: machines that are nothing but a guest object. They live in a `MemoryWorld`; a second `MemoryHost` on the same
world finds them again, as a new daemon on a real host does. Never does: files, processes, VMs.

    world = MemoryWorld()
    host = MemoryHost(world, FaultPlan(delay_s={"create": 0.1}, fail={"destroy": HostFailure("stuck")}))
    host.end(incarnation, ExitKind.PANIC, "the guest kernel panicked")

Steps that a `FaultPlan` can name: start, create, destroy, logs, usage, checks, prepare.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forkyard.errors import HostFailure, SandboxNotFound
from forkyard.guest.base import Guest
from forkyard.hosts.base import Created, CreateSpec, Ended, Host, Incarnation, Recovered
from forkyard.models import Check, Milestone, SandboxLogs, Shape
from forkyard.vmm.base import ExitKind, FaultPlan, VmExit, VmUsage

NewGuest = Callable[[Incarnation, CreateSpec], Guest]


@dataclass
class MemoryMachine:
    guest: Guest
    exit: VmExit | None = None
    logs: SandboxLogs = field(
        default_factory=lambda: SandboxLogs(
            template_boot=[Milestone(name="kernel", at_ms=400.0), Milestone(name="agent-ready", at_ms=9000.0)],
            create=[Milestone(name="ready", at_ms=0.1)],
            console="memory console\n",
        )
    )


@dataclass
class MemoryWorld:
    """What would outlive the daemon."""

    machines: dict[Incarnation, MemoryMachine] = field(default_factory=dict)
    rebooted: bool = False


class MemoryHost:
    def __init__(self, new_guest: NewGuest, world: MemoryWorld | None = None, faults: FaultPlan | None = None) -> None:
        self.world = world or MemoryWorld()
        self.faults = faults or FaultPlan()
        #: When set to an event, a create waits for it at its last step.
        self.hold_creates: asyncio.Event | None = None
        self._new_guest = new_guest
        self._ended: asyncio.Queue[Ended] = asyncio.Queue()

    @property
    def accel(self) -> str:
        return "memory"

    async def start(self) -> Recovered:
        await self._step("start")
        machines = self.world.machines
        adopted = frozenset(incarnation for incarnation, machine in machines.items() if machine.exit is None)
        return Recovered(adopted, frozenset(machines) - adopted, self.world.rebooted)

    async def stop(self, *, destroy: bool = False) -> None:
        for incarnation in list(self.world.machines) if destroy else []:
            await self.destroy(incarnation)

    async def create(self, incarnation: Incarnation, spec: CreateSpec) -> Created:
        if incarnation in self.world.machines:
            raise HostFailure(f"machine {incarnation} exists already")
        await self._step("create")
        if self.hold_creates is not None:
            await self.hold_creates.wait()
        machine = self.world.machines[incarnation] = MemoryMachine(self._new_guest(incarnation, spec))
        return Created(_template(spec.shape), machine.logs.create)

    async def destroy(self, incarnation: Incarnation) -> None:
        await self._step("destroy")
        machine = self.world.machines.pop(incarnation, None)
        if machine is not None:
            await machine.guest.aclose()

    def guest(self, incarnation: Incarnation) -> Guest:
        return self._running(incarnation).guest

    async def logs(self, incarnation: Incarnation) -> SandboxLogs:
        await self._step("logs")
        return self._machine(incarnation).logs

    async def usage(self, incarnation: Incarnation) -> VmUsage:
        await self._step("usage")
        self._running(incarnation)
        return VmUsage(pss_mib=1.0, cpu_s=0.0)

    async def checks(self) -> list[Check]:
        await self._step("checks")
        return [Check(name="host", status="ok", summary="sandboxes are memory only")]

    async def ended(self) -> AsyncIterator[Ended]:
        while True:
            yield await self._ended.get()

    async def prepare(self, shape: Shape) -> str:
        await self._step("prepare")
        return _template(shape)

    def end(self, incarnation: Incarnation, kind: ExitKind, detail: str) -> None:
        """The machine ends by itself."""
        machine = self._running(incarnation)
        machine.exit = VmExit(kind, detail)
        self._ended.put_nowait(Ended(incarnation, machine.exit))

    def _machine(self, incarnation: Incarnation) -> MemoryMachine:
        machine = self.world.machines.get(incarnation)
        if machine is None:
            raise SandboxNotFound(f"no machine of sandbox {incarnation.sandbox_id} is on this host")
        return machine

    def _running(self, incarnation: Incarnation) -> MemoryMachine:
        machine = self._machine(incarnation)
        if machine.exit is not None:
            raise SandboxNotFound(f"sandbox {incarnation.sandbox_id} does not run on this host")
        return machine

    async def _step(self, name: str) -> None:
        if name in self.faults.delay_s:
            await asyncio.sleep(self.faults.delay_s[name])
        if name in self.faults.fail:
            raise self.faults.fail[name]


if TYPE_CHECKING:
    _host: type[Host] = MemoryHost


def _template(shape: Shape) -> str:
    return f"memory-{shape.vcpus}-{shape.memory_mib}-{shape.disk_gib}"
