"""The driver seam: what the host asks of a hypervisor, and nothing more.

A driver boots a machine once (`boot`), saves it (`Vm.save`), and from then on only restores (`restore`). A VM outlives the
process that started it: `adopt` takes over one that a previous daemon left running, `reclaim` removes every trace of one.
All that a driver needs to find a VM again is in its `VmRecord`, which the host writes to its journal *before* the driver
starts anything.
"""

from __future__ import annotations

from collections.abc import Mapping
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


@dataclass(frozen=True)
class BootSource:
    """What a template is booted from."""

    kernel: Path
    initramfs: Path
    disk: Path  # raw base, never written
    kernel_args: str = ""


@dataclass(frozen=True)
class SnapshotFiles:
    """RAM, device state and disk at one instant. `ram` is on tmpfs; all are read-only to VMs."""

    ram: Path
    device_state: Path
    disk: Path


class ExitKind(StrEnum):
    KILLED = "killed"  # by us
    SHUTDOWN = "shutdown"  # the guest powered off
    PANIC = "panic"  # the guest kernel panicked
    CRASHED = "crashed"  # the hypervisor died


@dataclass(frozen=True)
class VmExit:
    kind: ExitKind
    detail: str


@dataclass(frozen=True)
class VmUsage:
    pss_mib: float
    cpu_s: float


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

    async def boot(self, record: VmRecord, source: BootSource, ram: Path) -> Vm:
        """Cold boot with `ram` (a new file on tmpfs) shared, and a new qcow2 disk `record.dir/disk.qcow2` on `source.disk`."""
        ...

    async def restore(self, record: VmRecord, snapshot: SnapshotFiles) -> Vm:
        """A private copy of a snapshot, CPUs still stopped, with a new vmgenid. Writes only below `record.dir`."""
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

    async def start_idle_ms(self, scratch: Path) -> float:
        """Time to start an idle hypervisor to its first answer, and end it: the reference of every benchmark."""
        ...


@dataclass(frozen=True)
class FaultPlan:
    """Latency and faults a fake driver injects, by the name of the step (`boot`, `restore`, `cont`, `exec` …)."""

    delay_s: Mapping[str, float] = field(default_factory=dict)
    fail: Mapping[str, Exception] = field(default_factory=dict)
