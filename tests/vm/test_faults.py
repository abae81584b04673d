"""`kill -9` of the daemon, of a sandbox's hypervisor and of its successor's, at every named step of every verb.

Afterwards each sandbox is in a correct state, no data that was acknowledged is lost, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forkyard import Forkyard, Sandbox
from forkyard.errors import ForkyardError
from forkyard.faults import STEPS

from .conftest import Daemon, belongings, make_daemon, remove_daemon

pytestmark = pytest.mark.timeout(120)

Verb = Callable[[Forkyard, Sandbox], None]
#: A disk with more is folded. No other verb comes to so many.
LAYERS = 4
#: Writes a word to memory, to the disk and to the volume it has, and flushes the journals of the file systems, so that the
#: word can be read from the disks without mounting them.
REMEMBER = """
import fcntl, os, sys
open("/dev/shm/word", "w").write(sys.argv[1])
for place in sys.argv[2:]:
    with open(place + "/word", "w") as file:
        file.write(sys.argv[1]), file.flush(), os.fsync(file.fileno())
    root = os.open(place, os.O_RDONLY)
    fcntl.ioctl(root, 0xC0045877, 0), fcntl.ioctl(root, 0xC0045878, 0)
"""
VOLUME = "words"


def remember(sandbox: Sandbox, word: str) -> None:
    sandbox.exec(["python3", "-S", "-c", REMEMBER, word, "/root", *(["/data"] if sandbox.info.volumes else [])]).check()


# ── the verbs: what is done before, and the verb itself ──────────────────────────────────────────────────────────────


def nothing(_: Forkyard, __: Sandbox) -> None:
    return


def pause(_: Forkyard, sandbox: Sandbox) -> None:
    sandbox.pause()


def pause_to_disk(_: Forkyard, sandbox: Sandbox) -> None:
    sandbox.pause(durable=True)


def resume(_: Forkyard, sandbox: Sandbox) -> None:
    sandbox.resume()


def fork(_: Forkyard, sandbox: Sandbox) -> None:
    sandbox.fork(2)


def snapshot(_: Forkyard, sandbox: Sandbox) -> None:
    sandbox.snapshot("now")


def snapshot_then_change(fy: Forkyard, sandbox: Sandbox) -> None:
    sandbox.snapshot("now")
    remember(sandbox, "later")


def rollback(_: Forkyard, sandbox: Sandbox) -> None:
    sandbox.rollback("now")


def commit(fy: Forkyard, sandbox: Sandbox) -> None:
    fy.volumes.commit(VOLUME, sandbox.id)


def snapshot_often(_: Forkyard, sandbox: Sandbox) -> None:
    for _ in range(LAYERS + 1):
        sandbox.snapshot().delete()


def fall_asleep_large(fy: Forkyard, sandbox: Sandbox) -> None:
    sandbox.exec("head -c 60000000 /dev/zero > /root/large; sync").check()
    sandbox.pause()


def create_another(fy: Forkyard, _: Sandbox) -> None:
    fy.sandboxes.create(name="another", persistence="persistent")


VERBS: dict[str, tuple[Verb, Verb]] = {
    "capture": (nothing, snapshot),
    "fork": (nothing, fork),
    "pause": (nothing, pause),
    "cool": (nothing, pause_to_disk),
    "resume_hot": (pause, resume),
    "resume_cold": (pause_to_disk, resume),
    "snapshot": (nothing, snapshot),
    "rollback": (snapshot_then_change, rollback),
    "commit": (nothing, commit),
    "fold": (nothing, snapshot_often),
    "evict": (fall_asleep_large, create_another),
    "destroy": (fall_asleep_large, create_another),
}
EVICTING = ("evict", "destroy")


def verb_of(step: str) -> str:
    return step.partition(".")[0]


def cases(*, evicting: bool) -> list[tuple[str, str]]:
    return [
        (step, victim)
        for step in STEPS
        if (verb_of(step) in EVICTING) is evicting
        for victim in ("daemon", "machine", *(["children"] if verb_of(step) == "fork" else []))
    ]


# ── the daemon ───────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def daemon_with(**settings: str) -> Iterator[Daemon]:
    daemon = make_daemon()
    daemon.extra_env = {"FORKYARD_FAULT_FILE": str(daemon.root / "fault"), **settings}
    daemon.start()
    yield daemon
    remove_daemon(daemon)


@pytest.fixture(scope="module")
def yard() -> Iterator[Daemon]:
    with daemon_with(FORKYARD_DISK_LAYERS=str(LAYERS)) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def small_yard() -> Iterator[Daemon]:
    """Its disk budget has room for one sandbox with a large file, and not for another one beside it."""
    with daemon_with(FORKYARD_DISK_BUDGET_GIB="0.07") as daemon:
        yield daemon


def wait_until_held(daemon: Daemon) -> bool:
    """Whether the daemon came to the step and stands there; False if the verb was done without it."""
    assert daemon.process is not None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        state = Path(f"/proc/{daemon.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return True
        time.sleep(0.005)
    return False


def machines_of(daemon: Daemon, sandbox: Sandbox, *, others: bool) -> list[int]:
    """Hypervisors of this sandbox, or (`others`) all but its own."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if b"qemu-system" in command and f"{daemon.root}/vms/".encode() in command:
                own = f"{daemon.root}/vms/{sandbox.id}-".encode() in command
                if own is not others:
                    found.append(int(process.name))
    return found


