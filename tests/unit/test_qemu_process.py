"""Starting, confining and watching processes, with ordinary programs in QEMU's place."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from forkyard.vmm.base import ExitKind
from forkyard.vmm.qemu.cmdline import name
from forkyard.vmm.qemu.native import Native, ensure_native
from forkyard.vmm.qemu.probe import one_file_initramfs
from forkyard.vmm.qemu.process import Confinement, Process, Status, is_vm, jail_argv, kill_now, spawn
from forkyard.vmm.qemu.vm import guest_end

UID = 657999
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="the launcher starts as root")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    return ensure_native(tmp_path_factory.mktemp("cache"))


def jail(native: Native, *argv: str, **confinement: object) -> subprocess.CompletedProcess[str]:
    how = Confinement(uid=UID, directory=Path("/"), **confinement)  # type: ignore[arg-type]
    return subprocess.run(jail_argv(native.jail, how, argv), capture_output=True, text=True, timeout=20)


def test_the_binaries_are_built_once_and_reused(tmp_path: Path) -> None:
    first = ensure_native(tmp_path)
    built = first.jail.stat().st_mtime_ns
    assert ensure_native(tmp_path) == first
    assert first.jail.stat().st_mtime_ns == built
    assert [path.name for path in (tmp_path / "native").iterdir()] == [first.jail.parent.name]


@as_root
def test_the_launcher_drops_the_user_the_groups_and_the_environment(native: Native) -> None:
    done = jail(native, "/bin/sh", "-c", "id; env; cat /proc/self/status", env={"FORKYARD_RAM_PATH": "/x"})
    assert f"uid={UID} gid={UID} groups={UID}" in done.stdout
    assert "FORKYARD_RAM_PATH=/x" in done.stdout
    assert "HOME=" not in done.stdout
    assert "CapEff:\t0000000000000000" in done.stdout
    assert "NoNewPrivs:\t1" in done.stdout


@as_root
def test_the_launcher_leaves_no_network_but_a_dead_loopback(native: Native) -> None:
    assert jail(native, "/bin/cat", "/proc/net/dev").stdout.count(":") == 1


def test_a_vm_gets_a_cable_but_not_the_right_to_lay_one(native: Native) -> None:
    look = "cat /proc/net/dev; readlink /proc/$$/fd/1000; ip link add more type dummy 2>&1"
    said = jail(native, "/bin/bash", "-c", look, tap=("tap0", 1000)).stdout
    assert "tap0:" in said
    assert "/dev/net/tun" in said
    assert "Operation not permitted" in said


@as_root
def test_the_launcher_keeps_only_the_files_it_was_told_to(native: Native) -> None:
    read_end, write_end = os.pipe()
    try:
        how = Confinement(uid=UID, directory=Path("/"), keep_fds=[write_end])
        argv = jail_argv(native.jail, how, ["/bin/bash", "-c", f"cd /proc/$$/fd; echo [0-9]* >&{write_end}"])
        subprocess.run(argv, pass_fds=[read_end, write_end], check=True, timeout=20)
        kept = {int(fd) for fd in os.read(read_end, 1000).split()}
    finally:
        os.close(read_end)
        os.close(write_end)
    assert write_end in kept
    assert read_end not in kept


@as_root
def test_the_launcher_limits_what_can_be_written(native: Native, tmp_path: Path) -> None:
    target = tmp_path / "f"
    target.touch()
    target.chmod(0o666)
    for parent in target.parents:
        if parent != Path("/") and parent.stat().st_uid == os.geteuid():
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    jail(native, "/bin/dd", "if=/dev/zero", f"of={target}", "bs=1024", "count=100", file_size_bytes=10_240)
    assert target.stat().st_size == 10_240


@as_root
@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--uid", "0", "--gid", "5", "--", "/bin/true"], "refusing to run a VM as root"),
        (["--uid", "5", "--", "/bin/true"], "refusing to run a VM as root"),
        (["--uid", "-1", "--gid", "5", "--", "/bin/true"], "--uid is not a number"),
        (["--uid", "5", "--gid", "5"], "no program given"),
        (["--uid", "5", "--gid", "5", "--"], "no program given"),
        (["--uid", "5", "--gid", "5", "--frob", "1", "--", "/bin/true"], "unknown or repeated option --frob"),
        (["--uid", "5", "--gid", "5", "--rlimit", "frob=1", "--", "/bin/true"], "unknown limit: frob=1"),
        (["--uid", "5", "--gid", "5", "--cgroup", "/nowhere/tasks", "--", "/bin/true"], "join cgroup /nowhere/tasks"),
        (["--uid", "5", "--gid", "5", "--netns", "/nowhere", "--", "/bin/true"], "enter network namespace /nowhere"),
        (["--uid", "5", "--gid", "5", "--netns", "new", "--tap", "tap0", "--", "/bin/true"], "not NAME=FD: tap0"),
        (["--uid", "5", "--gid", "5", "--chdir", "/nowhere", "--", "/bin/true"], "cannot enter /nowhere"),
        (["--uid", "5", "--gid", "5", "--", "/nowhere/qemu"], "cannot run /nowhere/qemu"),
    ],
)
def test_a_launcher_that_cannot_confine_does_not_start(native: Native, argv: list[str], complaint: str) -> None:
    done = subprocess.run([native.jail, *argv], capture_output=True, text=True, timeout=20)
    assert done.returncode == 111
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


@as_root
def test_the_shim_opens_the_ram_file_read_only_and_nothing_else(native: Native, tmp_path: Path) -> None:
    program = tmp_path / "opens"
    source = tmp_path / "opens.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <fcntl.h>\n#include <stdio.h>\n"
        "int main(int n, char **v) { for (int i = 1; i < n; i++)"
        'printf("%d\\n", fcntl(open64(v[i], O_RDWR), F_GETFL) & O_ACCMODE); return 0; }'
    )
    subprocess.run(["cc", "-o", program, source], check=True, timeout=60)
    ram, other = tmp_path / "ram", tmp_path / "ram2"
    ram.touch()
    other.touch()
    env = {"LD_PRELOAD": str(native.ramshim), "FORKYARD_RAM_PATH": str(ram)}
    done = subprocess.run([program, ram, other], env=env, capture_output=True, text=True, timeout=20)
    assert done.stdout.split() == [str(os.O_RDONLY), str(os.O_RDWR)]


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 3", Status(code=3)), ("exit 0", Status(code=0)), ("kill -9 $$", Status(signal=9))],
)
def test_the_end_of_a_child_is_seen_and_reaped(tmp_path: Path, script: str, status: Status) -> None:
    async def run() -> tuple[int, list[Status]]:
        pid = spawn(["/bin/sh", "-c", script], [], tmp_path / "log")
        process = Process.open(pid)
        return pid, list(await asyncio.gather(process.wait(), process.wait()))

    pid, seen = asyncio.run(run())
    assert seen == [status, status]
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


def test_the_end_of_another_processs_child_is_seen(tmp_path: Path) -> None:
    parent = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
    pid = int(subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, check=True).stdout)

    async def run() -> Status:
        process = Process.open(pid)
        process.kill()
        process.kill()
        return await asyncio.wait_for(process.wait(), 10)

    assert asyncio.run(run()) == Status()


def test_errors_go_to_the_log_and_nothing_else_is_connected(tmp_path: Path) -> None:
    async def run() -> None:
        script = 'in=$(readlink /proc/$$/fd/0); out=$(readlink /proc/$$/fd/1); echo "$in $out" >&2'
        pid = spawn(["/bin/sh", "-c", script], [], tmp_path / "log")
        await Process.open(pid).wait()

    asyncio.run(run())
    assert (tmp_path / "log").read_text().split() == ["/dev/null", "/dev/null"]


def test_killing_waits_for_the_end_and_tolerates_none(tmp_path: Path) -> None:
    pid = spawn(["/bin/sleep", "60"], [], tmp_path / "log")
    kill_now(pid, timeout_s=10)
    assert not Path(f"/proc/{pid}").exists()
    kill_now(pid, timeout_s=10)


def test_a_vm_is_known_by_its_name() -> None:
    argv = ["/bin/sh", "-c", "echo up; read x", "-", *name(Path("/v/a,b"))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert is_vm(other.pid, name(Path("/v/a,b")))
        assert not is_vm(other.pid, name(Path("/v/a")))
        assert not is_vm(other.pid, name(Path("/v/a,b/c")))
        other.kill()
    assert not is_vm(other.pid, name(Path("/v/a,b")))


@pytest.mark.parametrize(
    ("state", "reason", "console", "kind", "words"),
    [
        ("running", "", "", None, ""),
        ("paused", "", "", None, ""),
        ("prelaunch", "", "", None, ""),
        ("shutdown", "guest-shutdown", "", ExitKind.SHUTDOWN, "powered off"),
        ("shutdown", "", "", ExitKind.SHUTDOWN, "powered off"),
        ("shutdown", "guest-reset", "", ExitKind.SHUTDOWN, "rebooted"),
        ("shutdown", "guest-reset", "[1] Kernel panic - not syncing: VFS: no root", ExitKind.PANIC, "VFS: no root"),
        ("guest-panicked", "", "[1] Kernel panic - not syncing: Oops\n[1] Offset", ExitKind.PANIC, "panicked: Oops"),
        ("guest-panicked", "", "", ExitKind.PANIC, "panicked"),
        (
            *("guest-panicked", "", "[9] Kernel panic - not syncing: System is deadlocked on memory"),
            *(ExitKind.OUT_OF_MEMORY, "ran out of memory"),
        ),
        (
            *(
                "guest-panicked",
                "",
                "[9] Kernel panic - not syncing: Out of memory: compulsory panic_on_oom is enabled",
            ),
            *(ExitKind.OUT_OF_MEMORY, "ran out of memory"),
        ),
        ("internal-error", "", "", ExitKind.CRASHED, "internal-error"),
    ],
)
def test_the_run_state_tells_how_a_guest_ended(
    state: str, reason: str, console: str, kind: ExitKind | None, words: str
) -> None:
    end = guest_end(state, reason, console)
    assert (end.kind if end else None) is kind
    assert words in (end.detail if end else "")


def test_statuses_are_said_in_words() -> None:
    assert str(Status(signal=signal.SIGSEGV)) == "was ended by SIGSEGV"
    assert str(Status(code=1)) == "exited with status 1"
    assert str(Status()) == "is gone"


def test_the_probe_initramfs_is_an_archive_the_kernel_can_read() -> None:
    archive = one_file_initramfs(b"\x7fELF!")
    assert archive.startswith(b"070701")
    assert len(archive) % 4 == 0
    assert archive.index(b"\x7fELF!") % 4 == 0
    assert b"TRAILER!!!\0" in archive
