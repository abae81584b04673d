"""One cgroup per VM: limits that protect the host, and the way to find a VM's processes again.

Owns: `forkyard-<scope>/<vm_id>` in the hierarchies that limit CPU, memory and processes, under cgroup v1, v2 or both.
`scope` tells the daemons of one machine apart. All calls are blocking, and short except `kill_all`.
Never does: deciding what is killed.

On a machine with both versions only the v1 hierarchies are joined: v2 has no controllers there, and joining it costs
5–10 ms where v1 lets a process move itself in 0.05 ms. Under v1 the CPU groups have no common parent: all VMs together
would weigh as much as one single process beside them.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from forkyard.errors import HostFailure
from forkyard.vmm.qemu.process import kill_now

CONTROLLERS = ("cpu", "memory", "pids")
#: What a VM may use beyond its vCPUs, for its disk and its console.
CPU_OVERHEAD = 1.1
_PERIOD_US = 100_000
_V1_SHARES, _V2_WEIGHT = 1024, 100  # of one vCPU: as much as an ordinary process, or group


@dataclass(frozen=True)
class Hierarchy:
    root: Path
    version: int
    controllers: tuple[str, ...]

    @property
    def entrance(self) -> str:
        """The file into which a single-threaded process writes "0" to move itself. v1's `tasks` moves one thread and so
        needs no lock over all cgroups, as `cgroup.procs` does."""
        return "tasks" if self.version == 1 else "cgroup.procs"

    @property
    def flat(self) -> bool:
        return self.version == 1 and "cpu" in self.controllers


def hierarchies(mountinfo: str, v2_controllers: dict[str, str] | None = None) -> list[Hierarchy]:
    """Where the controllers are, from the text of /proc/self/mountinfo; `v2_controllers` maps a v2 mount point to the
    content of its `cgroup.controllers`."""
    found: list[Hierarchy] = []
    unified: Path | None = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point, kind = Path(before.split()[4]), after.split()[0]
        if kind == "cgroup":
            options = after.split()[-1].split(",")
            mine = tuple(c for c in CONTROLLERS if c in options and not any(c in h.controllers for h in found))
            if mine:
                found.append(Hierarchy(point, 1, mine))
        elif kind == "cgroup2" and unified is None:
            unified = point
    if unified is not None:
        offered = (v2_controllers or {}).get(str(unified), "").split()
        mine = tuple(c for c in CONTROLLERS if c in offered and not any(c in h.controllers for h in found))
        if mine or not found:
            found.append(Hierarchy(unified, 2, mine))
    return found


def _of_this_machine() -> list[Hierarchy]:
    mountinfo = Path("/proc/self/mountinfo").read_text()
    points = [line.split()[4] for line in mountinfo.splitlines() if " - cgroup2 " in line]
    offered = {}
    for point in points:
        with contextlib.suppress(OSError):
            offered[point] = Path(point, "cgroup.controllers").read_text()
    return [h for h in hierarchies(mountinfo, offered) if os.access(h.root, os.W_OK)]


class Cgroups:
    def __init__(self, scope: str, found: list[Hierarchy] | None = None) -> None:
        self._name = f"forkyard-{scope}"
        self.hierarchies = _of_this_machine() if found is None else found

    def directories(self, vm_id: str) -> list[Path]:
        return [self._directory(h, vm_id) for h in self.hierarchies]

    def _directory(self, hierarchy: Hierarchy, vm_id: str) -> Path:
        return hierarchy.root / (f"{self._name}.{vm_id}" if hierarchy.flat else f"{self._name}/{vm_id}")

    def create(self, vm_id: str, *, vcpus: int, memory_bytes: int, pids: int) -> list[Path]:
        """Make a VM's groups and set their limits; returns the files through which a process enters."""
        try:
            for hierarchy in self.hierarchies:
                self._create(hierarchy, vm_id, vcpus, memory_bytes, pids)
        except OSError as error:
            with contextlib.suppress(HostFailure):
                self.remove(vm_id)
            raise HostFailure(
                f"cannot make the cgroup of VM {vm_id}: {error}; is /sys/fs/cgroup writable for this daemon?"
            ) from error
        return [self._directory(h, vm_id) / h.entrance for h in self.hierarchies]

    def _create(self, hierarchy: Hierarchy, vm_id: str, vcpus: int, memory_bytes: int, pids: int) -> None:
        directory = self._directory(hierarchy, vm_id)
        parent = directory.parent
        for last_try in (False, False, True):
            try:
                parent.mkdir(exist_ok=True)
                if hierarchy.version == 2 and hierarchy.controllers:
                    enable = " ".join(f"+{c}" for c in hierarchy.controllers)
                    for group in (hierarchy.root, parent):
                        (group / "cgroup.subtree_control").write_text(enable)
                directory.mkdir(exist_ok=True)
                break
            except FileNotFoundError:  # the last other VM left, and took the parent with it
                if last_try:
                    raise
        if "cpu" in hierarchy.controllers:
            _limit_cpu(directory, hierarchy.version, vcpus)
        if "memory" in hierarchy.controllers:
            name = "memory.limit_in_bytes" if hierarchy.version == 1 else "memory.max"
            (directory / name).write_text(str(memory_bytes))
        if "pids" in hierarchy.controllers:
            (directory / "pids.max").write_text(str(pids))

    def processes(self, vm_id: str) -> set[int]:
        found: set[int] = set()
        for directory in self.directories(vm_id):
            with contextlib.suppress(OSError):
                found.update(int(pid) for pid in (directory / "cgroup.procs").read_text().split())
        return found

    def out_of_memory(self, vm_id: str) -> bool:
        """Whether the kernel killed a process of this VM for going over the limit."""
        for hierarchy, directory in zip(self.hierarchies, self.directories(vm_id), strict=True):
            name = "memory.oom_control" if hierarchy.version == 1 else "memory.events"
            with contextlib.suppress(OSError):
                for line in (directory / name).read_text().splitlines():
                    key, _, count = line.partition(" ")
                    if key == "oom_kill" and int(count) > 0:
                        return True
        return False

    def kill_all(self, vm_id: str, *, timeout_s: float) -> None:
        """Kill every process of a VM and return when none is left."""
        deadline = time.monotonic() + timeout_s
        while pids := self.processes(vm_id):
            for pid in pids:
                kill_now(pid, timeout_s=max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise HostFailure(f"processes {sorted(pids)} of VM {vm_id} do not end even when killed; see dmesg")

    def remove(self, vm_id: str) -> None:
        """Remove a VM's groups; they must be empty. The parent goes with the last of them."""
        for directory in self.directories(vm_id):
            with contextlib.suppress(FileNotFoundError):
                _rmdir(directory)
            if directory.parent.name == self._name:
                with contextlib.suppress(OSError):
                    directory.parent.rmdir()


def _limit_cpu(directory: Path, version: int, vcpus: int) -> None:
    quota_us = int(vcpus * CPU_OVERHEAD * _PERIOD_US)
    # What was not used lately may be used at once: a start is such a burst. Kernels before 5.14 know none.
    if version == 1:
        (directory / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (directory / "cpu.cfs_quota_us").write_text(str(quota_us))
        (directory / "cpu.shares").write_text(str(vcpus * _V1_SHARES))
        burst = directory / "cpu.cfs_burst_us"
    else:
        (directory / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        (directory / "cpu.weight").write_text(str(vcpus * _V2_WEIGHT))
        burst = directory / "cpu.max.burst"
    if burst.exists():
        burst.write_text(str(quota_us))


def _rmdir(directory: Path) -> None:
    # The kernel takes a moment to empty a group after its last process is gone.
    for pause_s in (0.001, 0.005, 0.02, 0.1, 0.5, None):
        try:
            directory.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if pause_s is None:
                raise HostFailure(f"cannot remove cgroup {directory}: {error}; a process is left in it") from error
            time.sleep(pause_s)
