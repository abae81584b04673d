"""Snapshots of running machines, and machines made from them: what a fork, a pause and a resume stand on."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forkyard.errors import HostFailure, SnapshotFailed, VmCrashed, VmStartFailed
from forkyard.vmm.base import CaptureTarget, SnapshotFiles
from forkyard.vmm.qemu import QemuDriver, capture, pages
from forkyard.vmm.qemu import vm as vms
from forkyard.vmm.qemu.vm import QemuVm

from .yard import Yard, ask, runs, saved_yard, start

pytestmark = pytest.mark.timeout(300)

# Each sweep writes the same number to the first byte of every page, and first checks that all pages have the one of the
# sweep before. A page saved too early or too late breaks the pattern for ever.
CHURN = """
import sys
pages = int(sys.argv[1]) * 256
memory, sweep = bytearray(pages * 4096), 0
while True:
    before, sweep = sweep, sweep % 250 + 1
    for i in range(0, pages * 4096, 4096):
        if memory[i] != before:
            open("/run/torn", "a").write(f"page {i // 4096} is {memory[i]}, not {before}\\n")
        memory[i] = sweep
    open("/run/sweeps", "a").write("x")
"""

COUNT = """
import itertools, time
for i in itertools.count():
    open("/mnt/new", "w").write(str(i))
    __import__("os").rename("/mnt/new", "/mnt/count")
    time.sleep(0.05)
"""
ZERO = """
import mmap, os, time
memory = mmap.mmap(-1, 4 << 20)
memory.write(b"x" * len(memory))
open("/run/full", "w")
while not os.path.exists("/run/go"):
    time.sleep(0.05)
memory[:] = bytes(len(memory))
open("/run/zero", "w")
while memory[:] == bytes(len(memory)):
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def saved() -> Iterator[Yard]:
    with saved_yard() as yard:
        yield yard


@pytest.fixture
def yard(saved: Yard) -> Iterator[Yard]:
    yield saved
    assert not saved.belongings()
    for path in saved.layers.iterdir():
        path.unlink()


async def start_churn(vm: QemuVm, size_mib: int) -> None:
    await start(vm, "churn.py", CHURN, size_mib)
    await sweeps(vm, 2)


async def sweeps(vm: QemuVm, more: int) -> None:
    """Wait until so many more sweeps are done, and all is well."""

    async def done() -> int:
        assert await runs(vm, "churn.py")
        assert await ask(vm, "cat /run/torn 2>/dev/null") == ""
        return int(await ask(vm, "sleep 0.2; stat -c %s /run/sweeps 2>/dev/null || echo 0"))

    before = await done()
    async with asyncio.timeout(120):
        while await done() < before + more:
            pass


async def still_runs(vm: QemuVm) -> None:
    """Its CPUs run, its memory and disk can be written, and it can be captured."""
    assert await ask(vm, "echo alive > /run/alive; echo alive > /root/alive; sync; cat /run/alive /root/alive") == (
        "alive\nalive\n"
    )


def test_a_fork_is_a_running_copy_of_memory_processes_and_disk(yard: Yard) -> None:
    async def run() -> None:
        async with yard.running() as (parent,):
            await ask(
                parent,
                "echo tmpfs > /dev/shm.txt; echo unsynced > /root/before; mount -t tmpfs t /mnt; echo m > /mnt/m",
            )
            await start(parent, "count.py", COUNT)
            await ask(parent, "until [ -e /mnt/count ]; do sleep 0.05; done")
            snapshot = await yard.capture(parent)
            await ask(parent, "echo parent > /root/after; echo parent > /mnt/m; sync")
            async with yard.running(snapshot) as (child,):
                assert await ask(child, "cat /dev/shm.txt /root/before /mnt/m") == "tmpfs\nunsynced\nm\n"
                assert "No such file" in await ask(child, "cat /root/after 2>&1")
                first = int(await ask(child, "cat /mnt/count"))
                assert int(await ask(child, "sleep 1; cat /mnt/count")) > first
                await ask(child, "echo child > /root/before; echo child > /mnt/m; sync")
                assert await ask(parent, "cat /root/before /root/after /mnt/m") == "unsynced\nparent\nparent\n"
                assert await ask(child, "cat /sys/block/vda/size") == f"{8 << 21}\n"
            await still_runs(parent)

    asyncio.run(run())


