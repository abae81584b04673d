"""The QEMU driver alone, against real machines: one small guest (see `yard`) is saved once, every test restores it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forkyard.errors import VmCrashed, VmStartFailed
from forkyard.vmm.base import ExitKind, SnapshotFiles, VmRecord
from forkyard.vmm.qemu.vm import QemuVm

from .yard import Yard, ask, saved_yard, tell, with_vm

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def saved() -> Iterator[Yard]:
    with saved_yard() as yard:
        yield yard


@pytest.fixture
def yard(saved: Yard) -> Iterator[Yard]:
    yield saved
    assert not saved.belongings()


def test_a_restored_guest_goes_on_from_where_it_was_saved(yard: Yard) -> None:
    async def body(vm: QemuVm) -> None:
        assert await ask(vm, "echo $((6 * 7)); pgrep -f lines.py") == "42\n1\n"
        usage = await vm.usage()
        assert usage.pss_mib > 5
        assert usage.cpu_s > 0
        counters = vm.counters()
        assert counters is not None
        assert counters.cpu_s >= usage.cpu_s
        assert counters.resident_bytes > usage.pss_mib * 2**20

    with_vm(yard, body)


def test_two_restored_guests_do_not_see_each_others_memory_or_disk(yard: Yard) -> None:
    async def run() -> None:
        records = [yard.record(), yard.record()]
        try:
            one, two = [await yard.driver.restore(record, yard.snapshot) for record in records]
            await one.cont()
            await two.cont()
            await ask(one, "echo one > /run/ram; echo one > /root/disk; sync")
            assert await ask(two, "cat /run/ram /root/disk 2>&1 | grep -c 'No such file'") == "2\n"
            assert await ask(one, "cat /run/ram /root/disk") == "one\none\n"
        finally:
            for record in records:
                await yard.driver.reclaim(record)

    asyncio.run(run())


def test_a_restored_vm_is_stopped_until_told_to_go_on(yard: Yard) -> None:
    async def run() -> None:
        record = yard.record()
        try:
            vm = await yard.driver.restore(record, yard.snapshot)
            before = (await vm.usage()).cpu_s
            with pytest.raises(TimeoutError):
                await ask(vm, "echo early", timeout_s=1)
            assert (await vm.usage()).cpu_s - before < 0.1
            await vm.cont()
            assert await ask(vm, "echo late") == "late\n"
            await vm.stop()
            with pytest.raises(TimeoutError):
                await ask(vm, "echo stopped", timeout_s=1)
        finally:
            await yard.driver.reclaim(record)

    asyncio.run(run())


def test_qemu_runs_as_its_own_user_with_nothing_to_gain(yard: Yard) -> None:
    def look(vm: QemuVm) -> None:
        assert Path(f"/proc/{vm.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
        assert os.getsid(vm.pid) == vm.pid
        status = dict(re.findall(r"^(\w+):\t(.*)$", Path(f"/proc/{vm.pid}/status").read_text(), re.MULTILINE))
        assert status["Uid"].split() == [str(vm.record.uid)] * 4
        assert status["Gid"].split() == [str(vm.record.uid)] * 4
        assert status["Groups"].strip() == ""
        assert int(status["CapPrm"], 16) == int(status["CapEff"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"

    with_vm(yard, lambda vm: asyncio.to_thread(look, vm))


def test_qemu_inherits_nothing_it_was_not_given(yard: Yard) -> None:
    secret = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        opened = with_vm(yard, lambda vm: asyncio.to_thread(open_files, vm.pid))
        assert Path("/dev/urandom") in opened.values()
        assert Path("/etc/hostname") not in opened.values()
    finally:
        os.close(secret)


def open_files(pid: int) -> dict[str, Path]:
    return {fd.name: fd.readlink() for fd in Path(f"/proc/{pid}/fd").iterdir()}


def test_the_templates_memory_cannot_be_written_by_a_vm(yard: Yard) -> None:
    """Not by the file's mode: its user cannot open it for writing. Not through what QEMU holds: read-only, private."""
    ram = yard.snapshot.ram

    def look(vm: QemuVm) -> None:
        opened = [fd for fd, target in open_files(vm.pid).items() if target == ram]
        assert opened
        for fd in opened:
            flags = Path(f"/proc/{vm.pid}/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
            assert int(flags, 8) & os.O_ACCMODE == os.O_RDONLY
        mappings = [line for line in Path(f"/proc/{vm.pid}/maps").read_text().splitlines() if line.endswith(str(ram))]
        assert mappings
        assert all(line.split()[1] == "rw-p" for line in mappings)
        as_its_user = ["setpriv", f"--reuid={vm.record.uid}", f"--regid={vm.record.uid}", "--clear-groups"]
        write = ["dd", "if=/dev/zero", f"of={ram}", "count=1", "conv=notrunc"]
        tried = subprocess.run([*as_its_user, *write], capture_output=True, text=True)
        assert "Permission denied" in tried.stderr

    with_vm(yard, lambda vm: asyncio.to_thread(look, vm))


def test_limits_are_in_force(yard: Yard) -> None:
    def look(vm: QemuVm) -> dict[str, str]:
        return {
            name: (directory / name).read_text().strip()
            for directory in Path("/sys/fs/cgroup").rglob(f"forkyard-{yard.scope}/{vm.record.vm_id}")
            for name in ("pids.max", "memory.limit_in_bytes", "memory.max", "cgroup.procs")
            if (directory / name).exists()
        } | {"pid": str(vm.pid)}

    limits = with_vm(yard, lambda vm: asyncio.to_thread(look, vm))
    assert limits["cgroup.procs"] == limits["pid"]
    assert int(limits["pids.max"]) < 200
    memory = int(limits.get("memory.limit_in_bytes") or limits["memory.max"])
    assert 1024 << 20 < memory < 1536 << 20


@pytest.mark.parametrize(
    ("command", "kind", "detail"),
    [
        ("echo o > /proc/sysrq-trigger", ExitKind.SHUTDOWN, "powered off"),
        ("echo b > /proc/sysrq-trigger", ExitKind.SHUTDOWN, "rebooted"),
        ("echo c > /proc/sysrq-trigger", ExitKind.PANIC, "panicked: sysrq triggered crash"),
        ("rmmod pvpanic_pci; echo c > /proc/sysrq-trigger", ExitKind.PANIC, "panicked: sysrq triggered crash"),
    ],
)
def test_why_a_guest_ended_is_known(yard: Yard, command: str, kind: ExitKind, detail: str) -> None:
    async def body(vm: QemuVm) -> None:
        await tell(vm, command)
        end = await vm.wait()
        assert end.kind is kind
        assert detail in end.detail
        with pytest.raises(VmCrashed):
            await vm.cont()

    with_vm(yard, body)


def test_a_killed_vm_says_who_killed_it(yard: Yard) -> None:
    async def by_us(vm: QemuVm) -> None:
        await vm.kill()
        await vm.kill()
        assert (await vm.wait()).kind is ExitKind.KILLED

    async def by_another(vm: QemuVm) -> None:
        os.kill(vm.pid, signal.SIGSEGV)
        first, second = await asyncio.gather(vm.wait(), vm.wait())
        assert first == second
        assert first.kind is ExitKind.CRASHED
        assert "SIGSEGV" in first.detail

    with_vm(yard, by_us)
    with_vm(yard, by_another)


def test_the_console_keeps_its_end_and_its_size(yard: Yard) -> None:
    async def body(vm: QemuVm) -> None:
        await ask(vm, "head -c 1000000 /dev/zero | tr '\\0' x > /dev/ttyS0; echo; echo last words > /dev/ttyS0", 120)
        assert (await yard.driver.console(vm.record, 1000)).endswith("last words")
        assert vm.console_log.stat().st_size <= 256 * 1024
        await tell(vm, "echo goodbye > /dev/ttyS0; echo o > /proc/sysrq-trigger")
        console = await yard.driver.console(vm.record, 10_000)
        assert "last words" in console
        assert "goodbye" in console

    with_vm(yard, body)


ABANDON = """
import asyncio, json, sys
from pathlib import Path
from forkyard.models import Shape
from forkyard.vmm.base import SnapshotFiles, VmRecord
from forkyard.vmm.qemu import QemuDriver
root, scope, vm_id, directory, uid, *files = sys.argv[1:]
async def main():
    driver = await QemuDriver.open(cache_dir=Path(root), scope=scope, accel="tcg")
    record = VmRecord(vm_id, Path(directory), int(uid), Shape(), Path(directory, "disk.qcow2"))
    vm = await driver.restore(record, SnapshotFiles(*map(Path, files)))
    await vm.cont()
    print(vm.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def alive(pid: int) -> bool:
    """A zombie is dead: its parent, init, takes its time to bury it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def abandoned(yard: Yard) -> tuple[VmRecord, int]:
    """A VM whose daemon was killed."""
    record = yard.record()
    files = (yard.snapshot.ram, yard.snapshot.device_state, yard.snapshot.disk)
    words = [yard.root, yard.scope, record.vm_id, record.dir, record.uid, *files]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ABANDON), *map(str, words)], stdout=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        daemon.kill()
    return record, pid


