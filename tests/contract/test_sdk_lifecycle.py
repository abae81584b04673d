"""Fork, pause, resume, snapshots and their like against the real API. What a copy holds is the VM tier's to test."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard import (
    AsyncForkyard,
    Cause,
    Conflict,
    Forkyard,
    InvalidRequest,
    Sandbox,
    SandboxEnded,
    SandboxNotFound,
    SnapshotNotFound,
    State,
    VmStartFailed,
)
from forkyard.vmm.base import FaultPlan

from .sdk_daemon import Daemon


@pytest.fixture
def sbx(fy: Forkyard) -> Iterator[Sandbox]:
    with fy.sandboxes.create(labels={"team": "a"}) as sandbox:
        yield sandbox


def test_a_fork_gives_running_children_that_know_their_parent(fy: Forkyard, sbx: Sandbox) -> None:
    children = sbx.fork(3, name="try")
    assert len({child.id for child in children}) == 3
    for child in children:
        assert (child.state, child.parent_id, child.name) == (State.RUNNING, sbx.id, "try")
        assert child.info.labels == {"team": "a"}
        assert child.exec("echo alive").stdout == "alive\n"
    assert {child.id for child in sbx.children()} == {child.id for child in children}
    (grandchild,) = children[0].fork(labels={"team": "b"})
    assert (grandchild.parent_id, grandchild.info.labels) == (children[0].id, {"team": "b"})
    for child in (*children, grandchild):
        child.delete()
    assert sbx.children() == []
    assert len(sbx.children(all=True)) == 3
    assert sbx.exec("echo still").stdout == "still\n"


def test_the_outcome_of_each_child_is_told_when_asked_for(sbx: Sandbox) -> None:
    (outcome,) = sbx.fork(partial=True)
    assert outcome.error is None
    assert outcome.sandbox is not None
    assert outcome.paused_ms >= 0
    outcome.sandbox.delete()


def test_one_child_that_fails_does_not_spoil_the_others(daemon: Daemon, sbx: Sandbox) -> None:
    daemon.host.faults = FaultPlan(fail={"child.1": VmStartFailed("no process")})
    try:
        one, two, three = sbx.fork(3, partial=True)
        with pytest.raises(VmStartFailed, match="no process") as caught:
            sbx.fork(2)
        with pytest.raises(VmStartFailed):
            daemon.host.faults.fail["child.0"] = VmStartFailed("nor for the first")
            sbx.fork()
    finally:
        daemon.host.faults = FaultPlan()
    assert isinstance(two.error, VmStartFailed)
    made = {outcome.sandbox.id for outcome in (one, three) if outcome.sandbox}
    assert len(made) == 2
    assert {child.id for child in sbx.children()} == made.union(caught.value.details["children"])
    for child in sbx.children():
        child.delete()


def test_what_has_ended_cannot_be_forked_or_paused(fy: Forkyard) -> None:
    with fy.sandboxes.create() as sandbox:
        pass
    for verb in (sandbox.fork, sandbox.pause, sandbox.resume, sandbox.snapshot, sandbox.stop):
        with pytest.raises(SandboxEnded):
            verb()


def test_a_paused_sandbox_is_resumed_and_keeps_its_processes(sbx: Sandbox) -> None:
    process = sbx.spawn("read line; echo got $line", stdin=True)
    assert sbx.pause().state == State.PAUSED
    assert (sbx.state, sbx.info.cause) == (State.PAUSED, Cause.PAUSED_BY_USER)
    assert sbx.refresh().state == State.PAUSED
    assert sbx.resume().state == State.RUNNING
    process.write_stdin("it\n")
    assert process.wait(timeout_s=20).stdout == "got it\n"


def test_any_use_wakes_a_paused_sandbox(sbx: Sandbox) -> None:
    sbx.pause()
    assert sbx.exec("echo awake").stdout == "awake\n"
    assert sbx.refresh().cause == Cause.WOKEN


def test_a_paused_sandbox_can_be_forked_and_stays_asleep(sbx: Sandbox) -> None:
    sbx.pause()
    (child,) = sbx.fork()
    with child:
        assert child.state == State.RUNNING
        assert sbx.refresh().state == State.PAUSED


def test_an_exec_that_is_followed_goes_on_over_a_pause_without_loss(sbx: Sandbox, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    printed, paused = b"", False
    stream = sbx.exec_stream(f"seq 1 20000; cat {gate}; seq 20001 40000; exit 3")
    for chunk in stream:
        printed += chunk.data
        if not paused and printed.endswith(b"\n20000\n"):
            paused = True
            sbx.pause()
            sbx.resume()
            threading.Thread(target=gate.write_text, args=("",)).start()
    assert [int(line) for line in printed.split()] == list(range(1, 40001))
    assert stream.exit_code == 3


def test_a_stopped_sandbox_is_resized_and_started(sbx: Sandbox) -> None:
    assert sbx.stop().state == State.STOPPED
    shape = sbx.resize(memory_mib=1024, disk_gib=16).shape
    assert (shape.vcpus, shape.memory_mib, shape.disk_gib) == (1, 1024, 16)
    assert sbx.start().state == State.RUNNING
    assert sbx.exec("echo up").stdout == "up\n"
    with pytest.raises(Conflict):
        sbx.resize(memory_mib=512)


def test_a_sandbox_can_be_resumed_from_its_disk_alone(sbx: Sandbox) -> None:
    sbx.pause()
    before = sbx.info.incarnation
    assert sbx.resume(memory=False).state == State.RUNNING
    assert sbx.info.incarnation > before


def test_settings_are_changed_one_by_one(fy: Forkyard) -> None:
    with fy.sandboxes.create(idle_timeout_s=60, persistence="persistent", priority=9, ttl_s=3600) as sandbox:
        info = sandbox.info
        assert (info.idle_timeout_s, info.persistence, info.priority) == (60, "persistent", 9)
        assert info.expires_at is not None
        assert sandbox.update(idle_timeout_s=None).idle_timeout_s is None
        changed = sandbox.update(name="new", priority=1, labels={"k": "v"}, checkpoint_every_s=3600)
        assert (changed.name, changed.priority, changed.labels) == ("new", 1, {"k": "v"})
        assert (changed.persistence, changed.idle_timeout_s, changed.checkpoint_every_s) == ("persistent", None, 3600)
        assert sandbox.update(ttl_s=None, checkpoint_every_s=None).expires_at is None
        assert fy.sandboxes.get(sandbox.id).info.checkpoint_every_s is None
    with fy.sandboxes.create() as sandbox:
        assert (sandbox.info.idle_timeout_s, sandbox.info.persistence) == (300, "sticky")


def test_a_snapshot_is_made_found_used_and_deleted(fy: Forkyard, sbx: Sandbox) -> None:
    snapshot = sbx.snapshot("ready")
    assert (snapshot.name, snapshot.sandbox_id) == ("ready", sbx.id)
    unnamed = sbx.snapshot()
    assert [found.id for found in fy.snapshots.list(sandbox_id=sbx.id)] == [unnamed.id, snapshot.id]
    assert fy.snapshots.list(sandbox_id=sbx.id, automatic=True) == []
    assert fy.snapshots.get("ready").id == fy.snapshots.get(snapshot.id).id == snapshot.id
    with pytest.raises(Conflict):
        sbx.snapshot("ready")
    for given in (snapshot, snapshot.id, "ready"):
        with fy.sandboxes.create(snapshot=given) as other:
            assert other.info.snapshot_id == snapshot.id
            assert other.exec("echo other").stdout == "other\n"
    snapshot.delete()
    fy.snapshots.delete(unnamed.id)
    with pytest.raises(SnapshotNotFound):
        fy.snapshots.get("ready")
    with pytest.raises(SnapshotNotFound):
        fy.sandboxes.create(snapshot="ready")


def test_a_sandbox_returns_to_its_snapshot(fy: Forkyard, sbx: Sandbox) -> None:
    snapshot = sbx.snapshot()
    info = sbx.rollback(snapshot)
    assert (info.state, info.cause, info.snapshot_id) == (State.RUNNING, Cause.ROLLED_BACK, snapshot.id)
    assert sbx.exec("echo back").stdout == "back\n"
    with pytest.raises(SnapshotNotFound):
        sbx.rollback("nosuch")
    with fy.sandboxes.create() as other, pytest.raises(InvalidRequest, match=sbx.id):
        other.rollback(snapshot)
    snapshot.delete()


def test_unknown_sandboxes_are_typed_errors(fy: Forkyard, sbx: Sandbox) -> None:
    sbx.info = sbx.info.model_copy(update={"id": "x" * 20})
    ghost = Sandbox(sbx._transport, sbx.info)
    for verb in (ghost.fork, ghost.pause, ghost.start, ghost.snapshot):
        with pytest.raises(SandboxNotFound):
            verb()


def test_the_last_events_are_the_end_of_all_events(fy: Forkyard, sbx: Sandbox) -> None:
    everything = [event.id for event in fy.events.list()]
    assert [event.id for event in fy.events.list(tail=2)] == everything[-2:]
    own = [event.id for event in fy.events.list(sandbox_id=sbx.id)]
    assert [event.id for event in fy.events.list(sandbox_id=sbx.id, tail=100)] == own


def test_the_async_client_does_the_same(daemon: Daemon) -> None:
    async def session() -> None:
        async with (
            AsyncForkyard(socket=daemon.socket, key_file=daemon.key_file) as fy,
            await fy.sandboxes.create() as sandbox,
        ):
            children = await sandbox.fork(2)
            assert {child.id for child in await sandbox.children()} == {child.id for child in children}
            assert await asyncio.gather(*(child.pause() for child in children))
            assert {child.state for child in children} == {State.PAUSED}
            snapshot = await sandbox.snapshot("async")
            assert [found.id for found in await fy.snapshots.list(sandbox_id=sandbox.id)] == [snapshot.id]
            assert (await sandbox.rollback(snapshot)).state == State.RUNNING
            await snapshot.delete()
            for child in children:
                await child.delete()

    asyncio.run(session())
