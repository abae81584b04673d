"""This machine as a host: implements the `hosts.base.Host` seam over a VM driver.

Owns: which machines there are here, with or without a process, and the verbs on them. How a machine is made is
`foundry`'s, how it is found again `recovery`'s, how it is captured `instants`', how it is kept ready `pool`'s, what it
is made of `images`'.

Nothing that a verb replaces is touched until its successor has answered: a machine that resumes, boots or rolls back
writes to a new overlay, so what it came from is still whole if it fails, or if the daemon dies half-way. The control
plane destroys the predecessor once its record names the successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from forkyard.errors import ForkyardError, HostFailure, InternalError, SandboxNotFound, SnapshotNotFound
from forkyard.faults import reached
from forkyard.guest.base import Connector, Guest, Identity
from forkyard.host.cache import Cache
from forkyard.host.chains import Chains
from forkyard.host.checks import can_make_slots, free_space
from forkyard.host.doorway import Doorway, NewDoor
from forkyard.host.egress import EgressQueue
from forkyard.host.foundry import Foundry, Origin, Shell
from forkyard.host.images import HostImages, log_progress
from forkyard.host.instants import Instants
from forkyard.host.intact import Intact
from forkyard.host.journal import Entry, Journal, Phase, with_disks_of
from forkyard.host.machine import Machine
from forkyard.host.pool import Pool, Wish
from forkyard.host.prepared import Prepared
from forkyard.host.recovery import recover
from forkyard.host.templates import ZEROS, Templates
from forkyard.host.volumes import HostVolumes, version_of
from forkyard.hosts.base import (
    Capacity,
    Created,
    CreateSpec,
    Ended,
    Forked,
    Incarnation,
    Load,
    Recovered,
    SnapshotMade,
    VolumeVersion,
)
from forkyard.images import BaseImage, ForeignImages
from forkyard.images.base import load
from forkyard.images.registry import WayTo, straight
from forkyard.models import Check, SandboxLogs, Shape
from forkyard.models.network import EgressRecord
from forkyard.net.base import Network, Traffic
from forkyard.net.slots import Slots
from forkyard.settings import Settings
from forkyard.storage import search
from forkyard.storage.disks import Disks, allocated_bytes, chain, seal
from forkyard.storage.snapshots import Saved, Snapshots
from forkyard.storage.volumes import Volumes
from forkyard.vmm.base import Driver, VmExit, VmUsage

log = structlog.get_logger(__name__)

CONSOLE_TAIL_BYTES = 64 * 1024
POWER_OFF_S = 20.0
#: In images of others that have no systemd.
POWER_OFF = "/opt/forkyard/agent/init poweroff"
ADOPT_S = 5.0


class LocalHost:
    def __init__(
        self,
        settings: Settings,
        driver: Driver,
        connect: Connector,
        image: BaseImage,
        new_door: NewDoor | None = None,
        way_to_registry: WayTo = straight,
    ) -> None:
        """Without `new_door` nothing leaves any machine."""
        self._settings = settings
        self._driver = driver
        self._connect = connect
        self._new_door = new_door
        self._egress = EgressQueue()
        self._slots = Slots(settings.scope, spare=settings.pool_slots, most=settings.vm_uid_count)
        self._journal = Journal(settings.state_dir / "vms", lambda uid: self._slots.path(uid - settings.vm_uid_base))
        self._disks = Disks(settings.state_dir / "disks")
        self._snapshots = Snapshots(settings.state_dir / "snapshots")
        self._stored_volumes = Volumes(settings.state_dir / "volumes", self._disks)
        self._volumes = HostVolumes(self._stored_volumes, self._disks, self._journal, settings.disk_layers)
        self._chains = Chains(self._disks, settings.disk_layers)
        self._image = image
        self._cache = Cache(settings.cache_dir, settings.state_dir, settings.scope, settings.cache_days)
        foreign = ForeignImages(settings.cache_dir, image, settings.plain_http_registries, way_to_registry)
        self.images = HostImages(foreign, self._cache)
        self._machines: dict[Incarnation, Machine] = {}
        #: Machines without a process: asleep on disk, shut down, or dead.
        self._resting: dict[Incarnation, Entry] = {}
        #: Of those asleep on disk, whose process has not gone yet.
        self._ending: dict[Incarnation, asyncio.Task[None]] = {}
        self._ended: asyncio.Queue[Ended] = asyncio.Queue()
        self._adopting: set[asyncio.Task[None]] = set()
        self._foundry = Foundry(
            settings,
            driver,
            connect,
            self._journal,
            self._disks,
            self._volumes,
            self._slots,
            lambda slot: Doorway(slot, self._new_door, self._egress.put),
            self._machine_ended,
        )
        self.templates = Templates(
            cache_dir=settings.cache_dir,
            ram_dir=settings.ram_dir,
            driver=driver,
            connect=connect,
            journal=self._journal,
            foundry=self._foundry,
            image=image,
            boot_timeout_s=settings.boot_timeout_s,
        )
        self._instants = Instants(
            settings.ram_dir,
            self._journal,
            self._disks,
            self._chains,
            self._snapshots,
            Intact(self._snapshots),
            self.templates,
        )
        self._pool = Pool(
            self._foundry,
            self._origin,
            size=settings.pool_size,
            memory_mib=settings.pool_memory_mib,
            shells=settings.pool_shells,
        )
        self._prepared = Prepared(
            self._foundry,
            self._instants,
            self._volumes,
            self._stored_volumes,
            on_ready=lambda shape, places: self._pool.ask_for(Wish(shape, places)),
        )

    @property
    def accel(self) -> str:
        return self._driver.accel

    # ── start and stop ───────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> Recovered:
        found = await recover(self._journal, self._driver, self._foundry)
        self._machines, self._resting = found.machines, found.resting
        for machine in self._machines.values():
            self._chains.look_after(machine)
        base = self._settings.vm_uid_base
        await self._slots.start(
            in_use={machine.entry.uid - base: machine.vm.pid for machine in self._machines.values()},
            reserved={uid - base for uid in self._journal.uids()},
        )
        await asyncio.gather(*(self._wait_for_agent(machine) for machine in self._machines.values()))
        await asyncio.to_thread(self._snapshots.clean)
        await asyncio.to_thread(self._stored_volumes.load)
        self.templates.forget_ram({machine.entry.base for machine in self._machines.values()})
        await self._collect_disks()
        await self.images.start()
        await asyncio.to_thread(self._cache.register)
        self._cache.start(lambda: [self._image.dir, *self.templates.loaded()])
        return found.told()

    async def _wait_for_agent(self, machine: Machine) -> None:
        """So that the first call after a restart finds it. One that does not answer is no reason not to start."""
        if machine.entry.phase is Phase.RUNNING:
            with contextlib.suppress(TimeoutError):
                await machine.reachable(ADOPT_S)

    async def stop(self, *, destroy: bool = False) -> None:
        self._cache.stop()
        await asyncio.gather(*self._ending.values())
        await self._pool.stop()
        await self._prepared.stop()
        await self._chains.stop()
        await self._volumes.settle()
        await self._collect_disks()
        if destroy:
            for incarnation in [*self._machines, *self._resting]:
                await self.destroy(incarnation)
            for snapshot_id in self._snapshots.ids():
                await self.delete_snapshot(snapshot_id)
            for volume_id in self._stored_volumes.ids():
                await self.delete_volume(volume_id)
            await asyncio.to_thread(shutil.rmtree, self._settings.ram_dir, ignore_errors=True)
        for machine in list(self._machines.values()):
            await machine.detach()
        self._machines.clear()
        await self._slots.stop()

    async def prepare(self, shape: Shape, image: str | None = None) -> str:
        template = await self.templates.ensure(shape, log_progress, self.images.given(image))
        if image is None:
            self._pool.start(shape)
        return template.key

    # ── create, fork, destroy ────────────────────────────────────────────────────────────────────────────────────

    async def create(self, incarnation: Incarnation, spec: CreateSpec) -> Created:
        if spec.snapshot_id is not None:
            return await self._restored(incarnation, spec)
        template = await self.templates.ensure(spec.shape, log_progress, self.images.given(spec.image))
        origin = Origin(template.key, template.snapshot, pristine=True)
        prepared = self._prepared.wish(spec.shape, origin, spec.volumes)
        parked = self._take_parked(spec, prepared=prepared is not None) if spec.image is None else None
        if parked is not None:
            with contextlib.suppress(ForkyardError):  # it did not survive the wait: make one as if there were no pool
                machine = await self._foundry.give(parked, incarnation, spec.env, spec.network, spec.volumes)
                return self._keep(incarnation, machine)
        if prepared is not None:
            try:
                return await self._made_from(prepared, incarnation, spec)
            except ForkyardError as error:  # make one as if there were none
                log.warning("prepared volumes were of no use", sandbox=incarnation.sandbox_id, error=error.message)
                self._prepared.forget(prepared)
        return await self._made_from(origin, incarnation, spec)

    def _take_parked(self, spec: CreateSpec, *, prepared: bool) -> Machine | None:
        """To mount volumes takes less than to restore a machine that has them."""
        with_volumes = self._pool.take(Wish(spec.shape, self._volumes.places(spec.volumes))) if prepared else None
        return with_volumes or self._pool.take(Wish(spec.shape))

    async def _made_from(self, origin: Origin, incarnation: Incarnation, spec: CreateSpec) -> Created:
        volumes = self._volumes.wanted(spec.volumes, origin.volumes)
        shell = self._pool.take_shell(origin.base, spec.shape, origin.files.ram)
        machine = await self._foundry.restore(incarnation, spec.shape, origin, spec.env, spec.network, shell, volumes)
        return self._keep(incarnation, machine)

    async def fork(
        self, source: Incarnation, children: Sequence[Incarnation], env: Mapping[str, str], network: Network
    ) -> Forked:
        shape, base, ram = self._ram_of(source)
        # Hypervisors start while the parent still runs: what takes long is done before anything is stopped.
        shells = [asyncio.ensure_future(self._shell(child, base, shape, ram)) for child in children]
        try:
            async with self._instant(source) as (origin, paused_ms):
                reached("fork.captured")

                async def one(child: Incarnation, shell: asyncio.Future[Shell]) -> Created:
                    volumes = self._volumes.copies(origin.volumes)
                    machine = await self._foundry.restore(child, shape, origin, env, network, await shell, volumes)
                    reached("fork.child_answered")
                    return self._keep(child, machine)

                pairs = list(zip(children, shells, strict=True))
                shells = []  # each is its child's affair now
                outcomes = await asyncio.gather(*(one(*pair) for pair in pairs), return_exceptions=True)
            return Forked(paused_ms, [_outcome(outcome) for outcome in outcomes])
        finally:
            for shell in await asyncio.gather(*shells, return_exceptions=True):
                if isinstance(shell, Shell):
                    await self._foundry.discard(shell)

    async def _shell(self, owner: Incarnation, base: str, shape: Shape, ram: Path) -> Shell:
        return self._pool.take_shell(base, shape, ram) or await self._foundry.start_shell(str(owner), shape, base, ram)

    async def destroy(self, incarnation: Incarnation) -> None:
        machine = self._machines.pop(incarnation, None)
        entry = machine.entry if machine else await self._at_rest(incarnation)
        if machine is not None:
            await self._volumes.flush(machine, last=True)
            await machine.kill()
        if entry is None:
            return
        reached("destroy.killed")
        await self._volumes.leave(entry)
        await self._foundry.remove(entry)
        reached("destroy.removed")
        if entry.memory is not None:
            await asyncio.to_thread(self._snapshots.delete, entry.memory)
        self._resting.pop(incarnation, None)
        await self._collect_disks()

    # ── sleep ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def pause(self, incarnation: Incarnation) -> None:
        machine = self._machine(incarnation)
        await self._volumes.flush(machine)  # it may never wake again
        await machine.vm.stop()
        reached("pause.stopped")
        machine.awake(False)
        machine.entry = self._journal.write(replace(machine.entry, phase=Phase.PAUSED))
        reached("pause.journalled")

    async def cool(self, incarnation: Incarnation) -> None:
        if incarnation in self._resting:
            return
        machine = self._machine(incarnation)
        memory = f"memory-{machine.entry.vm_id}"
        await self._instants.put_away(machine, memory)
        reached("cool.written")
        entry = await asyncio.to_thread(
            self._journal.write,
            replace(with_disks_of(machine.vm, machine.entry), phase=Phase.COLD, memory=memory),
            durable=True,
        )
        reached("cool.journalled")
        del self._machines[incarnation]
        self._resting[incarnation] = machine.entry = entry
        # From here on a crash leads to the same: nobody need wait but those who want its disk.
        ending = self._ending[incarnation] = asyncio.create_task(self._end(machine), name=f"end {machine.entry.vm_id}")
        ending.add_done_callback(lambda _: self._ending.pop(incarnation, None))

    async def _end(self, machine: Machine) -> None:
        """Of a machine that is asleep on disk: its process, and all that belonged to it."""
        entry = machine.entry
        try:
            await machine.kill()
            reached("cool.ended")
            await self._driver.reclaim(self._journal.record(entry))
            await self._foundry.release(entry)
            seal(entry.disk)
            self._volumes.seal(entry)
        except (ForkyardError, OSError):
            log.exception("the process of a machine that sleeps on disk did not go", vm=entry.vm_id)

    async def resume(self, incarnation: Incarnation, successor: Incarnation, network: Network) -> Incarnation:
        machine = self._machines.get(incarnation)
        if machine is not None:
            await machine.doorway.open(incarnation.sandbox_id, network)
            await machine.vm.cont()
            reached("resume_hot.continued")
            machine.awake(True)
            guest = await machine.reachable(self._settings.create_timeout_s)
            # The clock stood still with the machine.
            name = incarnation.sandbox_id
            adopting = asyncio.create_task(
                _adopt(guest, Identity(name, name, os.urandom(64), machine.entry.env)), name=f"identity {name}"
            )
            self._adopting.add(adopting)
            adopting.add_done_callback(self._adopting.discard)
            await asyncio.sleep(0)  # it is sent; the agent works in order, so nothing overtakes it
            reached("resume_hot.answered")
            machine.entry = self._journal.write(replace(machine.entry, phase=Phase.RUNNING))
            reached("resume_hot.journalled")
            return incarnation
        entry = await self._rested(incarnation)
        if entry.memory is None:
            raise HostFailure(
                f"the memory of sandbox {incarnation.sandbox_id} is gone; boot from its disk: resume(memory=False)"
            )
        origin, _ = await self._instants.saved(entry.memory)
        reached("resume_cold.loaded")
        # Through the entry, not the snapshot: the same memory, on an overlay of its own.
        volumes = self._volumes.same(origin.volumes, entry.volumes)
        shell = self._pool.take_shell(origin.base, entry.shape, origin.files.ram)
        machine = await self._foundry.restore(successor, entry.shape, origin, entry.env, network, shell, volumes)
        reached("resume_cold.answered")
        self._keep(successor, machine)
        return successor

    async def power_off(self, incarnation: Incarnation) -> None:
        machine = self._machines.get(incarnation)
        if machine is None:
            entry = await self._rested(incarnation)
        else:
            if machine.entry.phase is Phase.PAUSED:
                await self.resume(incarnation, incarnation, Network())
            await machine.shut_down(f"systemctl poweroff || {POWER_OFF}", POWER_OFF.split(), POWER_OFF_S)
            await self._driver.reclaim(self._journal.record(machine.entry))
            await self._foundry.release(machine.entry)
            entry = machine.entry
        stopped = await asyncio.to_thread(
            self._journal.write, replace(entry, phase=Phase.STOPPED, memory=None), durable=True
        )
        self._machines.pop(incarnation, None)
        self._resting[incarnation] = stopped
        if entry.memory is not None:
            await asyncio.to_thread(self._snapshots.delete, entry.memory)

    async def boot(self, incarnation: Incarnation, successor: Incarnation, spec: CreateSpec) -> Created:
        machine = self._machines.get(incarnation)
        if machine is not None:  # paused, or dead: in either case its disk is what counts
            await machine.kill()
            await self._driver.reclaim(self._journal.record(machine.entry))
            self._resting[incarnation] = machine.entry
            del self._machines[incarnation]
        entry = await self._rested(incarnation)
        seal(entry.disk)
        self._volumes.seal(entry)
        disk = self._disks.new_path()
        await self._disks.make_overlay(disk, entry.disk, spec.shape.disk_gib)
        source = await self.templates.boot_source(await asyncio.to_thread(_image_below, entry.disk))
        ram = await self.templates.ram_of(f"{ZEROS}{spec.shape.memory_mib}", spec.shape)
        volumes = self._volumes.same(entry.volumes, entry.volumes, new=True)
        machine = await self._foundry.boot(successor, spec.shape, source, disk, ram, spec.env, spec.network, volumes)
        return self._keep(successor, machine)

    # ── snapshots ────────────────────────────────────────────────────────────────────────────────────────────────

    async def snapshot(self, incarnation: Incarnation, snapshot_id: str) -> SnapshotMade:
        entry = await self._at_rest(incarnation)
        if entry is not None and entry.memory is not None:
            saved = await asyncio.to_thread(self._snapshots.copy, entry.memory, snapshot_id, entry.disk)
            return SnapshotMade(await asyncio.to_thread(_size_bytes, saved), 0.0)
        machine = self._machine(incarnation)
        async with self._instants.captured(machine, seal=True) as (origin, paused_ms):
            reached("snapshot.captured")
            saved = await self._instants.save(snapshot_id, machine.entry, origin)
        reached("snapshot.written")
        return SnapshotMade(await asyncio.to_thread(_size_bytes, saved), paused_ms)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        await asyncio.to_thread(self._snapshots.delete, snapshot_id)
        await self._collect_disks()

    async def rollback(self, _incarnation: Incarnation, successor: Incarnation, spec: CreateSpec) -> Created:
        return await self._restored(successor, spec)

    async def _restored(self, incarnation: Incarnation, spec: CreateSpec) -> Created:
        assert spec.snapshot_id is not None
        origin, shape = await self._instants.saved(spec.snapshot_id)
        reached("rollback.loaded")
        return await self._made_from(origin, incarnation, replace(spec, shape=shape))

    @contextlib.asynccontextmanager
    async def _instant(self, source: Incarnation) -> AsyncIterator[tuple[Origin, float]]:
        """A machine at this moment, to restore from; may be gone when the block ends. VMs keep what they mapped."""
        entry = await self._at_rest(source)
        if entry is not None and entry.memory is not None:
            origin, _ = await self._instants.saved(entry.memory)
            yield origin, 0.0
        else:
            async with self._instants.captured(self._machine(source), seal=True) as (origin, paused_ms):
                yield origin, paused_ms

    async def find_in_snapshot(self, snapshot_id: str, values: Sequence[bytes], *, parent: str | None) -> set[int]:
        def find() -> set[int]:
            below: set[Path] = set()
            if parent is not None:
                with contextlib.suppress(SnapshotNotFound):  # deleted meanwhile: all there is is looked at
                    below = set(chain(self._snapshots.read(parent).disk))
            disks = [path for path in self._disks.layers(self._snapshots.read(snapshot_id).disk) if path not in below]
            return search.find([*self._snapshots.memory_files(snapshot_id), *disks], values)

        return await asyncio.to_thread(find)

    # ── volumes ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def make_volume(self, volume_id: str, size_bytes: int, *, for_all: bool = False) -> None:
        await self._volumes.make(volume_id, size_bytes, for_all=for_all)

    async def volume_versions(self, volume_id: str) -> list[VolumeVersion]:
        return [version_of(version) for version in self._stored_volumes.versions(volume_id)]

    async def keep_version(self, volume_id: str, number: int | None = None) -> VolumeVersion:
        return version_of(await asyncio.to_thread(self._stored_volumes.keep, volume_id, number))

    async def drop_version(self, volume_id: str, number: int) -> None:
        await asyncio.to_thread(self._stored_volumes.drop, volume_id, number)
        await self._collect_disks()

    async def commit_volume(
        self, incarnation: Incarnation, path: str, *, force: bool, kept: bool = True
    ) -> VolumeVersion:
        return version_of(await self._volumes.commit(self._machine(incarnation), path, force=force, kept=kept))

    async def delete_volume(self, volume_id: str) -> None:
        await asyncio.to_thread(self._stored_volumes.delete, volume_id)
        await self._collect_disks()

    async def volume_bytes(self, volume_id: str) -> int:
        return await asyncio.to_thread(self._stored_volumes.stored_bytes, volume_id)

    # ── network ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def set_network(self, incarnation: Incarnation, network: Network) -> None:
        await self._machine(incarnation).doorway.open(incarnation.sandbox_id, network)

    async def connect(self, incarnation: Incarnation, port: int) -> socket.socket:
        return await self._machine(incarnation).doorway.connect(port)

    def traffic(self, incarnation: Incarnation) -> Traffic:
        machine = self._machines.get(incarnation)
        return machine.doorway.traffic if machine is not None else Traffic()

    def egress(self) -> AsyncIterator[EgressRecord]:
        return self._egress.records()

    # ── looking ──────────────────────────────────────────────────────────────────────────────────────────────────

    def guest(self, incarnation: Incarnation) -> Guest:
        return self._machine(incarnation).guest

    async def logs(self, incarnation: Incarnation) -> SandboxLogs:
        machine = self._machines.get(incarnation)
        entry = machine.entry if machine else self._resting.get(incarnation)
        if entry is None:
            raise _unknown(incarnation)
        console = await self._driver.console(self._journal.record(entry), CONSOLE_TAIL_BYTES)
        return SandboxLogs(
            template_boot=self.templates.milestones(entry.base), create=entry.milestones, console=console
        )

    async def usage(self, incarnation: Incarnation) -> VmUsage:
        return await self._machine(incarnation).vm.usage()

    async def loads(self) -> Mapping[Incarnation, Load]:
        running = [(one, machine) for one, machine in self._machines.items() if machine.runs]

        def look() -> dict[Incarnation, Load]:
            found = {}
            for incarnation, machine in running:
                counters = machine.vm.counters()
                if counters is not None:
                    disk = self._disks.whole_bytes(machine.entry.disk)
                    found[incarnation] = Load(counters.cpu_s, counters.resident_bytes, disk)
            return found

        return await asyncio.to_thread(look)

    async def stored_bytes(self, incarnation: Incarnation) -> int:
        machine = self._machines.get(incarnation)
        entry = machine.entry if machine else self._resting.get(incarnation)
        if entry is None:
            return 0
        disk = await asyncio.to_thread(self._disks.own_bytes, entry.disk)
        for mounted in entry.volumes:
            disk += await asyncio.to_thread(self._stored_volumes.own_bytes, mounted.disk)
        return disk + (self._snapshots.stored_bytes(entry.memory) if entry.memory else 0)

    def capacity(self) -> Capacity:
        pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return Capacity(pages * page >> 20, shutil.disk_usage(self._settings.state_dir).free)

    async def checks(self) -> list[Check]:
        return [*await self._driver.checks(), await can_make_slots(self._slots), free_space(self._settings.state_dir)]

    async def ended(self) -> AsyncIterator[Ended]:
        while True:
            yield await self._ended.get()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _origin(self, wish: Wish) -> Origin | None:
        """Of a machine for the pool."""
        template = await self.templates.ensure(wish.shape, log_progress)
        if wish.places:
            return self._prepared.find(template.key, wish.places)
        return Origin(template.key, template.snapshot, pristine=True)

    def _keep(self, incarnation: Incarnation, machine: Machine) -> Created:
        self._machines[incarnation] = machine
        self._chains.look_after(machine)
        self._pool.in_use()
        return Created(machine.entry.base, machine.entry.milestones)

    def _ram_of(self, incarnation: Incarnation) -> tuple[Shape, str, Path]:
        machine = self._machines.get(incarnation)
        entry = machine.entry if machine else self._resting.get(incarnation)
        if entry is None:
            raise _unknown(incarnation)
        return entry.shape, entry.base, self._instants.ram(entry)

    def _machine(self, incarnation: Incarnation) -> Machine:
        machine = self._machines.get(incarnation)
        if machine is None or not machine.alive:
            raise SandboxNotFound(f"sandbox {incarnation.sandbox_id} does not run on this host")
        return machine

    async def _at_rest(self, incarnation: Incarnation) -> Entry | None:
        """A machine without a process, once there is really none."""
        ending = self._ending.get(incarnation)
        if ending is not None:
            await asyncio.shield(ending)
        return self._resting.get(incarnation)

    async def _rested(self, incarnation: Incarnation) -> Entry:
        entry = await self._at_rest(incarnation)
        if entry is None:
            raise _unknown(incarnation)
        return entry

    def _machine_ended(self, incarnation: Incarnation, exit_: VmExit) -> None:
        self._ended.put_nowait(Ended(incarnation, exit_))

    async def _collect_disks(self) -> None:
        await self._prepared.prune()
        await self._pool.give_up(lambda wish: self._prepared.gone(wish.places))

        def collect() -> None:
            in_use = [*self._journal.disks(), *self._snapshots.disks(), *self._stored_volumes.disks()]
            self._disks.collect([*in_use, *self._prepared.disks()])  # the journal first: they go from there to here

        await asyncio.to_thread(collect)


def _size_bytes(saved: Saved) -> int:
    """Its memory, and what was written to the disk since the instant before."""
    return saved.size_bytes + allocated_bytes(saved.disk)


def _image_below(disk: Path) -> BaseImage | None:
    """The image that a disk rests on, at the bottom of all overlays."""
    return load(chain(disk)[-1].parent)


def _unknown(incarnation: Incarnation) -> SandboxNotFound:
    return SandboxNotFound(f"no machine of sandbox {incarnation.sandbox_id} is on this host")


async def _adopt(guest: Guest, identity: Identity) -> None:
    try:
        await guest.adopt_identity(identity)
    except ForkyardError as error:
        log.error("a machine did not take its identity", sandbox=identity.sandbox_id, error=error.message)
        await guest.aclose()  # whoever it takes itself for, it is not talked to


def _outcome(outcome: Created | BaseException) -> Created | ForkyardError:
    if isinstance(outcome, Created | ForkyardError):
        return outcome
    log.error("a child was not made", exc_info=outcome)
    return InternalError("this child could not be made; the daemon's log has the details")
