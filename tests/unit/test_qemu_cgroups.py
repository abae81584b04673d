"""Finding the hierarchies of v1, v2 and mixed machines, and using them, on plain directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkyard.errors import HostFailure
from forkyard.vmm.qemu.cgroups import Cgroups, Hierarchy, hierarchies

ROOT = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw"
MEMORY = "34 31 0:31 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
PIDS = "37 31 0:34 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids"
CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:5 - cgroup cgroup rw,cpu,cpuacct"
UNIFIED = "39 31 0:36 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
PURE_V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def test_a_v2_machine_has_one_hierarchy_for_everything() -> None:
    found = hierarchies("\n".join([ROOT, PURE_V2]), {"/sys/fs/cgroup": "cpuset cpu io memory hugetlb pids\n"})
    assert found == [Hierarchy(Path("/sys/fs/cgroup"), 2, ("cpu", "memory", "pids"))]


def test_a_mixed_machine_uses_v1_where_the_controllers_are() -> None:
    found = hierarchies("\n".join([ROOT, CPU, MEMORY, PIDS, UNIFIED]), {"/sys/fs/cgroup/unified": "hugetlb"})
    assert [(h.root.name, h.version, h.controllers) for h in found] == [
        ("cpu", 1, ("cpu",)),
        ("memory", 1, ("memory",)),
        ("pids", 1, ("pids",)),
    ]


def test_a_controller_that_v1_lacks_is_taken_from_v2() -> None:
    found = hierarchies("\n".join([MEMORY, UNIFIED]), {"/sys/fs/cgroup/unified": "pids"})
    assert [(h.version, h.controllers) for h in found] == [(1, ("memory",)), (2, ("pids",))]


def test_v2_without_controllers_still_keeps_track_of_processes() -> None:
    assert hierarchies(UNIFIED, {}) == [Hierarchy(Path("/sys/fs/cgroup/unified"), 2, ())]


def test_a_machine_without_cgroups_has_none() -> None:
    assert hierarchies(ROOT) == []
    assert Cgroups("x", []).create("vm", vcpus=1, memory_bytes=1, pids=1) == []


def test_v1_limits_and_entrances(tmp_path: Path) -> None:
    groups = Cgroups("s", [Hierarchy(tmp_path / "m", 1, ("memory",)), Hierarchy(tmp_path / "p", 1, ("pids",))])
    (tmp_path / "m").mkdir()
    (tmp_path / "p").mkdir()
    entrances = groups.create("vm-1", vcpus=1, memory_bytes=1000, pids=50)
    assert entrances == [tmp_path / "m/forkyard-s/vm-1/tasks", tmp_path / "p/forkyard-s/vm-1/tasks"]
    assert (tmp_path / "m/forkyard-s/vm-1/memory.limit_in_bytes").read_text() == "1000"
    assert (tmp_path / "p/forkyard-s/vm-1/pids.max").read_text() == "50"


def test_v2_limits_need_the_controllers_enabled_above(tmp_path: Path) -> None:
    groups = Cgroups("s", [Hierarchy(tmp_path, 2, ("memory", "pids"))])
    assert groups.create("vm-1", vcpus=1, memory_bytes=1000, pids=50) == [tmp_path / "forkyard-s/vm-1/cgroup.procs"]
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (tmp_path / "forkyard-s/cgroup.subtree_control").read_text() == "+memory +pids"
    assert (tmp_path / "forkyard-s/vm-1/memory.max").read_text() == "1000"
    assert (tmp_path / "forkyard-s/vm-1/pids.max").read_text() == "50"


def test_v1_cpu_groups_stand_beside_each_other_and_weigh_as_many_processes_as_they_have_vcpus(tmp_path: Path) -> None:
    groups = Cgroups("s", [Hierarchy(tmp_path, 1, ("cpu",))])
    directory = tmp_path / "forkyard-s.vm-1"
    directory.mkdir()
    (directory / "cpu.cfs_burst_us").write_text("0")
    assert groups.create("vm-1", vcpus=2, memory_bytes=1, pids=1) == [directory / "tasks"]
    values = {path.name: path.read_text() for path in directory.iterdir()}
    assert values == {
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "220000",
        "cpu.cfs_burst_us": "220000",
        "cpu.shares": "2048",
    }


def test_v2_cpu_is_limited_also_on_a_kernel_without_bursts(tmp_path: Path) -> None:
    groups = Cgroups("s", [Hierarchy(tmp_path, 2, ("cpu",))])
    groups.create("vm-1", vcpus=1, memory_bytes=1, pids=1)
    values = {path.name: path.read_text() for path in (tmp_path / "forkyard-s/vm-1").iterdir()}
    assert values == {"cpu.max": "110000 100000", "cpu.weight": "100"}


def test_two_scopes_never_meet(tmp_path: Path) -> None:
    found = [Hierarchy(tmp_path, 1, ())]
    one, two = Cgroups("one", found), Cgroups("two", found)
    one.create("vm", vcpus=1, memory_bytes=1, pids=1)
    two.create("vm", vcpus=1, memory_bytes=1, pids=1)
    one.remove("vm")
    assert not one.directories("vm")[0].exists()
    assert two.directories("vm")[0].exists()


def test_removing_is_idempotent_and_takes_the_empty_parent(tmp_path: Path) -> None:
    groups = Cgroups("s", [Hierarchy(tmp_path, 1, ())])
    groups.create("a", vcpus=1, memory_bytes=1, pids=1)
    groups.create("b", vcpus=1, memory_bytes=1, pids=1)
    groups.remove("a")
    groups.remove("a")
    assert (tmp_path / "forkyard-s/b").exists()
    groups.remove("b")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_for_memory_is_recognised_in_both_versions(tmp_path: Path) -> None:
    one = Cgroups("s", [Hierarchy(tmp_path / "1", 1, ())])
    two = Cgroups("s", [Hierarchy(tmp_path / "2", 2, ())])
    for groups, name in ((one, "memory.oom_control"), (two, "memory.events")):
        (directory,) = groups.directories("vm")
        directory.mkdir(parents=True)
        (directory / name).write_text("low 0\noom 1\noom_kill 0\n")
        assert not groups.out_of_memory("vm")
        (directory / name).write_text("low 0\noom 1\noom_kill 1\n")
        assert groups.out_of_memory("vm")


def test_a_read_only_hierarchy_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostFailure, match="cannot make the cgroup of VM vm-7"):
        Cgroups("s", [Hierarchy(tmp_path / "file", 1, ())]).create("vm-7", vcpus=1, memory_bytes=1, pids=1)