def test_a_vm_outlives_its_daemon_and_is_adopted(yard: Yard) -> None:
    record, pid = abandoned(yard)

    async def run() -> None:
        try:
            vm = await yard.driver.adopt(record)
            assert vm is not None
            assert vm.pid == pid
            assert await ask(vm, "echo still here") == "still here\n"
            await vm.detach()
            vm = await yard.driver.adopt(record)
            assert vm is not None
            await tell(vm, "echo c > /proc/sysrq-trigger")
            assert (await vm.wait()).kind is ExitKind.PANIC
            assert await yard.driver.adopt(record) is None
        finally:
            await yard.driver.reclaim(record)

    asyncio.run(run())


def test_a_guest_that_ended_while_no_daemon_looked_still_tells_why(yard: Yard) -> None:
    record, _ = abandoned(yard)

    async def run() -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(str(record.dir / "agent.sock"))
            writer.write(b"echo the end > /dev/ttyS0; echo o > /proc/sysrq-trigger\n")
            await writer.drain()
            # A powered-off guest answers no more; that it is held, not gone, is what is tested.
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(), 8)
            writer.close()
            vm = await yard.driver.adopt(record)
            assert vm is not None
            assert (await asyncio.wait_for(vm.wait(), 10)).kind is ExitKind.SHUTDOWN
            assert "the end" in await yard.driver.console(record, 1000)
        finally:
            await yard.driver.reclaim(record)

    asyncio.run(run())


