"""Volumes of machines on this host: which slot, which disk, and what becomes of it.

Owns: that a volume is never written by two machines, and that what a machine had read-write becomes the volume's newest
version when the machine goes. A machine writes to an overlay of its own, whatever the mode: over a version, or over what
the machine it came from had. So what it came from is whole until it is replaced, as with root disks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from forkyard.errors import ForkyardError, HostFailure, InvalidRequest, VolumeChanged, VolumeNotFound
from forkyard.faults import reached
from forkyard.guest.base import Guest
from forkyard.host.journal import Entry, Journal, Phase
from forkyard.host.machine import Machine
from forkyard.hosts.base import Mount, VolumeVersion
from forkyard.storage.disks import Disks
from forkyard.storage.disks import seal as seal_disk
from forkyard.storage.volumes import Mounted, Version, Volumes, make_empty
from forkyard.vmm.base import VOLUME_SLOTS, Vm, VolumeDisk

log = structlog.get_logger(__name__)

#: What a machine is wanted to have mounted: where, the disk of which version, and whether read-only. Those with the same
#: are alike to their guests: nobody has a version's disk itself.
Places = tuple[tuple[str, Path, bool], ...]

FLUSH_S = 60.0
#: Who writes to a volume that is committed waits so long at most.
COMMIT_S = 3.0
#: A directory is made too, where most are.
REHEARSED_AT, REHEARSED_BYTES = "/.forkyard", 1 << 30


@dataclass(frozen=True)
class Attachment:
    """A volume that a machine is about to get."""

    mounted: Mounted
    below: Path
    new: bool  # its guest does not have it yet

    @property
    def disk(self) -> VolumeDisk:
        return VolumeDisk(self.mounted.slot, self.mounted.disk, self.below, self.mounted.size_bytes)


class HostVolumes:
    def __init__(self, volumes: Volumes, disks: Disks, journal: Journal, longest: int) -> None:
        self._volumes = volumes
        self._disks = disks
        self._journal = journal
        self._longest = longest
        self._folding: set[asyncio.Task[None]] = set()
        self._empty: Path | None = None
        self._making_empty = asyncio.Lock()

    # ── for machines that are made ───────────────────────────────────────────────────────────────────────────────

    def wanted(self, mounts: Sequence[Mount], saved: Sequence[Mounted] = ()) -> list[Attachment]:
        """What a new machine gets: what it was saved with, and the rest new."""
        modes = {(mount.volume_id, mount.path): mount.given for mount in mounts}
        there = [self._again(one, modes.get((one.volume_id, one.path))) for one in saved]
        had = {(one.volume_id, one.path) for one in saved}
        free = [slot for slot in range(VOLUME_SLOTS) if slot not in {one.slot for one in saved}]
        new = [mount for mount in mounts if (mount.volume_id, mount.path) not in had]
        if len(new) > len(free):
            raise InvalidRequest(f"a sandbox has at most {VOLUME_SLOTS} volumes and caches", field="volumes")
        return [*there, *(self._new(mount, slot) for mount, slot in zip(new, free, strict=False))]

    def places(self, mounts: Sequence[Mount]) -> Places:
        found = ((mount, self._volumes.find(mount.volume_id, mount.version)) for mount in mounts)
        return tuple((mount.path, version.disk, mount.mode == "ro") for mount, version in found)

    def copies(self, saved: Sequence[Mounted]) -> list[Attachment]:
        """For a child of a fork: what its parent writes to, it has a copy of."""
        return [self._again(one, None) for one in saved]

    def same(self, saved: Sequence[Mounted], modes: Sequence[Mounted], *, new: bool = False) -> list[Attachment]:
        """For the successor of a machine. `new`: it boots, and has nothing mounted."""
        mode = {one.slot: one.mode for one in modes}
        return [replace(self._again(one, mode.get(one.slot)), new=new) for one in saved]

    def _again(self, saved: Mounted, mode: str | None) -> Attachment:
        mode = mode or ("ro" if saved.mode == "ro" else "cow")
        mounted = replace(saved, mode=mode, disk=self._disks.new_path(), next_disk=None)
        return Attachment(mounted, saved.disk, new=False)

    def _new(self, mount: Mount, slot: int) -> Attachment:
        version = self._volumes.find(mount.volume_id, mount.version)
        disk = self._disks.new_path()
        mounted = Mounted(slot, mount.volume_id, version.number, mount.path, mount.given, version.size_bytes, disk)
        return Attachment(mounted, version.disk, new=True)

    def begin(self, entry: Entry, attachments: Sequence[Attachment]) -> Entry:
        """Told before any of it is made."""
        if attachments:
            entry = self._journal.write(replace(entry, volumes=[one.mounted for one in attachments]))
            self.release(attachments)
        return entry

    def hand_over(self, entry: Entry, mounts: Sequence[Mount]) -> Entry:
        """A machine that has these mounted already becomes somebody's, who may be their writer."""
        modes = {mount.path: mount.given for mount in mounts}
        return replace(entry, volumes=[replace(one, mode=modes[one.path]) for one in entry.volumes])

    def release(self, attachments: Iterable[Attachment]) -> None:
        for one in attachments:
            self._disks.release(one.mounted.disk)

    async def mount(self, guest: Guest, attachments: Sequence[Attachment]) -> None:
        for one in attachments:
            if one.new:
                mounted = one.mounted
                await guest.mount(mounted.slot, mounted.path, read_only=mounted.mode == "ro")

    async def rehearse(self, entry: Entry, vm: Vm, guest: Guest) -> Entry:
        """A volume of nobody's comes and goes: what a machine does when one comes is translated then."""
        slot = VOLUME_SLOTS - 1
        mounted = Mounted(slot, "", 0, REHEARSED_AT, "cow", REHEARSED_BYTES, self._disks.new_path())
        one = Attachment(mounted, await self._empty_disk(), new=True)
        entry = self.begin(entry, [one])
        await vm.attach([one.disk])
        await self.mount(guest, [one])
        await guest.unmount(slot)
        await vm.take_out(slot)
        return self._journal.write(replace(entry, volumes=[]))

    async def _empty_disk(self) -> Path:
        """Made once, and kept as long as this daemon runs."""
        async with self._making_empty:
            if self._empty is None:
                disk = self._disks.new_path()
                await asyncio.to_thread(make_empty, disk, REHEARSED_BYTES)
                await asyncio.to_thread(seal_disk, disk)
                self._empty = disk
            return self._empty

    async def flush(self, machine: Machine, *, last: bool = False) -> None:
        """What its guest has written to volumes, but not to their disks yet. A guest that does not do it is not waited for.
        `last`: it is about to go, and what it leaves is a file system that nobody has to repair."""
        slots = [one.slot for one in machine.entry.volumes if one.mode == "rw"]
        if slots and machine.alive and machine.entry.phase is Phase.RUNNING:
            try:
                async with asyncio.timeout(FLUSH_S):
                    await machine.guest.flush(slots, frozen_s=FLUSH_S if last else None, timeout_s=FLUSH_S)
            except (ForkyardError, TimeoutError) as error:
                log.warning("volumes not flushed", vm=machine.entry.vm_id, error=str(error))

    # ── for machines that go ─────────────────────────────────────────────────────────────────────────────────────

    async def leave(self, entry: Entry) -> None:
        """A machine is gone: what it had read-write is the volume's now, unless a successor has it. Idempotent."""
        for mounted in entry.volumes:
            if mounted.mode == "rw" and entry.phase is not Phase.STARTING and not self._succeeded(entry, mounted):
                await asyncio.to_thread(self._publish, mounted, entry)
                self._fold_later(mounted.volume_id)

    def _publish(self, mounted: Mounted, entry: Entry) -> None:
        if self._volumes.versions(mounted.volume_id) and mounted.disk.exists():
            self._volumes.publish(
                mounted.volume_id, mounted.disk, mounted.size_bytes, kept=False, source=entry.sandbox_id
            )

    def _succeeded(self, entry: Entry, mounted: Mounted) -> bool:
        return any(
            other.vm_id != entry.vm_id
            and other.sandbox_id == entry.sandbox_id
            and other.phase is not Phase.STARTING
            and other.incarnation > entry.incarnation
            and any(one.volume_id == mounted.volume_id and one.mode == "rw" for one in other.volumes)
            for other in self._journal.entries()
        )

    def seal(self, entry: Entry) -> None:
        """Its process has ended; others may be made over its disks."""
        for mounted in entry.volumes:
            seal_disk(mounted.disk)

    # ── volumes ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def make(self, volume_id: str, size_bytes: int, *, for_all: bool = False) -> None:
        if not self._volumes.versions(volume_id):
            await asyncio.to_thread(self._volumes.make, volume_id, size_bytes, for_all=for_all)

    async def commit(self, machine: Machine, path: str, *, force: bool, kept: bool = True) -> Version:
        """What the machine has there, all that was written before this was asked for included, is a new version."""
        entry = machine.entry
        mounted = _at(entry, path)
        self._check_commit(mounted, force=force)
        following = self._disks.new_path()
        self._remember(machine, replace(mounted, next_disk=following))
        try:
            async with self._frozen(machine, mounted.slot):
                sealed = await machine.vm.seal_volume(mounted.slot, following)
            reached("commit.sealed")
            version = await asyncio.to_thread(
                lambda: self._volumes.publish(
                    mounted.volume_id, sealed, mounted.size_bytes, kept=kept, source=entry.sandbox_id
                )
            )
            mounted = replace(mounted, version=version.number)
        finally:
            self._remember(machine, replace(mounted, disk=machine.vm.volumes[mounted.slot]))
            self._disks.release(following)
        reached("commit.published")
        self._fold_later(mounted.volume_id)
        return version

    @contextlib.asynccontextmanager
    async def _frozen(self, machine: Machine, slot: int) -> AsyncIterator[None]:
        """What its disk says is a whole file system. The guest goes on by itself if we never come back."""
        await machine.guest.flush([slot], frozen_s=COMMIT_S)
        try:
            yield
        finally:
            with contextlib.suppress(ForkyardError):
                await machine.guest.thaw()

    def _remember(self, machine: Machine, mounted: Mounted) -> None:
        volumes = [mounted if one.slot == mounted.slot else one for one in machine.entry.volumes]
        machine.entry = self._journal.write(replace(machine.entry, volumes=volumes))

    def _check_commit(self, mounted: Mounted, *, force: bool) -> None:
        newest = self._volumes.find(mounted.volume_id)
        if mounted.mode == "ro":
            raise InvalidRequest("it is mounted read-only: there is nothing to commit", field="path")
        if mounted.mode == "cow" and newest.number != mounted.version and not force:
            raise VolumeChanged(
                f"the volume is at version {newest.number} now, and this copy was made of version {mounted.version}; "
                "make a new copy and repeat the change, or commit with force",
                version=newest.number,
                began_with=mounted.version,
            )

    def _fold_later(self, volume_id: str) -> None:
        async def fold() -> None:
            try:
                await asyncio.to_thread(self._volumes.fold, volume_id, self._longest)
            except (HostFailure, VolumeNotFound) as error:
                log.warning("volume not folded", volume=volume_id, error=error.message)

        task = asyncio.create_task(fold(), name=f"fold volume {volume_id}")
        self._folding.add(task)
        task.add_done_callback(self._folding.discard)

    async def settle(self) -> None:
        """Nothing of its own is needed after this."""
        await asyncio.gather(*self._folding, return_exceptions=True)
        if self._empty is not None:
            self._disks.release(self._empty)
            self._empty = None


def _at(entry: Entry, path: str) -> Mounted:
    for one in entry.volumes:
        if one.path == path:
            return one
    raise VolumeNotFound(f"sandbox {entry.sandbox_id} has no volume at {path}")


def version_of(version: Version) -> VolumeVersion:
    return VolumeVersion(version.number, version.size_bytes, version.kept, version.source, version.created_at)
