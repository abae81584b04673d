"""The host's journal: which VMs this host has started, and where each one's belongings are.

One directory per VM, `<state_dir>/vms/<vm_id>/`, holds all that a VM owns: its disk, sockets, logs, and `journal.json`.
The entry is on disk before the driver starts anything, so that after a crash at any line the next daemon finds either
nothing, or an entry that leads to everything. A directory without a readable entry belongs to a VM that never started.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from forkyard.models import Milestone, Shape
from forkyard.vmm.base import VmRecord

ENTRY = "journal.json"


def host_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True)
class Entry:
    vm_id: str
    uid: int
    shape: Shape
    boot_id: str  # of the host: a VM of an earlier boot cannot be alive
    sandbox_id: str | None = None  # None: the VM that builds a template
    incarnation: int = 0
    template: str = ""
    ready: bool = False  # the agent has answered; before, the VM is half made
    milestones: list[Milestone] = field(default_factory=list)


class Journal:
    def __init__(self, directory: Path) -> None:
        self._dir = directory

    def record(self, entry: Entry) -> VmRecord:
        return VmRecord(vm_id=entry.vm_id, dir=self._dir / entry.vm_id, uid=entry.uid, shape=entry.shape)

    def begin(self, entry: Entry) -> VmRecord:
        """Make the VM's directory and its entry. The directory stays root's: a VM may write to the files it was given,
        but cannot make, move or link any, so the daemon can trust every path in it."""
        record = self.record(entry)
        self._dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        record.dir.mkdir(mode=0o711)
        self._write(entry)
        return record

    def mark_ready(self, entry: Entry, milestones: list[Milestone]) -> Entry:
        ready = replace(entry, ready=True, milestones=milestones)
        self._write(ready)
        return ready

    def entries(self) -> list[Entry]:
        if not self._dir.is_dir():
            return []
        found = [self._read(path) for path in sorted(self._dir.iterdir())]
        return [entry for entry in found if entry is not None]

    def stray_directories(self) -> list[Path]:
        """Directories whose VM never got as far as an entry."""
        if not self._dir.is_dir():
            return []
        return [path for path in self._dir.iterdir() if self._read(path) is None]

    def forget(self, entry: Entry) -> None:
        """Remove a VM's directory. Called when nothing of the VM runs any more."""
        shutil.rmtree(self._dir / entry.vm_id, ignore_errors=True)

    def _write(self, entry: Entry) -> None:
        # No fsync: the entry describes processes, which do not survive what an unsynced write does not survive either.
        body = asdict(entry)
        body["shape"] = entry.shape.model_dump()
        body["milestones"] = [m.model_dump() for m in entry.milestones]
        path = self._dir / entry.vm_id / ENTRY
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(body))
        temporary.rename(path)

    def _read(self, directory: Path) -> Entry | None:
        try:
            body = json.loads((directory / ENTRY).read_text())
            body["shape"] = Shape(**body["shape"])
            body["milestones"] = [Milestone(**m) for m in body["milestones"]]
            return Entry(**body)
        except (OSError, ValueError, TypeError, KeyError):
            return None
