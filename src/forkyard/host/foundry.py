"""Makes machines: restored from a snapshot, or booted from a disk.

Owns: the steps from nothing to a guest that answers, and their undo. Every acquired thing is pushed on an exit stack
before the next is acquired, so a start that fails or is cancelled at any line leaves nothing. Create, fork, resume,
rollback and the warm pool all come through here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forkyard.errors import NoCapacity, OperationTimeout
from forkyard.guest.base import Connector, Guest, Identity
from forkyard.host import errand
from forkyard.host.doorway import Doorway
from forkyard.host.journal import Entry, Journal, Phase, host_boot_id
from forkyard.host.machine import Machine, OnEnd
from forkyard.host.volumes import Attachment, HostVolumes
from forkyard.hosts.base import Incarnation, Mount
from forkyard.models import Milestone, Shape
from forkyard.net.base import Network
from forkyard.net.slots import Slots
from forkyard.settings import Settings
from forkyard.storage.disks import Disks
from forkyard.storage.volumes import Mounted
from forkyard.vmm.base import BootSource, Driver, SnapshotFiles, Vm, VmRecord

LONGEST_TURN_S = 1.0
#: A guest is at ease that used so little of a processor for so long; one that never is, is not waited for.
AT_EASE_S, AT_EASE_LOAD, AT_EASE_LOOKS = 0.3, 0.1, 20


@dataclass(frozen=True)
class Origin:
    """What a machine is restored from."""

    base: str  # name of the RAM that `files.ram` is
    files: SnapshotFiles
    reading: asyncio.Task[None] | None = None  # of its pages, to check them
    pristine: bool = False  # a template: nobody was talking to its agent, and its past is nobody's
    volumes: tuple[Mounted, ...] = ()  # that it was saved with
    connected: bool = True  # it may have had connections to others; to look is the first work of a new machine's agent

    async def checked(self) -> None:
        """Raises `SnapshotCorrupt` if it is not what was saved."""
        if self.reading is not None:
            await asyncio.shield(self.reading)


class Stopwatch:
    def __init__(self) -> None:
        self._started = time.monotonic()
        self.milestones: list[Milestone] = []

    def note(self, name: str) -> None:
        at_ms = round((time.monotonic() - self._started) * 1000, 1)
        self.milestones.append(Milestone(name=name, at_ms=at_ms))


@dataclass(frozen=True)
class Shell:
    """A hypervisor process that waits to become a machine."""

    entry: Entry
    vm: Vm


@dataclass(frozen=True)
class _Up:
    shell: Shell
    guest: Guest
    doorway: Doorway


class Foundry:
    def __init__(
        self,
        settings: Settings,
        driver: Driver,
        connect: Connector,
        journal: Journal,
        disks: Disks,
        volumes: HostVolumes,
        slots: Slots,
        new_doorway: Callable[[Path], Doorway],
        on_end: OnEnd,
    ) -> None:
        self._settings = settings
        self._driver = driver
        self._connect = connect
        self._journal = journal
        self._disks = disks
        self._volumes = volumes
        self._slots = slots
        self._new_doorway = new_doorway
        self._on_end = on_end
        self._starting = asyncio.Semaphore((os.cpu_count() or 1) + 1)

    def new_entry(self, vm_id: str, shape: Shape, base: str, disk: Path | None = None) -> Entry:
        return Entry(vm_id, self.allocate_uid(), shape, host_boot_id(), base, disk or self._disks.new_path())

    async def restore(
        self,
        owner: Incarnation,
        shape: Shape,
        origin: Origin,
        env: Mapping[str, str],
        network: Network,
        shell: Shell | None = None,
        volumes: Sequence[Attachment] = (),
    ) -> Machine:
        """A running machine that has answered. A `shell` saves the start of a process, and is used up in any case."""
        watch = Stopwatch()
        async with self._undone_on_failure(owner) as undo:
            undo.callback(self._volumes.release, volumes)
            identity = _identity(owner, env, new=origin.pristine)
            up = await self._bring_up(undo, str(owner), shape, origin, shell, watch, identity, network, volumes)
            await self._volumes.mount(up.guest, volumes)
            entry = self._owned(up.shell.entry, owner, env, watch)
            undo.pop_all()
            machine = self._machine(entry, up.shell.vm, up.guest, up.doorway)
            if origin.connected and not origin.pristine:
                machine.drop_old_connections()
            return machine

    async def boot(
        self,
        owner: Incarnation,
        shape: Shape,
        source: BootSource,
        disk: Path,
        ram: Path,
        env: Mapping[str, str],
        network: Network,
        volumes: Sequence[Attachment] = (),
    ) -> Machine:
        """A machine that boots from a disk of its own. `ram` is a file of zeros."""
        watch = Stopwatch()
        async with self._undone_on_failure(owner, self._settings.boot_timeout_s) as undo:
            undo.callback(self._volumes.release, volumes)
            entry = self.new_entry(str(owner), shape, ram.stem, disk)
            undo.push_async_callback(self.remove, entry)
            os.chown(disk, entry.uid, entry.uid)
            vm = await self._driver.boot(await self.begin(entry), source, ram, template=False)
            undo.push_async_callback(vm.kill)
            entry = self._volumes.begin(entry, volumes)
            await vm.attach([one.disk for one in volumes])
            doorway = self.doorway(entry)
            undo.push_async_callback(doorway.close)
            await doorway.open(owner.sandbox_id, network)
            watch.note("booting")
            await vm.cont()
            guest = await self._connect(
                str(vm.agent_socket),
                timeout_s=self._settings.boot_timeout_s,
                identity=_identity(owner, env, new=False),
            )
            undo.push_async_callback(guest.aclose)
            watch.note("ready")
            await self._volumes.mount(guest, volumes)
            entry = self._owned(entry, owner, env, watch)
            undo.pop_all()
            return self._machine(entry, vm, guest, doorway)

    async def park(
        self,
        vm_id: str,
        shape: Shape,
        origin: Origin,
        warm_up: Sequence[str],
        volumes: Sequence[Attachment] = (),
    ) -> Machine:
        """Restored, used once (if there is a `warm_up`), and stopped: all that is missing is an owner."""
        volumes = [*self._volumes.copies(origin.volumes), *volumes]
        async with self._undone_on_failure(None) as undo:
            undo.callback(self._volumes.release, volumes)
            up = await self._bring_up(undo, vm_id, shape, origin, None, Stopwatch(), volumes=volumes)
            if any(one.new for one in volumes):
                await self._volumes.mount(up.guest, volumes)
                await _at_ease(up.shell.vm)
            entry = up.shell.entry
            if warm_up and not volumes:
                entry = await self._volumes.rehearse(entry, up.shell.vm, up.guest)
            for command in warm_up:
                # As it will be when the owner comes, to the last step: becoming somebody, then the first command.
                await up.guest.adopt_identity(_identity(Incarnation(vm_id, 0), {}, new=True))
                await errand.run(up.guest, command)
            await up.shell.vm.stop()
            undo.pop_all()
            return Machine(entry, up.shell.vm, up.guest, self._connect, self._on_end, up.doorway)

    async def give(
        self,
        parked: Machine,
        owner: Incarnation,
        env: Mapping[str, str],
        network: Network,
        mounts: Sequence[Mount] = (),
    ) -> Machine:
        """A parked machine becomes somebody's. It has these volumes already, or none."""
        watch = Stopwatch()
        async with self._undone_on_failure(owner) as undo:
            undo.push_async_callback(self.remove, parked.entry)
            undo.push_async_callback(parked.kill)
            volumes = [] if parked.entry.volumes else self._volumes.wanted(mounts)
            undo.callback(self._volumes.release, volumes)
            opening = asyncio.ensure_future(parked.doorway.open(owner.sandbox_id, network))
            undo.callback(opening.cancel)
            if volumes:
                parked.entry = self._volumes.begin(parked.entry, volumes)
                await parked.vm.attach([one.disk for one in volumes])
            await parked.vm.cont()
            parked.awake(True)
            watch.note("restored")
            await parked.guest.adopt_identity(_identity(owner, env, new=True))
            await self._volumes.mount(parked.guest, volumes)
            await opening  # nothing of the owner's runs yet that could find it shut
            watch.note("ready")
            parked.entry = self._owned(self._volumes.hand_over(parked.entry, mounts), owner, env, watch)
            undo.pop_all()
            return parked

    @contextlib.asynccontextmanager
    async def _turn_to_start(self) -> AsyncIterator[None]:
        """Starting is work for processors alone. More at once than there are makes none faster and all slower: they take
        each other's caches, and a guest that is not heard in time is greeted again. One that does not answer at all keeps
        nobody waiting for long."""
        await self._starting.acquire()
        turn = contextlib.ExitStack()
        turn.callback(self._starting.release)
        timer = asyncio.get_running_loop().call_later(LONGEST_TURN_S, turn.close)
        try:
            yield
        finally:
            timer.cancel()
            turn.close()

    async def start_shell(self, vm_id: str, shape: Shape, base: str, ram: Path) -> Shell:
        async with self._turn_to_start():
            return await self._start_shell(vm_id, shape, base, ram)

    async def _start_shell(self, vm_id: str, shape: Shape, base: str, ram: Path) -> Shell:
        entry = self.new_entry(vm_id, shape, base)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.remove, entry)
            vm = await self._driver.shell(await self.begin(entry), ram)
            undo.pop_all()
            return Shell(entry, vm)

    async def discard(self, shell: Shell) -> None:
        await shell.vm.kill()
        await self.remove(shell.entry)

    async def _bring_up(
        self,
        undo: contextlib.AsyncExitStack,
        vm_id: str,
        shape: Shape,
        origin: Origin,
        shell: Shell | None,
        watch: Stopwatch,
        identity: Identity | None = None,
        network: Network | None = None,
        volumes: Sequence[Attachment] = (),
    ) -> _Up:
        if shell is not None:
            undo.push_async_callback(self.discard, shell)
        async with self._turn_to_start():
            return await self._wake_up(undo, vm_id, shape, origin, shell, watch, identity, network, volumes)

    async def _wake_up(
        self,
        undo: contextlib.AsyncExitStack,
        vm_id: str,
        shape: Shape,
        origin: Origin,
        shell: Shell | None,
        watch: Stopwatch,
        identity: Identity | None,
        network: Network | None,
        volumes: Sequence[Attachment],
    ) -> _Up:
        if shell is None:
            shell = await self._start_shell(vm_id, shape, origin.base, origin.files.ram)
            undo.push_async_callback(self.discard, shell)
        shell = Shell(self._volumes.begin(shell.entry, volumes), shell.vm)
        doorway = self.doorway(shell.entry)
        undo.push_async_callback(doorway.close)
        # Before it runs: the greeting is there when it wakes up, and its port was never closed.
        connecting = asyncio.ensure_future(
            self._connect(
                str(shell.vm.agent_socket), timeout_s=self._settings.create_timeout_s, fresh=True, identity=identity
            )
        )
        undo.callback(connecting.cancel)
        had = [one.disk for one in volumes if not one.new]
        try:
            if network is None or identity is None:
                await shell.vm.load(origin.files, had)
            else:
                # Open before it runs: processes that come back to life must not find it shut.
                await asyncio.gather(shell.vm.load(origin.files, had), doorway.open(identity.sandbox_id, network))
        finally:
            await origin.checked()  # what is damaged may also be what cannot be loaded
        if len(had) < len(volumes):
            await shell.vm.attach([one.disk for one in volumes if one.new])
        watch.note("restored")
        await shell.vm.cont()
        guest = await connecting
        undo.push_async_callback(guest.aclose)
        watch.note("ready")
        return _Up(shell, guest, doorway)

    async def begin(self, entry: Entry) -> VmRecord:
        """What must be there before the process: the entry, and its slot."""
        record = self._journal.begin(entry)
        self._disks.release(entry.disk)  # the journal keeps it from here on
        await self._slots.prepare(self._number(entry))
        return record

    def doorway(self, entry: Entry) -> Doorway:
        return self._new_doorway(self._slots.path(self._number(entry)))

    def _number(self, entry: Entry) -> int:
        return entry.uid - self._settings.vm_uid_base

    def _owned(self, entry: Entry, owner: Incarnation, env: Mapping[str, str], watch: Stopwatch) -> Entry:
        """From here on a crash of the daemon does not take the machine away."""
        return self._journal.write(
            replace(
                entry,
                phase=Phase.RUNNING,
                sandbox_id=owner.sandbox_id,
                incarnation=owner.number,
                env=dict(env),
                milestones=watch.milestones,
            )
        )

    def _machine(self, entry: Entry, vm: Vm, guest: Guest, doorway: Doorway) -> Machine:
        machine = Machine(entry, vm, guest, self._connect, self._on_end, doorway)
        machine.awake(True)
        return machine

    def adopted(self, entry: Entry, vm: Vm, *, awake: bool) -> Machine:
        """One that runs already. Its door is shut until the control plane says what may leave."""
        machine = Machine(entry, vm, None, self._connect, self._on_end, self.doorway(entry))
        machine.has_old_connections = True  # perhaps: the daemon that made it may not have come to that
        machine.awake(awake)
        return machine

    async def remove(self, entry: Entry) -> None:
        """All that an entry stands for, but its disk: that is collected when nothing rests on it."""
        await self._driver.reclaim(self._journal.record(entry))
        await asyncio.to_thread(self._journal.forget, entry)
        if entry.phase not in (
            Phase.COLD,
            Phase.STOPPED,
        ):  # those have given their slot back: it may be another's by now
            await self.release(entry)
        self._disks.release(entry.disk)  # if it never came to a beginning

    @contextlib.asynccontextmanager
    async def _undone_on_failure(
        self, owner: Incarnation | None, timeout_s: float | None = None
    ) -> AsyncIterator[contextlib.AsyncExitStack]:
        limit_s = timeout_s or self._settings.create_timeout_s
        try:
            async with contextlib.AsyncExitStack() as undo, asyncio.timeout(limit_s):
                yield undo
        except TimeoutError:
            raise OperationTimeout(
                f"the machine{f' of {owner.sandbox_id}' if owner else ''} did not answer within {limit_s:.0f} s; "
                "`forkyard doctor` may tell why (an overloaded host is the usual reason)"
            ) from None

    def allocate_uid(self) -> int:
        base = self._settings.vm_uid_base
        number = self._slots.claim({uid - base for uid in self._journal.uids()})
        if number is None:
            raise NoCapacity(
                f"all {self._settings.vm_uid_count} user ids for VMs are in use; delete sandboxes, or raise "
                "FORKYARD_VM_UID_COUNT"
            )
        return base + number

    async def release(self, entry: Entry) -> None:
        """Its slot and its user id. Nothing of the VM runs any more."""
        await self._slots.release(self._number(entry))


async def _at_ease(vm: Vm) -> None:
    """Wait until the guest has done what a mount leads to (its udev looks at the drive, say): then nobody made from it has
    to do that again."""
    used_s = (await vm.usage()).cpu_s
    for _ in range(AT_EASE_LOOKS):
        await asyncio.sleep(AT_EASE_S)
        before_s, used_s = used_s, (await vm.usage()).cpu_s
        if used_s - before_s <= AT_EASE_S * AT_EASE_LOAD:
            return


def _identity(owner: Incarnation, env: Mapping[str, str], *, new: bool) -> Identity:
    return Identity(owner.sandbox_id, owner.sandbox_id, os.urandom(64), env, new=new)
