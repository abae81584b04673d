"""The fake driver keeps the promises of a driver: VMs outlive it, and every end has a kind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forkyard.errors import VmStartFailed
from forkyard.models import Shape
from forkyard.vmm.base import BootSource, CaptureTarget, ExitKind, FaultPlan, SnapshotFiles, VmRecord
from forkyard.vmm.fake import FakeDriver, FakeVm, FakeWorld

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def record(tmp_path: Path, name: str = "s1-1") -> VmRecord:
    return VmRecord(name, tmp_path / name, 660000, Shape(), tmp_path / name / "disk.qcow2")


async def booted(driver: FakeDriver, tmp_path: Path, name: str = "s1-1") -> FakeVm:
    source = BootSource(tmp_path / "kernel", tmp_path / "initramfs", tmp_path / "disk")
    return await driver.boot(record(tmp_path, name), source, tmp_path / "ram")


async def test_a_snapshot_of_a_booted_vm_is_restored(tmp_path: Path) -> None:
    driver = FakeDriver()
    template = await booted(driver, tmp_path, "template-1")
    await template.stop()
    await template.save(tmp_path / "state")
    await template.kill()
    snapshot = SnapshotFiles(tmp_path / "ram", tmp_path / "state", template.disk)
    vm = await driver.restore(record(tmp_path), snapshot)
    assert not driver.world.processes["s1-1"].cpus_running
    await vm.cont()
    assert driver.world.processes["s1-1"].cpus_running
    assert "console" in await driver.console(vm.record, 100)


async def test_a_captured_vm_goes_on_with_a_new_disk_and_becomes_others(tmp_path: Path) -> None:
    driver = FakeDriver()
    parent = await booted(driver, tmp_path)
    await parent.cont()
    target = CaptureTarget(tmp_path / "layer", tmp_path / "state", tmp_path / "next.qcow2")
    captured = await parent.capture(target, keep_running=True)
    assert captured.disk == parent.record.disk
    assert parent.disk == target.next_disk
    assert driver.world.processes["s1-1"].cpus_running
    child = await driver.shell(record(tmp_path, "s2-1"), tmp_path / "ram")
    await child.load(SnapshotFiles(tmp_path / "ram", target.device_state, captured.disk, target.layer))
    assert child.disk.exists()
    await parent.capture(CaptureTarget(tmp_path / "layer2", tmp_path / "state2", None), keep_running=False)
    assert parent.disk == target.next_disk
    assert not driver.world.processes["s1-1"].cpus_running


async def test_a_snapshot_with_a_file_missing_does_not_restore(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    with pytest.raises(VmStartFailed, match="nothing"):
        await FakeDriver().restore(record(tmp_path), SnapshotFiles(nothing, nothing, nothing))


async def test_a_vm_outlives_its_driver_and_is_adopted_by_the_next(tmp_path: Path) -> None:
    world = FakeWorld()
    first = await booted(FakeDriver(world), tmp_path)
    await first.detach()
    adopted = await FakeDriver(world).adopt(record(tmp_path))
    assert adopted is not None
    assert adopted.pid == first.pid
    world.crash("s1-1")
    assert (await adopted.wait()).kind is ExitKind.CRASHED
    assert await FakeDriver(world).adopt(record(tmp_path)) is None


@pytest.mark.parametrize(
    ("how", "kind"),
    [("crash", ExitKind.CRASHED), ("panic", ExitKind.PANIC), ("shut_down", ExitKind.SHUTDOWN)],
)
async def test_every_end_has_its_kind_and_wakes_all_who_wait(tmp_path: Path, how: str, kind: ExitKind) -> None:
    driver = FakeDriver()
    vm = await booted(driver, tmp_path)
    waiting = [asyncio.create_task(vm.wait()) for _ in range(2)]
    await asyncio.sleep(0)
    getattr(driver.world, how)("s1-1")
    assert {ended.kind for ended in await asyncio.gather(*waiting)} == {kind}
    await vm.kill()
    assert (await vm.wait()).kind is kind


async def test_reclaiming_ends_a_vm_and_may_be_repeated(tmp_path: Path) -> None:
    driver = FakeDriver()
    vm = await booted(driver, tmp_path)
    for _ in range(2):
        await driver.reclaim(vm.record)
    assert (await vm.wait()).kind is ExitKind.KILLED
    assert driver.world.processes == {}


async def test_a_fault_plan_fails_and_delays_the_step_it_names(tmp_path: Path) -> None:
    driver = FakeDriver(faults=FaultPlan(delay_s={"cont": 0.01}, fail={"boot": VmStartFailed("no room")}))
    with pytest.raises(VmStartFailed, match="no room"):
        await booted(driver, tmp_path)
    assert driver.world.processes == {}
    driver.faults = FaultPlan(delay_s={"cont": 0.02})
    vm = await booted(driver, tmp_path)
    before = asyncio.get_running_loop().time()
    await vm.cont()
    assert asyncio.get_running_loop().time() - before >= 0.015