def test_generations_stand_on_their_own(yard: Yard) -> None:
    """Each is made from the one before, which is then gone with its layer."""

    async def run() -> None:
        async with contextlib.AsyncExitStack() as alive:
            (vm,) = await alive.enter_async_context(yard.running())
            for generation in range(1, 4):
                await ask(vm, f"echo {generation} >> /run/lines; echo {generation} >> /root/lines")
                snapshot = await yard.capture(vm)
                (child,) = await alive.enter_async_context(yard.running(snapshot))
                await yard.driver.reclaim(vm.record)
                assert snapshot.layer is not None
                snapshot.layer.unlink()
                vm = child
                expected = "".join(f"{n}\n" for n in range(1, generation + 1))
                assert await ask(vm, "cat /run/lines") == expected
                assert await ask(vm, "cat /root/lines") == expected

    asyncio.run(run())


def test_no_page_is_torn_while_the_parent_writes_all_the_time(yard: Yard) -> None:
    async def run() -> None:
        async with yard.running() as (parent,):
            await start_churn(parent, 12)
            for _ in range(4):
                snapshot = await yard.capture(parent)
                async with yard.running(snapshot) as (child,):
                    await parent.stop()
                    await sweeps(child, 3)
                    await parent.cont()
            await sweeps(parent, 3)

    asyncio.run(run())


def test_without_help_from_the_kernel_captures_are_the_same(yard: Yard) -> None:
    async def run() -> None:
        driver = await QemuDriver.open(cache_dir=yard.root, scope=yard.scope, accel="tcg", live_capture=False)
        assert any(check.name == "live-capture" and check.status == "warning" for check in await driver.checks())
        record = yard.record()
        try:
            parent = await driver.restore(record, yard.snapshot)
            await parent.cont()
            await start_churn(parent, 12)
            snapshot = await yard.capture(parent)
            async with yard.running(snapshot) as (child,):
                await sweeps(child, 2)
                again = await yard.capture(child)
                async with yard.running(again) as (grandchild,):
                    await sweeps(grandchild, 2)
            await sweeps(parent, 2)
        finally:
            await driver.reclaim(record)

    asyncio.run(run())


def test_both_ways_of_finding_pages_find_the_same(yard: Yard) -> None:
    async def run() -> None:
        async with yard.running() as (vm,):
            await ask(vm, "head -c 5000000 /dev/urandom > /run/x")
            await vm.stop()

            def look() -> None:
                ram = pages.ram_of(vm.pid, 512 << 20)
                with pages.PageTable(vm.pid) as table:
                    found = table.private(ram.run)
                    assert pages.total(found) > 5_000_000
                    assert pages.merge(found) == table.private_slowly(ram.run)

            await asyncio.to_thread(look)

    asyncio.run(run())


def test_bytes_that_arrive_in_the_middle_of_a_capture_break_nobody(yard: Yard) -> None:
    async def answers(child: QemuVm) -> None:
        """After what it was about to answer to its parent's host. Half a line may have reached it: a new one is begun."""
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_unix_connection(str(child.agent_socket))
            writer.write(b"\necho answers\n")
            while b"answers" not in (line := await reader.readline()):
                assert line, await child.wait()
            writer.close()
            await writer.wait_closed()

    async def run() -> None:
        async with yard.running() as (parent,):

            async def talk() -> None:
                while True:
                    assert await ask(parent, f"echo {'x' * 60_000} | wc -c") == "60001\n"

            talking = asyncio.create_task(talk())
            try:
                for _ in range(6):
                    snapshot = await yard.capture(parent)
                    async with yard.running(snapshot) as (child,):
                        await answers(child)
                assert not talking.done()
            finally:
                talking.cancel()
                await asyncio.wait({talking})

    asyncio.run(run())


