"""Chains of disks stay short however often a machine is captured, and say the same as before."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from forkyard import Forkyard, Sandbox
from forkyard.errors import ForkyardError
from forkyard.host.chains import LONG, LONGEST
from forkyard.storage.disks import Disks

from .conftest import Daemon, belongings
from .test_ends import vm_pid
from .test_faults import machines_of

pytestmark = pytest.mark.timeout(300)


def layers_of(daemon: Daemon, sandbox: Sandbox) -> int:
    """Of the disk that its journal names."""
    journals = sorted((daemon.root / "vms").glob(f"{sandbox.id}-*/journal.json"))
    disks = Disks(daemon.root / "disks")
    return max(len(disks.layers(Path(json.loads(journal.read_text())["disk"]))) for journal in journals)


def wait_until_short(daemon: Daemon, sandbox: Sandbox) -> None:
    deadline = time.monotonic() + 60
    while layers_of(daemon, sandbox) > LONG:
        assert time.monotonic() < deadline, layers_of(daemon, sandbox)
        time.sleep(0.2)


def read_ms(sandbox: Sandbox) -> float:
    command = "echo 3 > /proc/sys/vm/drop_caches; dd if=/dev/vda of=/dev/null bs=4k count=4000 skip=50000 2>&1"
    started = time.perf_counter()
    sandbox.exec(command).check()
    return (time.perf_counter() - started) * 1000


def test_forty_captures_leave_a_short_chain_and_all_data(daemon: Daemon, fy: Forkyard, sbx: Sandbox) -> None:
    read_ms(sbx)
    before = min(read_ms(sbx) for _ in range(3))
    kept = None
    longest = 0
    for i in range(40):
        sbx.exec(f"echo {i} > /root/{i}; echo {i} >> /root/all; sync").check()
        snapshot = sbx.snapshot()
        longest = max(longest, layers_of(daemon, sbx))
        if i == 20:
            kept = snapshot
        else:
            snapshot.delete()
    assert longest <= LONGEST + 1
    wait_until_short(daemon, sbx)
    everything = "".join(f"{i}\n" for i in range(40))
    assert sbx.exec("echo 3 > /proc/sys/vm/drop_caches; cat /root/all").stdout == everything
    assert sbx.exec("cat $(seq -f /root/%g 0 39)").stdout == everything
    sbx.pause(durable=True)
    assert sbx.exec("cat /root/all").stdout == everything, "what is on disk is what is in memory"
    assert min(read_ms(sbx) for _ in range(3)) < 2 * before + 20
    assert kept is not None
    with fy.sandboxes.create(snapshot=kept) as old:
        old.exec("echo 3 > /proc/sys/vm/drop_caches").check()
        assert old.exec("cat /root/all").stdout == "".join(f"{i}\n" for i in range(21)), "nobody else's disk changed"
    kept.delete()


def test_forks_of_forks_forty_deep(daemon: Daemon, fy: Forkyard) -> None:
    sandbox = fy.sandboxes.create()
    for i in range(40):
        sandbox.exec(f"echo {i} >> /root/all; sync").check()
        (child,) = sandbox.fork()
        sandbox.delete()
        sandbox = child
    assert layers_of(daemon, sandbox) <= LONGEST + 1
    wait_until_short(daemon, sandbox)
    assert sandbox.exec("echo 3 > /proc/sys/vm/drop_caches; cat /root/all").stdout == "".join(
        f"{i}\n" for i in range(40)
    )
    files = [item for item in belongings(daemon) if item.startswith("disks")]
    assert len(files) <= LONG + 1, "layers that nobody needs are gone"


@pytest.mark.parametrize("victim", ["daemon", "machine"])
def test_a_kill_while_a_chain_is_folded_loses_nothing(own_daemon: Daemon, victim: str) -> None:
    with own_daemon.client() as fy:
        sandbox = fy.sandboxes.create()
        for i in range(LONG + 1):
            if i == LONG - 2:
                sandbox.exec("head -c 100M /dev/urandom > /root/large; sha256sum /root/large > /root/sum").check()
            sandbox.exec(f"echo {i} >> /root/all; sync").check()
            sandbox.snapshot().delete()
        deadline = time.monotonic() + 30
        top = max((own_daemon.root / "disks").iterdir(), key=lambda path: path.stat().st_mtime)
        while top.stat().st_blocks * 512 < 20_000_000:  # it is being copied
            assert time.monotonic() < deadline
            time.sleep(0.002)
        if victim == "daemon":
            own_daemon.kill()
            own_daemon.start()
        else:
            os.kill(vm_pid(own_daemon, sandbox), signal.SIGKILL)
            with contextlib.suppress(ForkyardError):
                while sandbox.refresh().state == "running":
                    time.sleep(0.05)
            sandbox.start()
        assert sandbox.exec("echo 3 > /proc/sys/vm/drop_caches; sha256sum -c /root/sum", timeout_s=60).exit_code == 0
        assert sandbox.exec("cat /root/all").stdout == "".join(f"{i}\n" for i in range(LONG + 1))
        sandbox.delete()
        assert machines_of(own_daemon, sandbox, others=False) == []
