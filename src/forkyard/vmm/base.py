"""The driver seam: what the host asks of a hypervisor, and nothing more.

A driver boots a machine once (`boot`), saves it (`Vm.save`), and from then on only restores: `shell` starts a hypervisor
that can become any snapshot of its template, `Vm.load` makes it one, `restore` is both. A running VM becomes a snapshot by
`Vm.capture`. A VM outlives the process that started it: `adopt` takes over one that a previous daemon left running, `reclaim`
removes every trace of one. All that a driver needs to find a VM again is in its `VmRecord`, which the host writes to its
journal *before* the driver starts anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from forkyard.models import Check, Shape


@dataclass(frozen=True)
class VmRecord:
    """What identifies one VM on this host. Everything a VM owns is derived from it."""

    vm_id: str  # "<sandbox id>-<incarnation>", or "template-<key>"
    dir: Path  # sockets, logs; owned by this VM alone
    uid: int  # unprivileged user this VM runs as, its own
    shape: Shape
    disk: Path  # qcow2 it starts to write on; made if it does not exist. Later see `Vm.disk`.
    netns: Path | None = None  # network namespace with the tap of its network card; None: one of its own, empty


#: A machine has so many places for volumes. Each costs every start a millisecond, used or not.
VOLUME_SLOTS = 4


@dataclass(frozen=True)
class VolumeDisk:
    """A disk beside the root's, in one of the slots."""

    slot: int
    disk: Path  # a new qcow2 this VM writes to; made over `below`
    below: Path  # a sealed qcow2
    size_bytes: int


@dataclass(frozen=True)
class BootSource:
    """What a machine is booted from."""

    kernel: Path
    initramfs: Path
    disk: Path  # raw base, never written; not used if the VM's own disk exists
    kernel_args: str = ""


@dataclass(frozen=True)
class SnapshotFiles:
    """RAM, device state and disk at one instant. `ram` is on tmpfs; all are read-only to VMs."""

    ram: Path  # of the template, shared by all that descend from it
    device_state: Path
    disk: Path  # a sealed qcow2
    #: Pages that differ from `ram`: a file as long as RAM, page i at i * 4096, a hole where nothing differs.
    layer: Path | None = None
    #: Else its pages stand one behind the other, and this is where they belong: (first page, how many).
    runs: Sequence[tuple[int, int]] | None = None


class PageSink(Protocol):
    """Takes the pages of a capture as they are read."""

    def save(self, runs: Sequence[tuple[int, int]], content: memoryview) -> None:
        """Blocking: these parts of RAM (from byte, to byte), one behind the other in `content`, which is used again
        afterwards. A page that comes again replaces the first."""
        ...


@dataclass(frozen=True)
class CaptureTarget:
    """Where a capture goes. None of these files exists yet."""

    layer: Path | PageSink  # a file on tmpfs, or whoever wants the pages themselves
    device_state: Path
    next_disk: Path | None  # the disk is sealed, and the VM goes on writing here; None: the disk stays its own
    next_volumes: Mapping[int, Path] = field(default_factory=dict)  # the same, for each slot that has a volume


@dataclass(frozen=True)
class Captured:
    paused_ms: float  # how long the CPUs stood still, or until they were stopped for good
    disk: Path  # what belongs to that instant; sealed if there is a next disk
    volumes: Mapping[int, Path] = field(default_factory=dict)  # likewise, by slot


@dataclass(frozen=True)
class Start:
    """How fast an idle hypervisor starts: the reference of every benchmark."""

    greeting_ms: float  # to the greeting on its control socket, said before there is a machine
    answer_ms: float  # to the answer to its first command: it has a machine


class ExitKind(StrEnum):
    KILLED = "killed"  # by us
    SHUTDOWN = "shutdown"  # the guest powered off
    PANIC = "panic"  # the guest kernel panicked
    OUT_OF_MEMORY = "out_of_memory"  # the guest kernel panicked for want of memory
    CRASHED = "crashed"  # the hypervisor died


@dataclass(frozen=True)
class VmExit:
    kind: ExitKind
    detail: str


@dataclass(frozen=True)
class VmUsage:
    pss_mib: float
    cpu_s: float


@dataclass(frozen=True)
class VmCounters:
    """What costs next to nothing to know."""

    cpu_s: float
    resident_bytes: int  # pages that it shares with others included


