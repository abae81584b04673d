"""A host that is only memory: the seam's fake, for tests of the control plane and the API.

Owns: machines that are nothing but a guest object, and snapshots of them. They live in a `MemoryWorld`; a second
`MemoryHost` on the same world finds them again, as a new daemon on a real host does. Never does: files, processes, VMs.

    world = MemoryWorld()
    host = MemoryHost(world, FaultPlan(delay_s={"create": 0.1}, fail={"destroy": HostFailure("stuck")}))
    host.end(incarnation, ExitKind.PANIC, "the guest kernel panicked")

It is strict: a verb that the state of a machine does not allow is an error, so a control plane that mixes up its turns
is found out. Steps that a `FaultPlan` can name are the verbs of the seam: start, create, destroy, fork, pause, cool,
resume, power_off, boot, set_network, connect, snapshot, rollback, delete_snapshot, make_volume,
commit_volume, delete_volume, stored_bytes, logs, usage, checks, prepare, import_image, delete_image (of `images`);
and `child.N`, the child number N (from 0) of a fork. `pause.done`, `resume.done`, `boot.done`, `rollback.done`,
`snapshot.done` and `create.done` come when it is done and not told yet. `host.holds[step] = event` lets every caller wait
at that step.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from forkyard.errors import (
    Conflict,
    ForkyardError,
    HostFailure,
    PortClosed,
    RegistryUnreachable,
    SandboxNotFound,
    SnapshotCorrupt,
    SnapshotNotFound,
    VolumeChanged,
    VolumeNotFound,
)
from forkyard.guest.base import Guest
from forkyard.hosts.base import (
    Capacity,
    Created,
    CreateSpec,
    Ended,
    Forked,
    Host,
    Incarnation,
    Load,
    Recovered,
    SnapshotMade,
    VolumeVersion,
)
from forkyard.models import Check, Milestone, SandboxLogs, Shape
from forkyard.models.bases import ImageConfig, ImageInfo
from forkyard.models.network import EgressRecord
from forkyard.net.base import Network, Traffic
from forkyard.vmm.base import ExitKind, FaultPlan, VmExit, VmUsage

NewGuest = Callable[[Incarnation, CreateSpec], Guest]

_PAUSED_MS = 0.5
_MIB = 2**20
_AMPLE = Capacity(memory_mib=2**20, disk_free_bytes=2**50)


class Power(StrEnum):
    RUNNING = "running"
    HOT = "hot"  # CPUs stopped, memory kept
    COLD = "cold"  # memory on disk, no process
    OFF = "off"  # only the disk


@runtime_checkable
class Copyable(Protocol):
    def twin(self, *, memory: bool) -> Guest:
        """A guest with the same files, and with the same processes if `memory`."""
        ...


@dataclass
class MemoryMachine:
    guest: Guest
    spec: CreateSpec = field(default_factory=lambda: CreateSpec(Shape()))
    power: Power = Power.RUNNING
    exit: VmExit | None = None
    corrupt: bool = False  # what was saved of its memory is damaged
    stored_bytes: int = _MIB
    traffic: Traffic = field(default_factory=Traffic)
    #: What its door enforces. None: it was adopted, and nobody has said yet.
    network: Network | None = None
    logs: SandboxLogs = field(
        default_factory=lambda: SandboxLogs(
            template_boot=[Milestone(name="kernel", at_ms=400.0), Milestone(name="agent-ready", at_ms=9000.0)],
            create=[Milestone(name="ready", at_ms=0.1)],
            console="memory console\n",
        )
    )


@dataclass(frozen=True)
class MemorySnapshot:
    guest: Guest
    spec: CreateSpec


@dataclass
class MemoryWorld:
    """What would outlive the daemon."""

    machines: dict[Incarnation, MemoryMachine] = field(default_factory=dict)
    snapshots: dict[str, MemorySnapshot] = field(default_factory=dict)
    volumes: dict[str, list[VolumeVersion]] = field(default_factory=dict)
    #: The number of the last version of each volume that has had more than one.
    highest: dict[str, int] = field(default_factory=dict)
    rebooted: bool = False
    images: list[ImageInfo] = field(default_factory=list)
    #: What registries have, by name.
    registry: dict[str, ImageConfig] = field(default_factory=dict)
    credentials: list[tuple[str, str]] = field(default_factory=list)

    def reboot(self) -> None:
        """The host is restarted: of every machine that was not saved only the disk is left."""
        self.rebooted = True
        for machine in self.machines.values():
            if machine.exit is None and machine.power is not Power.COLD:
                machine.power = Power.OFF


class MemoryImages:
    def __init__(self, world: MemoryWorld, step: Callable[[str], Awaitable[None]]) -> None:
        self._world = world
        self._step = step

    def base_config(self) -> ImageConfig:
        return ImageConfig(env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})

    async def find(self, name: str) -> ImageInfo | None:
        return next((one for one in self._world.images if name == one.id or name in one.names), None)

    async def all(self) -> list[ImageInfo]:
        return list(self._world.images)

    async def delete(self, image_id: str) -> None:
        await self._step("delete_image")
        if any(machine.spec.image == image_id for machine in self._world.machines.values()):
            raise Conflict(f"a disk rests on image {image_id}")
        self._world.images = [one for one in self._world.images if one.id != image_id]

    async def import_(
        self,
        name: str,
        *,
        archive: Path | None = None,
        credentials: tuple[str, str] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> ImageInfo:
        """Its content is its name: whatever is known of images is in `world.registry`."""
        await self._step("import_image")
        if tell is not None:
            tell(f"fetching {name}")
        if archive is None and name != "scratch" and name not in self._world.registry:
            raise RegistryUnreachable(f"no registry has {name}")
        if credentials is not None:
            self._world.credentials.append(credentials)
        made = ImageInfo(
            id=f"img-{hashlib.sha256(name.encode()).hexdigest()[:16]}",
            names=[name],
            config=self._world.registry.get(name, ImageConfig()),
            systemd=False,
            size_bytes=0,
            created_at=datetime.now(UTC),
            used_at=datetime.now(UTC),
        )
        self._world.images = [*(one for one in self._world.images if one.id != made.id), made]
        return made


class MemoryHost:
    def __init__(self, new_guest: NewGuest, world: MemoryWorld | None = None, faults: FaultPlan | None = None) -> None:
        self.world = world or MemoryWorld()
        self.faults = faults or FaultPlan()
        #: What this host has; a test may make it small.
        self.room = _AMPLE
        #: Callers wait for these events at the step of that name.
        self.holds: dict[str, asyncio.Event] = {}
        #: Every verb called, as (step, incarnation), in order.
        self.calls: list[tuple[str, Incarnation]] = []
        #: Values that guests have written somewhere; a test puts them in.
        self.left_behind: set[bytes] = set()
        #: What doors would have recorded; a test puts it in.
        self.egress_records: asyncio.Queue[EgressRecord] = asyncio.Queue()
        self.images = MemoryImages(self.world, self._step)
        self._new_guest = new_guest
        self._ended: asyncio.Queue[Ended] = asyncio.Queue()

    @property
    def hold_creates(self) -> asyncio.Event | None:
        return self.holds.get("create")

    @hold_creates.setter
    def hold_creates(self, event: asyncio.Event | None) -> None:
        if event is None:
            self.holds.pop("create", None)
        else:
            self.holds["create"] = event

    @property
    def accel(self) -> str:
        return "memory"

    async def start(self) -> Recovered:
        await self._step("start")
        found: dict[str, set[Incarnation]] = {"adopted": set(), "paused": set(), "stopped": set(), "dead": set()}
        for incarnation, machine in self.world.machines.items():
            machine.network = None
            found[_found(machine)].add(incarnation)
        return Recovered(
            frozenset(found["adopted"]),
            frozenset(found["paused"]),
            frozenset(found["stopped"]),
            frozenset(found["dead"]),
            self.world.rebooted,
        )

    async def stop(self, *, destroy: bool = False) -> None:
        for incarnation in list(self.world.machines) if destroy else []:
            await self.destroy(incarnation)

    # ── machines ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(self, incarnation: Incarnation, spec: CreateSpec) -> Created:
        self._vacant(incarnation)
        await self._step("create", incarnation)
        versions = [replace(one, version=self._version(one.volume_id, one.version).number) for one in spec.volumes]
        spec = replace(spec, volumes=tuple(versions))
        fresh = spec.snapshot_id is None
        guest = self._new_guest(incarnation, spec) if fresh else await self._restored(incarnation, spec)
        created = self._add(incarnation, spec, guest)
        await self._step("create.done", incarnation)
        return created

    async def destroy(self, incarnation: Incarnation) -> None:
        await self._step("destroy", incarnation)
        machine = self.world.machines.pop(incarnation, None)
        if machine is not None:
            self._leave_volumes(incarnation, machine)
            await machine.guest.aclose()

    async def fork(
        self, source: Incarnation, children: Sequence[Incarnation], env: Mapping[str, str], network: Network
    ) -> Forked:
        machine = self._alive(source)
        await self._step("fork", source)
        machine = self._alive(source)
        made: list[Created | ForkyardError] = []
        for number, child in enumerate(children):
            try:
                await self._step(f"child.{number}", child)
                self._vacant(child)
                copies = tuple(replace(one, mode="ro" if one.mode == "ro" else "cow") for one in machine.spec.volumes)
                spec = replace(machine.spec, env=dict(env), network=network, volumes=copies)
                guest = await self.copy_guest(child, spec, machine.guest, memory=True)
                made.append(self._add(child, spec, guest))
            except ForkyardError as error:
                made.append(error)
        return Forked(_PAUSED_MS if machine.power is Power.RUNNING else 0.0, made)

    async def pause(self, incarnation: Incarnation) -> None:
        self._in_power(incarnation, Power.RUNNING)
        await self._step("pause", incarnation)
        self._in_power(incarnation, Power.RUNNING).power = Power.HOT
        await self._step("pause.done", incarnation)

    async def cool(self, incarnation: Incarnation) -> None:
        self._in_power(incarnation, Power.HOT, Power.COLD)
        await self._step("cool", incarnation)
        machine = self._in_power(incarnation, Power.HOT, Power.COLD)
        if machine.power is Power.HOT:
            saved = await self.copy_guest(incarnation, machine.spec, machine.guest, memory=True)
            await _break(machine.guest)
            machine.guest = saved
            machine.power = Power.COLD

    async def resume(self, incarnation: Incarnation, successor: Incarnation, network: Network) -> Incarnation:
        self._in_power(incarnation, Power.HOT, Power.COLD)
        await self._step("resume", incarnation)
        machine = self._in_power(incarnation, Power.HOT, Power.COLD)
        if machine.power is Power.COLD:
            if machine.corrupt:
                raise SnapshotCorrupt(f"what was saved of {incarnation} is damaged; boot it: resume(memory=False)")
            self._add(
                successor,
                replace(machine.spec, network=network),
                await self.copy_guest(successor, machine.spec, machine.guest, memory=True),
                machine.stored_bytes,
            )
            incarnation = successor
        else:
            machine.power = Power.RUNNING
            machine.network = network
        await self._step("resume.done", incarnation)
        return incarnation

    async def power_off(self, incarnation: Incarnation) -> None:
        self._machine(incarnation)
        await self._step("power_off", incarnation)
        machine = self._machine(incarnation)
        machine.power, machine.exit = Power.OFF, None
        await _break(machine.guest)

    async def boot(self, incarnation: Incarnation, successor: Incarnation, spec: CreateSpec) -> Created:
        self._replaceable(incarnation, successor)
        await self._step("boot", incarnation)
        old = self._replaceable(incarnation, successor)
        if spec.shape.disk_gib < old.spec.shape.disk_gib:
            raise HostFailure(f"the disk of {incarnation} is larger than {spec.shape.disk_gib} GiB")
        guest = await self.copy_guest(successor, spec, old.guest, memory=False)
        created = await self._replace(incarnation, successor, spec, guest)
        await self._step("boot.done", incarnation)
        return created

    async def rollback(self, incarnation: Incarnation, successor: Incarnation, spec: CreateSpec) -> Created:
        self._replaceable(incarnation, successor)
        await self._step("rollback", incarnation)
        self._replaceable(incarnation, successor)
        created = await self._replace(incarnation, successor, spec, await self._restored(successor, spec))
        await self._step("rollback.done", incarnation)
        return created

    # ── snapshots ────────────────────────────────────────────────────────────────────────────────────────────────

    async def snapshot(self, incarnation: Incarnation, snapshot_id: str) -> SnapshotMade:
        self._alive(incarnation)
        await self._step("snapshot", incarnation)
        machine = self._alive(incarnation)
        guest = await self.copy_guest(incarnation, machine.spec, machine.guest, memory=True)
        self.world.snapshots[snapshot_id] = MemorySnapshot(guest, machine.spec)
        await self._step("snapshot.done", incarnation)
        return SnapshotMade(_MIB, _PAUSED_MS if machine.power is Power.RUNNING else 0.0)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        await self._step("delete_snapshot")
        self.world.snapshots.pop(snapshot_id, None)

    async def find_in_snapshot(self, snapshot_id: str, values: Sequence[bytes], *, parent: str | None) -> set[int]:  # noqa: ARG002
        await self._step("find_in_snapshot")
        return {index for index, value in enumerate(values) if value in self.left_behind}

    # ── volumes ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def make_volume(self, volume_id: str, size_bytes: int, *, for_all: bool = False) -> None:  # noqa: ARG002
        await self._step("make_volume")
        self.world.volumes.setdefault(volume_id, [VolumeVersion(1, size_bytes, False, None, time.time())])

    async def volume_versions(self, volume_id: str) -> list[VolumeVersion]:
        return list(self.world.volumes.get(volume_id, []))

    async def keep_version(self, volume_id: str, number: int | None = None) -> VolumeVersion:
        kept = replace(self._version(volume_id, number), kept=True)
        versions = self.world.volumes[volume_id]
        versions[[version.number for version in versions].index(kept.number)] = kept
        return kept

    async def drop_version(self, volume_id: str, number: int) -> None:
        self.world.volumes[volume_id].remove(self._version(volume_id, number))

    async def commit_volume(
        self, incarnation: Incarnation, path: str, *, force: bool, kept: bool = True
    ) -> VolumeVersion:
        await self._step("commit_volume", incarnation)
        machine = self._in_power(incarnation, Power.RUNNING)
        mount = next((mount for mount in machine.spec.volumes if mount.path == path), None)
        if mount is None:
            raise VolumeNotFound(f"sandbox {incarnation.sandbox_id} has no volume at {path}")
        newest = self._version(mount.volume_id, None).number
        if mount.given == "cow" and mount.version not in (None, newest) and not force:
            raise VolumeChanged(f"the volume is at version {newest} now", version=newest, began_with=mount.version)
        return self._new_version(mount.volume_id, incarnation.sandbox_id, kept=kept)

    async def delete_volume(self, volume_id: str) -> None:
        await self._step("delete_volume")
        self.world.volumes.pop(volume_id, None)

    async def volume_bytes(self, volume_id: str) -> int:
        return _MIB * len(self.world.volumes.get(volume_id, []))

    def _leave_volumes(self, incarnation: Incarnation, machine: MemoryMachine) -> None:
        succeeded = any(other.sandbox_id == incarnation.sandbox_id for other in self.world.machines)
        for mount in machine.spec.volumes:
            if mount.given == "rw" and mount.volume_id in self.world.volumes and not succeeded:
                self._new_version(mount.volume_id, incarnation.sandbox_id, kept=False)

    def _new_version(self, volume_id: str, source: str, *, kept: bool) -> VolumeVersion:
        newest = self._version(volume_id, None)
        number = self.world.highest[volume_id] = self.world.highest.get(volume_id, 1) + 1
        made = VolumeVersion(number, newest.size_bytes, kept, source, time.time())
        self.world.volumes[volume_id] = [*(v for v in self.world.volumes[volume_id] if v.kept), made]
        return made

    def _version(self, volume_id: str, number: int | None) -> VolumeVersion:
        for version in reversed(self.world.volumes.get(volume_id, [])):
            if number in (None, version.number):
                return version
        raise VolumeNotFound(f"the volume has no version {number or ''}".rstrip())

    # ── network ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def set_network(self, incarnation: Incarnation, network: Network) -> None:
        await self._step("set_network", incarnation)
        self._alive(incarnation).network = network

    async def connect(self, incarnation: Incarnation, port: int) -> socket.socket:
        """The loopback of this machine stands for that of the guest."""
        await self._step("connect", incarnation)
        self._in_power(incarnation, Power.RUNNING)
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
        except ConnectionRefusedError:
            made.close()
            raise PortClosed(f"nothing listens on port {port} in the sandbox") from None
        except BaseException:
            made.close()
            raise
        return made

    def traffic(self, incarnation: Incarnation) -> Traffic:
        machine = self.world.machines.get(incarnation)
        return Traffic() if machine is None else machine.traffic

    def egress(self) -> AsyncIterator[EgressRecord]:
        return self._records()

    async def _records(self) -> AsyncIterator[EgressRecord]:
        while True:
            yield await self.egress_records.get()

    # ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def stored_bytes(self, incarnation: Incarnation) -> int:
        await self._step("stored_bytes")
        machine = self.world.machines.get(incarnation)
        return 0 if machine is None else machine.stored_bytes

    def capacity(self) -> Capacity:
        return self.room

    def guest(self, incarnation: Incarnation) -> Guest:
        machine = self._alive(incarnation)
        if machine.power is not Power.RUNNING:
            raise SandboxNotFound(f"sandbox {incarnation.sandbox_id} does not run on this host: it is {machine.power}")
        return machine.guest

    async def logs(self, incarnation: Incarnation) -> SandboxLogs:
        await self._step("logs")
        return self._machine(incarnation).logs

    async def usage(self, incarnation: Incarnation) -> VmUsage:
        await self._step("usage")
        self._alive(incarnation)
        return VmUsage(pss_mib=1.0, cpu_s=0.0)

    async def loads(self) -> Mapping[Incarnation, Load]:
        """Half of a processor is busy in each."""
        running = (one for one, machine in self.world.machines.items() if machine.power is Power.RUNNING)
        return {one: Load(time.monotonic() / 2, 64 * _MIB, 512 * _MIB) for one in running}

    async def checks(self) -> list[Check]:
        await self._step("checks")
        return [Check(name="host", status="ok", summary="sandboxes are memory only")]

    async def ended(self) -> AsyncIterator[Ended]:
        while True:
            yield await self._ended.get()

    async def prepare(self, shape: Shape, image: str | None = None) -> str:
        await self._step("prepare")
        return _template(shape) + (f"-{image}" if image else "")

    def end(self, incarnation: Incarnation, kind: ExitKind, detail: str) -> None:
        """The machine ends by itself."""
        machine = self._alive(incarnation)
        machine.exit = VmExit(kind, detail)
        self._ended.put_nowait(Ended(incarnation, machine.exit))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def copy_guest(self, incarnation: Incarnation, spec: CreateSpec, source: Guest, *, memory: bool) -> Guest:
        """The guest of a machine made from another: with its processes if `memory`, else with its files alone. A
        subclass whose guests are more than objects overrides this."""
        return source.twin(memory=memory) if isinstance(source, Copyable) else self._new_guest(incarnation, spec)

    async def _restored(self, incarnation: Incarnation, spec: CreateSpec) -> Guest:
        snapshot = self.world.snapshots.get(spec.snapshot_id or "")
        if snapshot is None:
            raise SnapshotNotFound(f"there is no snapshot {spec.snapshot_id} on this host")
        return await self.copy_guest(incarnation, spec, snapshot.guest, memory=True)

    def _add(self, incarnation: Incarnation, spec: CreateSpec, guest: Guest, stored_bytes: int = _MIB) -> Created:
        self._vacant(incarnation)
        machine = self.world.machines[incarnation] = MemoryMachine(
            guest, spec, stored_bytes=stored_bytes, network=spec.network
        )
        return Created(_template(spec.shape), machine.logs.create)

    async def _replace(
        self, incarnation: Incarnation, successor: Incarnation, spec: CreateSpec, guest: Guest
    ) -> Created:
        created = self._add(successor, spec, guest)
        old = self.world.machines[incarnation]
        if old.power is not Power.COLD:
            old.power = Power.OFF
        await _break(old.guest)
        return created

    def _vacant(self, incarnation: Incarnation) -> None:
        if incarnation in self.world.machines:
            raise HostFailure(f"machine {incarnation} exists already")

    def _machine(self, incarnation: Incarnation) -> MemoryMachine:
        machine = self.world.machines.get(incarnation)
        if machine is None:
            raise SandboxNotFound(f"no machine of sandbox {incarnation.sandbox_id} is on this host")
        return machine

    def _alive(self, incarnation: Incarnation) -> MemoryMachine:
        machine = self._machine(incarnation)
        if machine.exit is not None or machine.power is Power.OFF:
            raise SandboxNotFound(f"sandbox {incarnation.sandbox_id} does not run on this host")
        return machine

    def _in_power(self, incarnation: Incarnation, *wanted: Power) -> MemoryMachine:
        machine = self._alive(incarnation)
        if machine.power not in wanted:
            raise HostFailure(f"machine {incarnation} is {machine.power}, not {' or '.join(wanted)}")
        return machine

    def _replaceable(self, incarnation: Incarnation, successor: Incarnation) -> MemoryMachine:
        self._vacant(successor)
        return self._machine(incarnation)

    async def _step(self, name: str, incarnation: Incarnation | None = None) -> None:
        if incarnation is not None:
            self.calls.append((name, incarnation))
        if name in self.holds:
            await self.holds[name].wait()
        if name in self.faults.delay_s:
            await asyncio.sleep(self.faults.delay_s[name])
        if name in self.faults.fail:
            raise self.faults.fail[name]


if TYPE_CHECKING:
    _host: type[Host] = MemoryHost


async def _break(guest: Guest) -> None:
    """The channel of a machine that is gone: whoever is attached is told."""
    vanish = getattr(guest, "vanish", guest.aclose)
    await vanish()


def _found(machine: MemoryMachine) -> str:
    if machine.exit is not None:
        return "dead"
    return {Power.RUNNING: "adopted", Power.OFF: "stopped"}.get(machine.power, "paused")


def _template(shape: Shape) -> str:
    return f"memory-{shape.vcpus}-{shape.memory_mib}-{shape.disk_gib}"