def test_reclaim_ends_what_the_journal_never_learned_of(yard: Yard) -> None:
    record, pid = abandoned(yard)
    (record.dir / "qemu.pid").unlink()

    async def run() -> None:
        await yard.driver.reclaim(record)
        await yard.driver.reclaim(record)

    asyncio.run(run())
    assert not alive(pid)


def test_another_process_with_a_recycled_pid_is_left_alone(yard: Yard) -> None:
    record = yard.record()
    record.dir.mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as bystander:
        (record.dir / "qemu.pid").write_text(str(bystander.pid))

        async def run() -> None:
            assert await yard.driver.adopt(record) is None
            await yard.driver.reclaim(record)

        asyncio.run(run())
        assert bystander.poll() is None
        bystander.kill()


def test_a_start_that_fails_says_what_qemu_said_and_leaves_nothing(yard: Yard) -> None:
    async def broken(**changes: Any) -> str:
        record = yard.record()
        files = {"ram": yard.snapshot.ram, "device_state": yard.snapshot.device_state, "disk": yard.snapshot.disk}
        with pytest.raises(VmStartFailed) as failure:
            await yard.driver.restore(record, SnapshotFiles(**{**files, **changes}))
        assert not yard.belongings()
        return failure.value.message

    async def run() -> None:
        missing = await broken(ram=Path("/dev/shm/no-such-file"))
        assert "/dev/shm/no-such-file" in missing
        garbage = yard.root / "garbage"
        garbage.write_bytes(b"not a device state" * 100)
        assert "QEMU said" in await broken(device_state=garbage)
        truncated = yard.root / "truncated"
        truncated.write_bytes(yard.snapshot.device_state.read_bytes()[:50_000])
        assert "QEMU said" in await broken(device_state=truncated)
        assert "could not make disk" in await broken(disk=yard.root / "no-disk")

    asyncio.run(run())


@pytest.mark.parametrize("after_ms", [0, 2, 5, 20, 40, 60])
def test_a_restore_cancelled_at_any_moment_leaves_nothing(yard: Yard, after_ms: int) -> None:
    async def run() -> None:
        task = asyncio.create_task(yard.driver.restore(yard.record(), yard.snapshot))
        await asyncio.wait({task}, timeout=after_ms / 1000)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            vm = await task  # it was faster
            await yard.driver.reclaim(vm.record)

    asyncio.run(run())
    assert not yard.belongings()


def test_an_idle_qemu_starts_and_leaves_nothing(yard: Yard) -> None:
    start = asyncio.run(yard.driver.start_idle_ms(yard.root))
    assert 5 < start.greeting_ms < start.answer_ms < 10_000


def test_doctor_lines_are_plain(yard: Yard) -> None:
    checks = {check.name: check for check in asyncio.run(yard.driver.checks())}
    assert checks["qemu"].status == "ok"
    assert "TCG" in checks["accelerator"].summary
    assert "cgroups" in checks
    assert checks["live-capture"].summary
