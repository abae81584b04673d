"""A driver without a hypervisor, for tests of everything above it and for trying the daemon where no VM can run.

Its "processes" live in a `FakeWorld`, not in the driver: give the same world to a second driver, and it can adopt
what the first one started, as a new daemon does. Files that a host expects (RAM, disk, device state, console) are
made, nearly empty.

    world = FakeWorld()
    driver = FakeDriver(world, FaultPlan(delay_s={"restore": 0.1}, fail={"save": VmStartFailed("no room")}))
    world.panic("sandbox-1")             # the machine ends as if its kernel had panicked

Steps that a `FaultPlan` can name: boot, shell, load (both are `restore` too), adopt, reclaim, cont, stop, save, capture,
attach, take_out, seal_volume, kill, usage. `driver.faults` may be replaced at any time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forkyard.errors import HostFailure, VmStartFailed
from forkyard.models import Check
from forkyard.vmm.base import (
    BootSource,
    Captured,
    CaptureTarget,
    Driver,
    ExitKind,
    FaultPlan,
    SnapshotFiles,
    Start,
    VmCounters,
    VmExit,
    VmRecord,
    VmUsage,
    VolumeDisk,
)


@dataclass
class FakeProcess:
    record: VmRecord
    pid: int
    disk: Path
    volumes: dict[int, Path] = field(default_factory=dict)
    cpus_running: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    exit: VmExit | None = None

    def end(self, kind: ExitKind, detail: str) -> None:
        if self.exit is None:
            self.exit = VmExit(kind, detail)
            self.ended.set()


class FakeWorld:
    """The machine that fake VMs run on; it outlives drivers."""

    def __init__(self) -> None:
        self.processes: dict[str, FakeProcess] = {}
        self._pids = itertools.count(100_000)

    def spawn(self, record: VmRecord) -> FakeProcess:
        if self.alive(record.vm_id) is not None:
            raise VmStartFailed(f"VM {record.vm_id} runs already")
        process = FakeProcess(record, next(self._pids), record.disk)
        self.processes[record.vm_id] = process
        return process

    def alive(self, vm_id: str) -> FakeProcess | None:
        process = self.processes.get(vm_id)
        return process if process is not None and process.exit is None else None

    def crash(self, vm_id: str) -> None:
        self.processes[vm_id].end(ExitKind.CRASHED, "the hypervisor was killed by signal 11")

    def panic(self, vm_id: str) -> None:
        self.processes[vm_id].end(ExitKind.PANIC, "the guest kernel panicked")

    def shut_down(self, vm_id: str) -> None:
        self.processes[vm_id].end(ExitKind.SHUTDOWN, "the guest powered off")

    def reboot(self) -> None:
        """The host loses power."""
        for process in self.processes.values():
            process.end(ExitKind.CRASHED, "the host was restarted")
        self.processes.clear()


class FakeVm:
    def __init__(self, driver: FakeDriver, process: FakeProcess) -> None:
        self._driver = driver
        self._process = process

    @property
    def record(self) -> VmRecord:
        return self._process.record

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def agent_socket(self) -> Path:
        return self.record.dir / "agent.sock"

    @property
    def console_log(self) -> Path:
        return self.record.dir / "console.log"

    @property
    def disk(self) -> Path:
        return self._process.disk

    @property
    def volumes(self) -> dict[int, Path]:
        return dict(self._process.volumes)

    async def load(self, snapshot: SnapshotFiles, volumes: Sequence[VolumeDisk] = ()) -> None:
        await self._driver.step("load")
        for file in (snapshot.ram, snapshot.device_state, snapshot.disk, snapshot.layer):
            if file is not None and not file.exists():
                raise VmStartFailed(f"the snapshot has no {file.name} ({file})")
        _make_disk(self.disk)
        await self.attach(volumes)

    async def attach(self, volumes: Sequence[VolumeDisk]) -> None:
        await self._driver.step("attach")
        for volume in volumes:
            if not volume.below.exists():
                raise VmStartFailed(f"there is no volume disk {volume.below}")
            _make_disk(volume.disk)
            self._process.volumes[volume.slot] = volume.disk

    async def take_out(self, slot: int) -> None:
        await self._driver.step("take_out")
        self._process.volumes.pop(slot).unlink()

    async def seal_volume(self, slot: int, next_disk: Path) -> Path:
        await self._driver.step("seal_volume")
        _make_disk(next_disk)
        before, self._process.volumes[slot] = self._process.volumes[slot], next_disk
        return before

    async def capture(self, target: CaptureTarget, *, keep_running: bool) -> Captured:
        await self._driver.step("capture")
        before = self._process.disk
        if isinstance(target.layer, Path):
            _touch(target.layer, b"\0" * 4096)
        else:
            target.layer.save([(0, 4096)], memoryview(bytes(4096)))
        _touch(target.device_state, b"fake device state")
        if target.next_disk is not None:
            _make_disk(target.next_disk)
            self._process.disk = target.next_disk
        volumes = self.volumes
        for slot, path in target.next_volumes.items():
            _make_disk(path)
            self._process.volumes[slot] = path
        self._process.cpus_running = self._process.cpus_running and keep_running
        return Captured(paused_ms=1.0, disk=before, volumes=volumes)

    async def flatten(self, base: Path) -> None:
        if not base.exists():
            raise HostFailure(f"there is no {base}")
        await self._driver.step("flatten")

    async def cont(self) -> None:
        await self._driver.step("cont")
        self._process.cpus_running = True

    async def stop(self) -> None:
        await self._driver.step("stop")
        self._process.cpus_running = False

    async def save(self, device_state: Path) -> None:
        await self._driver.step("save")
        _touch(device_state, b"fake device state")

    async def wait(self) -> VmExit:
        await self._process.ended.wait()
        assert self._process.exit is not None
        return self._process.exit

    async def kill(self) -> None:
        await self._driver.step("kill")
        self._process.end(ExitKind.KILLED, "killed by the daemon")

    async def usage(self) -> VmUsage:
        await self._driver.step("usage")
        return VmUsage(pss_mib=1.0, cpu_s=0.0)

    def counters(self) -> VmCounters | None:
        return VmCounters(cpu_s=0.0, resident_bytes=2**20) if self._process.exit is None else None

    async def detach(self) -> None:
        """The process stays in the world."""


class FakeDriver:
    def __init__(self, world: FakeWorld | None = None, faults: FaultPlan | None = None) -> None:
        self.world = world or FakeWorld()
        self.faults = faults or FaultPlan()

    @property
    def accel(self) -> str:
        return "fake"

    @property
    def fingerprint(self) -> str:
        return "fake-1"

    async def step(self, name: str) -> None:
        """Where a fault plan bites."""
        if name in self.faults.delay_s:
            await asyncio.sleep(self.faults.delay_s[name])
        if name in self.faults.fail:
            raise self.faults.fail[name]

    async def boot(self, record: VmRecord, source: BootSource, ram: Path, *, template: bool = True) -> FakeVm:  # noqa: ARG002
        await self.step("boot")
        if template or not ram.exists():
            _touch(ram, b"\0" * 4096)
        vm = self._spawn(record)
        _make_disk(record.disk)
        return vm

    async def shell(self, record: VmRecord, ram: Path) -> FakeVm:
        await self.step("shell")
        if not ram.exists():
            raise VmStartFailed(f"there is no RAM file {ram}")
        return self._spawn(record)

    async def restore(self, record: VmRecord, snapshot: SnapshotFiles) -> FakeVm:
        await self.step("restore")
        vm = await self.shell(record, snapshot.ram)
        try:
            await vm.load(snapshot)
        except BaseException:
            await self.reclaim(record)
            raise
        return vm

    def _spawn(self, record: VmRecord) -> FakeVm:
        record.dir.mkdir(parents=True, exist_ok=True)
        vm = FakeVm(self, self.world.spawn(record))
        _touch(vm.console_log, b"fake console\n")
        return vm

    async def adopt(self, record: VmRecord) -> FakeVm | None:
        await self.step("adopt")
        process = self.world.alive(record.vm_id)
        return None if process is None else FakeVm(self, process)

    async def reclaim(self, record: VmRecord) -> None:
        await self.step("reclaim")
        process = self.world.processes.pop(record.vm_id, None)
        if process is not None:
            process.end(ExitKind.KILLED, "reclaimed")

    async def console(self, record: VmRecord, tail_bytes: int) -> str:
        path = record.dir / "console.log"
        return path.read_bytes()[-tail_bytes:].decode() if path.exists() else ""

    async def checks(self) -> list[Check]:
        return [
            Check(
                name="driver",
                status="warning",
                summary="the fake driver is in use: no sandbox is a real machine",
                advice="Use the QEMU driver.",
            )
        ]

    async def start_idle_ms(self, scratch: Path) -> Start:  # noqa: ARG002
        return Start(greeting_ms=0.0, answer_ms=0.0)


if TYPE_CHECKING:
    _driver: Driver = FakeDriver()


def _make_disk(path: Path) -> None:
    if not path.exists():
        _touch(path, b"fake disk")


def _touch(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
