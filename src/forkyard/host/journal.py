"""The host's journal: which machines this host has, and where each one's belongings are.

One directory per VM, `<state_dir>/vms/<vm_id>/`, holds its sockets, logs and `journal.json`. The entry is on disk
before the driver starts anything, so that after a crash at any line the next daemon finds either nothing, or an entry
that leads to everything. A directory without a readable entry belongs to a VM that never started.

An entry outlives its process: a machine that sleeps on disk, or was shut down, is an entry without a VM.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from forkyard.hosts.base import Incarnation
from forkyard.models import Milestone, Shape
from forkyard.storage.disks import backing_file
from forkyard.storage.durable import sync_all
from forkyard.storage.volumes import Mounted, disks_of
from forkyard.vmm.base import Vm, VmRecord

ENTRY = "journal.json"


class Phase(StrEnum):
    STARTING = "starting"  # half made; after a crash it is removed
    RUNNING = "running"
    PAUSED = "paused"  # CPUs stopped, memory kept by the process
    COLD = "cold"  # no process; memory and device state are a snapshot on disk
    STOPPED = "stopped"  # no process, no memory: a disk


def host_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Entry:
    vm_id: str
    uid: int
    shape: Shape
    boot_id: str  # of the host: a process of an earlier boot cannot be alive
    base: str  # what its RAM is a private copy of: a template's key, or a file of zeros
    disk: Path
    next_disk: Path | None = None  # a capture is moving it there
    phase: Phase = Phase.STARTING
    sandbox_id: str | None = None  # None: builds a template, or waits in the pool
    incarnation: int = 0
    env: dict[str, str] = field(default_factory=dict)
    memory: str | None = None  # the snapshot that holds its memory, when cold
    volumes: list[Mounted] = field(default_factory=list)
    milestones: list[Milestone] = field(default_factory=list)

    @property
    def owner(self) -> Incarnation | None:
        return Incarnation(self.sandbox_id, self.incarnation) if self.sandbox_id else None


class Journal:
    def __init__(self, directory: Path, netns: Callable[[int], Path] | None = None) -> None:
        """`netns`: where the network namespace of the VM of a user id is."""
        self._dir = directory
        self._netns = netns
        self._known: dict[str, Entry] = {}

    def load(self) -> list[Entry]:
        """What an earlier daemon left; called once. Directories without an entry are removed."""
        if not self._dir.is_dir():
            return []
        for path in sorted(self._dir.iterdir()):
            entry = self._read(path)
            if entry is None:
                shutil.rmtree(path, ignore_errors=True)
            else:
                self._known[entry.vm_id] = entry
        return list(self._known.values())

    def record(self, entry: Entry) -> VmRecord:
        directory = self._dir / entry.vm_id
        netns = self._netns(entry.uid) if self._netns is not None else None
        return VmRecord(entry.vm_id, directory, entry.uid, entry.shape, entry.disk, netns)

    def begin(self, entry: Entry) -> VmRecord:
        """Make the VM's directory and its entry. The directory stays root's: a VM may write to the files it was given,
        but cannot make, move or link any, so the daemon can trust every path in it."""
        record = self.record(entry)
        self._dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        record.dir.mkdir(mode=0o711)
        self.write(entry)
        return record

    def write(self, entry: Entry, *, durable: bool = False) -> Entry:
        """`durable`: what it says is true without a process, and must be found after the host lost its power."""
        body = asdict(entry)
        body |= {
            "shape": entry.shape.model_dump(),
            "milestones": [m.model_dump() for m in entry.milestones],
            "disk": str(entry.disk),
            "next_disk": str(entry.next_disk) if entry.next_disk else None,
            "volumes": [mounted.to_json() for mounted in entry.volumes],
        }
        path = self._dir / entry.vm_id / ENTRY
        temporary = path.with_suffix(".new")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(body, file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(path)
        if durable:
            sync_all([path.parent, self._dir])
        self._known[entry.vm_id] = entry
        return entry

    def forget(self, entry: Entry) -> None:
        """Remove a VM's directory. Called when nothing of the VM runs any more."""
        shutil.rmtree(self._dir / entry.vm_id, ignore_errors=True)
        self._known.pop(entry.vm_id, None)

    def disks(self) -> Iterable[Path]:
        """Disks that machines write to or start from."""
        for entry in self._known.values():
            yield entry.disk
            if entry.next_disk is not None:
                yield entry.next_disk
            yield from disks_of(entry.volumes)

    def entries(self) -> list[Entry]:
        return list(self._known.values())

    def uids(self) -> set[int]:
        """In use by a process, or about to be."""
        return {entry.uid for entry in self._known.values() if entry.phase not in (Phase.COLD, Phase.STOPPED)}

    def _read(self, directory: Path) -> Entry | None:
        try:
            body = json.loads((directory / ENTRY).read_text())
            body["shape"] = Shape(**body["shape"])
            body["milestones"] = [Milestone(**m) for m in body["milestones"]]
            body["phase"] = Phase(body["phase"])
            body["disk"] = Path(body["disk"])
            body["next_disk"] = Path(body["next_disk"]) if body["next_disk"] else None
            body["volumes"] = [Mounted.of_json(mounted) for mounted in body.get("volumes", [])]
            return Entry(**body)
        except (OSError, ValueError, TypeError, KeyError):
            return None


def with_disks_of(vm: Vm, entry: Entry) -> Entry:
    """A machine that runs, with the disks it writes to now."""
    volumes = [replace(one, disk=vm.volumes.get(one.slot, one.disk), next_disk=None) for one in entry.volumes]
    return replace(entry, disk=vm.disk, next_disk=None, volumes=volumes)


def settled_disk(entry: Entry) -> Entry:
    """Which disks a machine has whose daemon died during a capture. The new one, if it was made: before the switch it is
    an empty view of the old one, and after it, it has all that was written since."""
    volumes = [
        replace(mounted, disk=_settled(mounted.disk, mounted.next_disk), next_disk=None) for mounted in entry.volumes
    ]
    return replace(entry, disk=_settled(entry.disk, entry.next_disk), next_disk=None, volumes=volumes)


def _settled(disk: Path, following: Path | None) -> Path:
    return following if following is not None and backing_file(following) == disk else disk