class Vm(Protocol):
    """One running hypervisor process."""

    @property
    def record(self) -> VmRecord: ...
    @property
    def pid(self) -> int: ...
    @property
    def agent_socket(self) -> Path:
        """Unix socket of the control channel to the guest agent."""
        ...

    @property
    def console_log(self) -> Path: ...

    @property
    def disk(self) -> Path:
        """The qcow2 this VM writes to now; a capture may have moved it on from `record.disk`."""
        ...

    @property
    def volumes(self) -> Mapping[int, Path]:
        """The qcow2 of each slot that has a volume, likewise."""
        ...

    async def load(self, snapshot: SnapshotFiles, volumes: Sequence[VolumeDisk] = ()) -> None:
        """Into a shell of the same template: it becomes this snapshot, CPUs still stopped, with a new vmgenid. `volumes`
        are those the snapshot was made with."""
        ...

    async def attach(self, volumes: Sequence[VolumeDisk]) -> None:
        """Put volumes into empty slots; a guest that runs learns of it."""
        ...

    async def take_out(self, slot: int) -> None:
        """Undoes `attach`; the guest uses it no more. What was written is nobody's: its file is gone."""
        ...

    async def seal_volume(self, slot: int, next_disk: Path) -> Path:
        """What is in the slot now is sealed, and returned; the VM goes on writing to `next_disk`, made over it."""
        ...

    async def capture(self, target: CaptureTarget, *, keep_running: bool) -> Captured:
        """RAM, device state and disk at one instant, while the VM runs but for a short pause. Afterwards it goes on as it
        was, or stays stopped if not `keep_running`. If it fails or is cancelled, the VM goes on as it was, the target's
        files are gone, and `disk` says which disk is in use. Nothing is synced to the host's disk but what the guest had
        synced: durability is the host's affair."""
        ...

    async def flatten(self, base: Path) -> None:
        """Copy what lies between the disk and `base`, which it rests on, into the disk, so that it rests on `base` itself.
        While the VM goes on; nothing between is changed. A capture, or the end of the VM, cuts it off: then the chain is as
        it was."""
        ...

    async def cont(self) -> None:
        """Let the CPUs run."""
        ...

    async def stop(self) -> None:
        """Halt the CPUs."""
        ...

    async def save(self, device_state: Path) -> None:
        """Write device state of a stopped VM to this file (created, fsynced). RAM and disk are where they are."""
        ...

    async def wait(self) -> VmExit:
        """Return when the VM has ended, however it did. May be awaited by several tasks."""
        ...

    async def kill(self) -> None:
        """End it now. Idempotent; returns when the process is gone."""
        ...

    async def usage(self) -> VmUsage: ...

    def counters(self) -> VmCounters | None:
        """Blocking, for a thread. None: it has ended."""
        ...

    async def detach(self) -> None:
        """Close our connections and leave the VM running (the daemon stops)."""
        ...


class Driver(Protocol):
    @property
    def accel(self) -> str:
        """`kvm`, `tcg` or `fake`."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when a snapshot made by another version of this driver could not be restored by this one."""
        ...

    async def boot(self, record: VmRecord, source: BootSource, ram: Path, *, template: bool = True) -> Vm:
        """Cold boot, CPUs stopped. `record.disk` is used as it is if it exists, else made over `source.disk`.
        To make a template, `ram` is a new file on tmpfs, which the guest's memory becomes. Otherwise `ram` stays all zero
        (it is made if missing, and may be shared by all VMs of this memory size): a snapshot of such a VM is a layer over it.
        """
        ...

    async def shell(self, record: VmRecord, ram: Path) -> Vm:
        """A started hypervisor on this template's RAM that waits for `load`."""
        ...

    async def restore(self, record: VmRecord, snapshot: SnapshotFiles) -> Vm:
        """`shell` and `load`. `record.disk` is used as it is if it exists, else made over `snapshot.disk`."""
        ...

    async def adopt(self, record: VmRecord) -> Vm | None:
        """Take over a VM that still runs; None if it does not."""
        ...

    async def reclaim(self, record: VmRecord) -> None:
        """Kill what may still run and remove all a VM leaves outside `record.dir` (cgroups …). Idempotent."""
        ...

    async def console(self, record: VmRecord, tail_bytes: int) -> str:
        """The end of a VM's serial console, also of one that has ended."""
        ...

    async def checks(self) -> list[Check]:
        """What `forkyard doctor` says about this driver, in plain words."""
        ...

    async def start_idle_ms(self, scratch: Path) -> Start:
        """Start an idle hypervisor and end it."""
        ...


@dataclass(frozen=True)
class FaultPlan:
    """Latency and faults a fake driver injects, by the name of the step (`boot`, `restore`, `cont`, `exec` …)."""

    delay_s: Mapping[str, float] = field(default_factory=dict)
    fail: Mapping[str, Exception] = field(default_factory=dict)