def run_with_fault(daemon: Daemon, step: str, victim: str, sandbox: Sandbox, work: Callable[[], None]) -> None:
    def attempt() -> None:
        with contextlib.suppress(ForkyardError):  # whether it can still be done is not the question
            work()

    assert daemon.process is not None
    (daemon.root / "fault").write_text(step)
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    assert wait_until_held(daemon), f"{step} was never reached"
    if victim == "daemon":
        daemon.kill()
        daemon.start()
    else:
        for pid in machines_of(daemon, sandbox, others=victim == "children"):
            os.kill(pid, signal.SIGKILL)
        daemon.process.send_signal(signal.SIGCONT)
    thread.join(60)
    assert not thread.is_alive(), "the caller was left waiting"


# ── what must be true afterwards ─────────────────────────────────────────────────────────────────────────────────────


def settled(fy: Forkyard, sandbox_id: str) -> Sandbox:
    deadline = time.monotonic() + 30
    same = 0
    while True:
        sandbox = fy.sandboxes.get(sandbox_id)
        same = same + 1 if sandbox.state in ("running", "paused", "stopped", "failed", "deleted") else 0
        if same == 3:  # the end of a machine is noted a moment after it
            return sandbox
        assert time.monotonic() < deadline, f"it stays {sandbox.state}"
        time.sleep(0.05)


def words_on_disk(daemon: Daemon, sandbox_id: str) -> set[str]:
    """What a start would find, in the disks of what is left of its machines."""
    words = set()
    disks = []
    for journal in (daemon.root / "vms").glob(f"{sandbox_id}-*/journal.json"):
        entry = json.loads(journal.read_text())
        disks += [(entry["disk"], "/root/word"), *((one["disk"], "/word") for one in entry["volumes"])]
    for disk, file in disks:
        with tempfile.NamedTemporaryFile() as mount:
            node = f"driver=qcow2,node-name=d,read-only=on,file.driver=file,file.filename={disk},file.locking=off"
            export = f"type=fuse,id=e,node-name=d,mountpoint={mount.name}"
            ready = Path(f"{mount.name}.pid")
            server = subprocess.Popen(
                ["qemu-storage-daemon", "--blockdev", node, "--export", export, "--pidfile", ready]
            )
            try:
                while not ready.exists():
                    assert server.poll() is None
                    time.sleep(0.01)
                done = subprocess.run(
                    ["debugfs", "-R", f"cat {file}", mount.name], capture_output=True, text=True, check=True
                )
                words.add(done.stdout)
            finally:
                server.terminate()
                server.wait(10)
    return words


def word_of(daemon: Daemon, sandbox: Sandbox) -> str:
    """What it knows. Memory, disk and volume say the same, as long as there is a memory."""
    if sandbox.state in ("running", "paused"):
        memory, *disks = sandbox.exec("cat /dev/shm/word; echo; cat /root/word; echo; cat /data/word").stdout.split()
        assert disks == [memory, memory], "memory and disks are of two instants"
        return memory
    assert sandbox.info.cause is not None
    assert sandbox.info.cause_detail, "it ended and does not say why"
    words = words_on_disk(daemon, sandbox.id)
    assert len(words) == 1, words
    return words.pop()


@contextlib.contextmanager
def cleared(daemon: Daemon) -> Iterator[Forkyard]:
    """A client. Afterwards nothing is left for the next test to find, whether or not this one passed."""
    with daemon.client() as fy:
        try:
            yield fy
        finally:
            clear(daemon, fy)


def clear(daemon: Daemon, fy: Forkyard) -> None:
    for sandbox in fy.sandboxes.list(all=True):
        if sandbox.state != "deleted":
            sandbox.delete()
    for kept in fy.snapshots.list():
        kept.delete()
    for volume in fy.volumes.list():
        fy.volumes.delete(volume.name)
    deadline = time.monotonic() + 20  # a volume that was being folded is gone when that is over
    while belongings(daemon) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert belongings(daemon) == set(), "left behind"


@pytest.mark.parametrize(("step", "victim"), cases(evicting=False))
def test_a_kill_at_any_step_loses_nothing_that_was_acknowledged(yard: Daemon, step: str, victim: str) -> None:
    before, verb = VERBS[verb_of(step)]
    with cleared(yard) as fy:
        fy.volumes.create(VOLUME, size_mib=64)
        sandbox = fy.sandboxes.create(idle_timeout_s=None, volumes={"/data": VOLUME})
        remember(sandbox, "kept")
        before(fy, sandbox)
        run_with_fault(yard, step, victim, sandbox, lambda: verb(fy, sandbox))
        after = settled(fy, sandbox.id)
        allowed = {"running", "paused"} if victim != "machine" else {"running", "paused", "failed"}
        assert after.state in allowed, after.info
        assert word_of(yard, after) in ({"kept", "later"} if verb is rollback else {"kept"})
        for other in fy.sandboxes.list(all=True):
            if other.id != sandbox.id and other.state != "deleted":
                other = settled(fy, other.id)
                assert other.state in ("running", "failed"), other.info
                if other.state == "running":
                    assert word_of(yard, other) == "kept"
        for kept in fy.snapshots.list():
            assert word_of(yard, fy.sandboxes.create(snapshot=kept)) == "kept"


@pytest.mark.parametrize(("step", "victim"), cases(evicting=True))
def test_a_kill_at_any_step_of_an_eviction_ends_in_a_whole_one(small_yard: Daemon, step: str, victim: str) -> None:
    before, verb = VERBS[verb_of(step)]
    with cleared(small_yard) as fy:
        sandbox = fy.sandboxes.create(idle_timeout_s=None, persistence="sticky")
        before(fy, sandbox)
        run_with_fault(small_yard, step, victim, sandbox, lambda: verb(fy, sandbox))
        after = settled(fy, sandbox.id)
        assert (after.state, after.info.cause) == ("deleted", "evicted")
        for other in fy.sandboxes.list():
            assert other.exec("echo it works").stdout == "it works\n"
