"""Chains of disks stay short however often a machine is captured, and say the same as before."""

import json
import time
from pathlib import Path

import pytest

from forkyard import Forkyard, Sandbox
from forkyard.host.chains import LONGEST
from forkyard.settings import Settings
from forkyard.storage.disks import Disks

from .conftest import Daemon, belongings

pytestmark = pytest.mark.timeout(300)

LONG = Settings().disk_layers


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
    assert longest <= LONGEST * LONG + 1
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
    assert layers_of(daemon, sandbox) <= LONGEST * LONG + 1
    wait_until_short(daemon, sandbox)
    assert sandbox.exec("echo 3 > /proc/sys/vm/drop_caches; cat /root/all").stdout == "".join(
        f"{i}\n" for i in range(40)
    )
    files = [item for item in belongings(daemon) if item.startswith("disks")]
    assert len(files) <= LONG + 1, "layers that nobody needs are gone"