def test_a_pause_loses_nothing_however_often(yard: Yard) -> None:
    async def run() -> None:
        record, snapshot = yard.record(), yard.snapshot
        try:
            for round_ in range(1, 4):
                vm = await yard.driver.restore(record, snapshot)
                await vm.cont()
                await ask(vm, f"echo {round_} >> /run/lines; echo {round_} >> /root/lines")
                snapshot = await yard.capture(vm, keep_running=False, seal=False)
                assert snapshot.disk == record.disk
                with pytest.raises(TimeoutError):
                    await ask(vm, "echo runs", timeout_s=1)
                await yard.driver.reclaim(record)
            vm = await yard.driver.restore(record, snapshot)
            await vm.cont()
            assert await ask(vm, "cat /run/lines /root/lines") == "1\n2\n3\n1\n2\n3\n"
            await ask(vm, "echo 3 > /proc/sys/vm/drop_caches")
            assert await ask(vm, "cat /root/lines") == "1\n2\n3\n"
        finally:
            await yard.driver.reclaim(record)

    asyncio.run(run())


def test_a_stopped_machine_is_captured_and_stays_stopped(yard: Yard) -> None:
    async def run() -> None:
        async with yard.running() as (vm,):
            await ask(vm, "echo here > /run/x")
            await vm.stop()
            snapshot = await yard.capture(vm)
            with pytest.raises(TimeoutError):
                await ask(vm, "echo runs", timeout_s=1)
            async with yard.running(snapshot) as (child,):
                assert await ask(child, "cat /run/x") == "here\n"
            await vm.cont()
            await still_runs(vm)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def refused_capture(yard: Yard) -> AsyncIterator[QemuVm]:
    """A VM, of which nothing may have changed at the end."""
    async with yard.running() as (vm,):
        await ask(vm, "head -c 8000000 /dev/urandom > /run/x; md5sum /run/x > /run/sum")
        disk, files = vm.disk, set(vm.record.dir.iterdir())
        yield vm
        assert vm.disk == disk
        assert set(vm.record.dir.iterdir()) == files
        await still_runs(vm)
        snapshot = await yard.capture(vm)
        async with yard.running(snapshot) as (child,):
            assert await ask(child, "md5sum -c /run/sum") == "/run/x: OK\n"


@pytest.mark.parametrize("keep_running", [True, False])
def test_a_capture_with_nowhere_to_go_leaves_the_machine_running(yard: Yard, keep_running: bool) -> None:
    async def run() -> None:
        nowhere = yard.root / "nowhere"
        async with refused_capture(yard) as vm:
            for broken in (
                {"layer": nowhere / "layer"},
                {"device_state": nowhere / "state"},
                {"next_disk": nowhere / "disk"},
            ):
                good = yard.target(vm)
                target = CaptureTarget(**{**vars(good), **broken})
                with pytest.raises(HostFailure, match="nowhere"):
                    await vm.capture(target, keep_running=keep_running)
                assert not good.layer.exists()
                assert not good.device_state.exists()
            for taken in (good.layer, good.device_state, good.next_disk):
                assert taken is not None
                taken.write_text("precious")
                with pytest.raises(SnapshotFailed, match="in the way"):
                    await vm.capture(good, keep_running=keep_running)
                assert taken.read_text() == "precious"
                taken.unlink()

    asyncio.run(run())


