"""Snapshots, rollback and checkpoints."""

import time

import pytest

from forkyard import Forkyard, Sandbox
from forkyard.errors import SnapshotNotFound


def test_a_snapshot_starts_others_and_outlives_its_sandbox(fy: Forkyard) -> None:
    origin = fy.sandboxes.create()
    origin.exec("echo ready > /dev/shm/state; echo ready > /root/state")
    snapshot = origin.snapshot("ready")
    origin.exec("echo later > /dev/shm/state; echo later > /root/state")
    origin.delete()
    one, two = (fy.sandboxes.create(snapshot=s) for s in (snapshot, "ready"))
    for sandbox in (one, two):
        assert sandbox.exec("cat /dev/shm/state /root/state").stdout == "ready\nready\n"
        assert sandbox.exec("hostname").stdout.strip() == sandbox.id
    assert [s.name for s in fy.snapshots.list()] == ["ready"]
    snapshot.delete()
    assert (
        one.exec("cat /root/state; dd if=/dev/vda of=/dev/null bs=1M count=200 2>&1 | grep -c copied").stdout
        == "ready\n1\n"
    )
    with pytest.raises(SnapshotNotFound):
        fy.sandboxes.create(snapshot="ready")


def test_rollback_returns_in_place(sbx: Sandbox) -> None:
    sbx.exec("echo good > /root/work; echo good > /dev/shm/work")
    snapshot = sbx.snapshot()
    sbx.exec("rm -rf /root/work; echo bad > /dev/shm/work")
    sbx.rollback(snapshot)
    assert sbx.exec("cat /root/work /dev/shm/work").stdout == "good\ngood\n"
    sbx.exec("echo worse > /root/work")
    sbx.rollback(snapshot)
    assert sbx.exec("cat /root/work").stdout == "good\n", "as often as one likes"
    snapshot.delete()


def test_checkpoints_are_a_ring(fy: Forkyard) -> None:
    with fy.sandboxes.create(checkpoint_every_s=2, checkpoints_kept=2) as sbx:
        for i in range(5):
            sbx.exec(f"echo {i} > /dev/shm/i")
            time.sleep(2)
        points = fy.snapshots.list(sandbox_id=sbx.id, automatic=True)
        assert 1 <= len(points) <= 2
        newest = sbx.exec("cat /dev/shm/i").stdout
        sbx.rollback(points[0])  # the newest: the oldest may be gone by now
        assert int(sbx.exec("cat /dev/shm/i").stdout) <= int(newest)
    assert fy.snapshots.list(sandbox_id=sbx.id) == [], "they go with their sandbox"
