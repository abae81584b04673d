"""Pause and resume, by hand and by idleness: nothing is lost."""

import subprocess
import threading
import time

import pytest

from forkyard import Forkyard, Sandbox
from forkyard.errors import SnapshotCorrupt

from .conftest import Daemon, belongings


def vms_of(daemon: Daemon) -> set[str]:
    return {item for item in belongings(daemon) if item.startswith("process")}


def until_gone(daemon: Daemon) -> None:
    """Asleep on disk a machine has no process; nobody waits for its end."""
    deadline = time.monotonic() + 30
    while vms_of(daemon):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("durable", [False, True], ids=["hot", "cold"])
def test_a_paused_machine_goes_on_where_it_was(daemon: Daemon, sbx: Sandbox, durable: bool) -> None:
    process = sbx.spawn("i=0; while :; do i=$((i+1)); echo $i > /dev/shm/i; sleep 0.05; done")
    sbx.files.write("/root/file", "kept")
    time.sleep(0.5)
    assert sbx.pause(durable=durable).state == "paused"
    if durable:
        until_gone(daemon)
    else:
        assert vms_of(daemon)
    time.sleep(1)
    assert sbx.resume().state == "running"
    first = int(sbx.exec("cat /dev/shm/i").stdout)
    assert sbx.process(process.id).info().running
    time.sleep(0.5)
    assert int(sbx.exec("cat /dev/shm/i").stdout) > first
    assert sbx.files.read("/root/file") == "kept"
    assert abs(float(sbx.exec("date +%s.%N").stdout) - time.time()) < 5, "the clock was set right"


def test_ten_rounds_with_changes_between_lose_nothing(sbx: Sandbox) -> None:
    for i in range(10):
        sbx.exec(f"echo {i} >> /root/disk; echo {i} >> /dev/shm/memory; sync")
        sbx.pause(durable=i % 2 == 0)
        sbx.resume()
        expected = "".join(f"{k}\n" for k in range(i + 1))
        assert sbx.exec("cat /root/disk").stdout == expected
        assert sbx.exec("cat /dev/shm/memory").stdout == expected


def test_any_call_wakes_it_and_many_callers_wake_it_once(fy: Forkyard, sbx: Sandbox) -> None:
    sbx.pause(durable=True)
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(sbx.exec("echo awake").stdout)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == ["awake\n"] * 8
    woken = [e for e in fy.events.list(sandbox_id=sbx.id) if e.kind == "sandbox.running"]
    assert len(woken) == 2, "created, and woken once"


def test_an_idle_machine_falls_asleep_and_a_busy_one_does_not(fy: Forkyard) -> None:
    with fy.sandboxes.create(idle_timeout_s=2) as idle, fy.sandboxes.create(idle_timeout_s=2) as busy:
        busy.spawn("while :; do echo working; sleep 0.3; done")
        idle.exec("echo kept > /dev/shm/x")
        deadline = time.monotonic() + 30
        while fy.sandboxes.get(idle.id).info.state != "paused":
            assert time.monotonic() < deadline, "still awake"
            time.sleep(0.2)
        assert fy.sandboxes.get(idle.id).info.cause == "idle"
        assert fy.sandboxes.get(busy.id).info.state == "running", "a process that prints is not idle"
        assert idle.exec("cat /dev/shm/x").stdout == "kept\n"


def test_a_damaged_memory_is_refused_and_the_disk_boots(daemon: Daemon, sbx: Sandbox) -> None:
    sbx.exec("echo on disk > /root/file; sync")
    sbx.pause(durable=True)
    (pages,) = (daemon.root / "snapshots").glob("*/pages")
    data = bytearray(pages.read_bytes())
    data[len(data) // 2] ^= 0xFF
    pages.chmod(0o600)
    pages.write_bytes(data)
    with pytest.raises(SnapshotCorrupt, match="memory=False"):
        sbx.resume()
    assert sbx.refresh().state == "paused"
    sbx.resume(memory=False)
    assert sbx.exec("cat /root/file").stdout == "on disk\n"


def test_stop_and_start_keep_the_disk_and_a_new_shape(sbx: Sandbox) -> None:
    sbx.exec("echo here > /root/file; echo gone > /dev/shm/memory")
    assert sbx.stop().state == "stopped"
    sbx.resize(vcpus=2, memory_mib=768, disk_gib=10)
    assert sbx.start().state == "running"
    assert sbx.exec("cat /root/file; test -e /dev/shm/memory || echo no memory").stdout == "here\nno memory\n"
    assert sbx.exec("nproc").stdout == "2\n"
    assert int(sbx.exec("df --output=size -BG / | tail -1 | tr -dc 0-9").stdout) >= 9


def test_sleep_survives_a_killed_daemon(own_daemon: Daemon) -> None:
    with own_daemon.client() as fy:
        hot, cold = fy.sandboxes.create(), fy.sandboxes.create()
        for sandbox in (hot, cold):
            sandbox.exec("echo kept > /dev/shm/x")
        hot.pause()
        cold.pause(durable=True)
        own_daemon.kill()
        own_daemon.start()
        for sandbox in (hot, cold):
            assert sandbox.refresh().state == "paused"
            assert sandbox.exec("cat /dev/shm/x").stdout == "kept\n"
            sandbox.delete()


def test_a_full_disk_while_pausing_leaves_it_running_or_paused_whole(own_daemon: Daemon) -> None:
    """The directory for snapshots is a small file system: the memory does not fit."""
    small = own_daemon.root / "snapshots"
    small.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], check=True)
    try:
        with own_daemon.client() as fy, fy.sandboxes.create() as sandbox:
            sandbox.exec("echo kept > /dev/shm/x")
            with pytest.raises(Exception, match="space"):
                sandbox.pause(durable=True)
            assert sandbox.exec("cat /dev/shm/x").stdout == "kept\n"
    finally:
        subprocess.run(["umount", small], check=True)


def test_ephemeral_and_short_lived_sandboxes_end_with_their_cause(fy: Forkyard) -> None:
    ephemeral = fy.sandboxes.create(persistence="ephemeral")
    ephemeral.pause()
    short = fy.sandboxes.create(ttl_s=1)
    deadline = time.monotonic() + 30
    while fy.sandboxes.get(short.id).info.state != "deleted" or fy.sandboxes.get(ephemeral.id).info.state != "deleted":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert fy.sandboxes.get(ephemeral.id).info.cause == "ephemeral"
    assert fy.sandboxes.get(short.id).info.cause == "ttl"