def test_a_full_tmpfs_leaves_the_machine_running(yard: Yard) -> None:
    small = yard.root / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "small", small], check=True)

    async def run() -> None:
        async with refused_capture(yard) as vm:
            good = yard.target(vm)
            with pytest.raises(SnapshotFailed, match="No space left"):
                await vm.capture(CaptureTarget(small / "layer", good.device_state, good.next_disk), keep_running=True)
            with pytest.raises(SnapshotFailed, match="No space left"):
                (small / "filler").write_bytes(bytes((2 << 20) - 4096))
                await vm.capture(CaptureTarget(good.layer, small / "state", good.next_disk), keep_running=True)
            assert [path.name for path in small.iterdir()] == ["filler"]

    try:
        asyncio.run(run())
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("step", ["rest", "seal"])
def test_a_failure_in_the_pause_leaves_the_machine_running(
    yard: Yard, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = capture.Sealing.switch

    def fail(*_: object) -> None:
        raise SnapshotFailed("out of luck")

    async def refuse(self: capture.Sealing) -> None:
        self.below = [replace(top, number=99) for top in self.below]  # QEMU has no such node
        await switch(self)

    async def run() -> None:
        async with refused_capture(yard) as vm:
            with monkeypatch.context() as patched:
                if step == "rest":
                    patched.setattr(capture.Copier, "rest", fail)
                else:
                    patched.setattr(capture.Sealing, "switch", refuse)
                with pytest.raises(HostFailure, match=r"out of luck|top-99"):
                    await vm.capture(yard.target(vm), keep_running=True)

    asyncio.run(run())


@pytest.mark.parametrize("after_ms", [0, 3, 10, 25, 40, 55])
def test_a_capture_cancelled_at_any_moment_leaves_the_machine_running(yard: Yard, after_ms: int) -> None:
    async def run() -> None:
        async with yard.running() as (vm,):
            await ask(vm, "head -c 20000000 /dev/urandom > /run/x; md5sum /run/x > /run/sum")
            target = yard.target(vm)
            task = asyncio.create_task(vm.capture(target, keep_running=True))
            await asyncio.wait({task}, timeout=after_ms / 1000)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task  # it was faster
            assert target.layer.exists() == target.device_state.exists() == (not task.cancelled())
            assert target.next_disk is not None
            assert target.next_disk.exists() == (vm.disk == target.next_disk)
            await still_runs(vm)
            snapshot = await yard.capture(vm)
            async with yard.running(snapshot) as (child,):
                assert await ask(child, "md5sum -c /run/sum; cat /root/alive") == "/run/x: OK\nalive\n"

    asyncio.run(run())


def test_an_adopted_machine_is_captured_and_knows_its_disk(yard: Yard) -> None:
    async def run() -> None:
        async with yard.running() as (vm,):
            await ask(vm, "echo first > /run/x")
            first = await yard.capture(vm)
            disk = vm.disk
            assert disk != vm.record.disk == first.disk
            # As if the daemon had died after it had prepared the next disk.
            prepared = vms.Top(9, vm.record.dir / "prepared.qcow2")
            vms.disks.make_overlay(prepared.path, disk, "qcow2", vm.record)
            await vm._execute("blockdev-add", **prepared.options(backing=None))
            await vm.detach()
            adopted = await yard.driver.adopt(vm.record)
            assert adopted is not None
            assert adopted.disk == disk
            await ask(adopted, "echo second > /run/x")
            second = await yard.capture(adopted)
            assert second.disk == disk
            async with yard.running(first, second) as (one, two):
                assert await ask(one, "cat /run/x") == "first\n"
                assert await ask(two, "cat /run/x") == "second\n"

    asyncio.run(run())


def test_a_shell_becomes_any_snapshot_and_is_not_adopted_before(yard: Yard) -> None:
    async def run() -> None:
        record = yard.record()
        try:
            shell = await yard.driver.shell(record, yard.snapshot.ram)
            assert not record.disk.exists()
            async with yard.running() as (parent,):
                await ask(parent, "echo later > /run/x")
                snapshot = await yard.capture(parent)
            await shell.load(snapshot)
            await shell.cont()
            assert await ask(shell, "cat /run/x") == "later\n"
            await yard.driver.reclaim(record)

            record2 = yard.record()
            empty = await yard.driver.shell(record2, yard.snapshot.ram)
            await empty.detach()
            assert await yard.driver.adopt(record2) is None
            await yard.driver.reclaim(record2)
        finally:
            await yard.driver.reclaim(record)

    asyncio.run(run())


def test_siblings_share_the_memory_of_their_fork_point(yard: Yard) -> None:
    async def run() -> None:
        async with yard.running() as (parent,):
            await ask(
                parent, "mount -t tmpfs t /mnt; head -c 100000000 /dev/urandom > /mnt/x; md5sum /mnt/x > /run/sum", 120
            )
            snapshot = await yard.capture(parent)
            await yard.driver.reclaim(parent.record)
            async with yard.running(snapshot, snapshot, snapshot) as children:
                for child in children:
                    assert await ask(child, "md5sum -c /run/sum", 120) == "/mnt/x: OK\n"
                shared = sum([(await child.usage()).pss_mib for child in children])
                own = [private_mib(child.pid) for child in children]
            assert shared < 300  # three copies of 100 MB would be more, without anything else
            assert max(own) < 75

    asyncio.run(run())


def private_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def test_a_layer_in_too_many_pieces_is_copied_in_part(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with yard.running() as (parent,):
            await ask(parent, "head -c 8000000 /dev/urandom > /run/x; md5sum /run/x > /run/sum")
            snapshot = await yard.capture(parent)
            monkeypatch.setattr(vms, "MAX_MAPPED_RUNS", 5)
            async with yard.running(snapshot) as (child,):
                assert await ask(child, "md5sum -c /run/sum") == "/run/x: OK\n"
                ram = pages.ram_of(child.pid, 512 << 20)
                assert 0 < len(ram.layered) <= 5
                again = await yard.capture(child)
                async with yard.running(again) as (grandchild,):
                    assert await ask(grandchild, "md5sum -c /run/sum") == "/run/x: OK\n"

    asyncio.run(run())


def test_a_page_that_became_zero_is_zero_in_the_fork(yard: Yard) -> None:
    async def run() -> None:
        async with yard.running() as (parent,):
            await start(parent, "zero.py", ZERO)
            await ask(parent, "until [ -e /run/full ]; do sleep 0.1; done")
            first = await yard.capture(parent)
        async with yard.running(first) as (child,):
            await ask(child, "touch /run/go; until [ -e /run/zero ]; do sleep 0.1; done")
            second = await yard.capture(child)
        async with yard.running(second) as (grandchild,):
            await ask(grandchild, "sleep 1")
            assert await runs(grandchild, "zero.py")

    asyncio.run(run())


def test_a_machine_booted_from_its_own_disk_can_be_captured(yard: Yard) -> None:
    """Stopped and started: its memory begins empty, its disk goes on."""

    async def run() -> None:
        record = yard.record()
        zero = yard.layers / "zero.ram"
        try:
            vm = await yard.driver.restore(record, yard.snapshot)
            await vm.cont()
            await ask(vm, "echo kept > /root/x; sync")
            await yard.driver.reclaim(record)
            vm = await yard.driver.boot(record, yard.source, zero, template=False)
            await vm.cont()
            assert await ask(vm, "cat /root/x; echo memory > /run/y", 120) == "kept\n"
            target = yard.target(vm)
            captured = await vm.capture(target, keep_running=True)
            snapshot = SnapshotFiles(zero, target.device_state, captured.disk, target.layer)
            async with yard.running(snapshot) as (child,):
                assert await ask(child, "cat /root/x /run/y") == "kept\nmemory\n"
            await still_runs(vm)
        finally:
            await yard.driver.reclaim(record)

    asyncio.run(run())


def test_a_guest_may_fill_its_memory_beside_its_layer(yard: Yard) -> None:
    """The limit on a VM's memory must hold its own pages, and those of the shared file that it is the first to use."""

    async def run() -> None:
        async with yard.running() as (parent,):
            await ask(parent, "mount -t tmpfs -o size=90% t /mnt; head -c 100000000 /dev/urandom > /mnt/x", 120)
            snapshot = await yard.capture(parent)
            async with yard.running(snapshot) as (child,):
                await ask(child, "head -c 220000000 /dev/zero | tr '\\0' y > /mnt/y", 120)
                assert await ask(child, "stat -c %s /mnt/x /mnt/y") == "100000000\n220000000\n"

    asyncio.run(run())


def test_what_cannot_be_captured_or_loaded_says_so(yard: Yard) -> None:
    async def run() -> None:
        async with yard.running() as (vm,):
            snapshot = await yard.capture(vm)
            short = yard.layers / "short"
            short.write_bytes(bytes(4096))
            record = yard.record()
            with pytest.raises(VmStartFailed, match="not a layer of a machine with 512 MiB"):
                await yard.driver.restore(
                    record, SnapshotFiles(snapshot.ram, snapshot.device_state, snapshot.disk, short)
                )
            assert not record.disk.exists()
            await vm.kill()
            with pytest.raises(VmCrashed):
                await yard.capture(vm)

    asyncio.run(run())
