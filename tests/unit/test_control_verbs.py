"""Fork, pause, resume, stop, start, resize, snapshot, rollback: alone, failing, and two at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from forkyard.control.plane import ControlPlane
from forkyard.errors import (
    Conflict,
    ForkyardError,
    HostFailure,
    InternalError,
    InvalidRequest,
    InvalidShape,
    SandboxEnded,
    SandboxNotFound,
    SnapshotCorrupt,
    SnapshotFailed,
    SnapshotNotFound,
    StateConflict,
    VmStartFailed,
)
from forkyard.guest.base import ExecSpec
from forkyard.hosts.base import Incarnation
from forkyard.hosts.memory import MemoryHost, Power
from forkyard.lifecycle import Cause, State
from forkyard.models import SandboxCreate, SandboxFork, SandboxInfo, SandboxResize, SandboxUpdate
from forkyard.net.base import Network
from forkyard.vmm.base import ExitKind, FaultPlan

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def made(control: ControlPlane, **fields: Any) -> SandboxInfo:
    return await control.sandboxes.create(SandboxCreate(**fields))


async def kinds(control: ControlPlane, sandbox_id: str) -> list[str]:
    return [event.kind for event in (await control.events.page(sandbox_id=sandbox_id)).items]


async def write(control: ControlPlane, sandbox_id: str, path: str, text: str) -> None:
    async def chunks() -> Any:
        yield text.encode()

    async with control.sandboxes.use(sandbox_id) as guest:
        await guest.write_file(path, chunks())


async def read(control: ControlPlane, sandbox_id: str, path: str) -> str:
    async with control.sandboxes.use(sandbox_id) as guest, guest.read_file(path) as chunks:
        return b"".join([chunk async for chunk in chunks]).decode()


async def reached(host: MemoryHost, step: str) -> None:
    """Until the host has been asked for this verb."""
    async with asyncio.timeout(5):
        while not any(name == step for name, _ in host.calls):
            await asyncio.sleep(0.001)


# ── fork ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_children_are_running_copies_that_inherit_all_but_identity(control: ControlPlane) -> None:
    parent = await made(
        control, labels={"a": "b"}, env={"CI": "1"}, idle_timeout_s=7, persistence="persistent", ttl_s=1000, name="mum"
    )
    await write(control, parent.id, "/tmp/a", "before")
    result = await control.forks.fork(parent.id, SandboxFork(count=3, name="kid"))
    await write(control, parent.id, "/tmp/a", "after")
    assert result.parent_id == parent.id
    children = [child.sandbox for child in result.children]
    assert len({child.id for child in children if child}) == 3
    for child in children:
        assert child is not None
        assert (child.state, child.cause, child.parent_id) == (State.RUNNING, Cause.FORKED, parent.id)
        assert (child.name, child.labels, child.idle_timeout_s) == ("kid", {"a": "b"}, 7)
        assert child.persistence == "persistent"
        assert child.expires_at is not None
        assert parent.expires_at is not None
        assert child.expires_at > parent.expires_at
        assert await read(control, child.id, "/tmp/a") == "before"
    event = (await control.events.page(sandbox_id=parent.id)).items[-1]
    assert (event.kind, event.data["children"]) == ("sandbox.forked", [child.id for child in children if child])


async def test_labels_of_children_can_be_given(control: ControlPlane) -> None:
    parent = await made(control, labels={"a": "b"})
    result = await control.forks.fork(parent.id, SandboxFork(labels={}))
    assert result.children[0].sandbox is not None
    assert result.children[0].sandbox.labels == {}


async def test_a_child_has_the_commands_of_its_parent_under_the_same_ids(control: ControlPlane) -> None:
    parent = await made(control)
    async with control.sandboxes.use(parent.id) as guest:
        started = await guest.start(ExecSpec("sleep 60", id="mine"))
    child = (await control.forks.fork(parent.id, SandboxFork())).children[0].sandbox
    assert child is not None
    async with control.sandboxes.use(child.id) as guest:
        assert (await guest.exec_info("mine")).pid == started.pid


async def test_a_fork_of_a_paused_sandbox_does_not_wake_it(control: ControlPlane) -> None:
    parent = await made(control)
    await control.sleep.pause(parent.id)
    result = await control.forks.fork(parent.id, SandboxFork())
    assert (result.paused_ms, result.children[0].sandbox is not None) == (0.0, True)
    assert (await control.sandboxes.get(parent.id)).state is State.PAUSED


async def test_a_fork_of_a_fork_knows_its_parent(control: ControlPlane) -> None:
    first = await made(control)
    second = (await control.forks.fork(first.id, SandboxFork())).children[0].sandbox
    assert second is not None
    third = (await control.forks.fork(second.id, SandboxFork())).children[0].sandbox
    assert third is not None
    assert third.parent_id == second.id


async def test_one_child_that_fails_does_not_spoil_the_others(control: ControlPlane, host: MemoryHost) -> None:
    parent = await made(control)
    host.faults = FaultPlan(fail={"child.1": VmStartFailed("no room for this one")})
    result = await control.forks.fork(parent.id, SandboxFork(count=3))
    assert [child.sandbox is not None for child in result.children] == [True, False, True]
    problem = result.children[1].problem
    assert problem is not None
    assert (problem["code"], problem["detail"]) == ("vm_start_failed", "no room for this one")
    assert len(host.world.machines) == 3
    [failed] = (await control.sandboxes.list(states=[State.FAILED])).items
    assert (failed.cause, failed.parent_id) == (Cause.CREATE_FAILED, parent.id)


@pytest.mark.parametrize(
    ("error", "expected"), [(HostFailure("broken"), HostFailure), (ZeroDivisionError("secret"), InternalError)]
)
async def test_a_fork_without_a_living_child_is_an_error_and_leaves_nothing(
    control: ControlPlane, host: MemoryHost, error: Exception, expected: type[ForkyardError]
) -> None:
    parent = await made(control)
    host.faults = FaultPlan(fail={"fork": error})
    with pytest.raises(expected) as raised:
        await control.forks.fork(parent.id, SandboxFork(count=2))
    assert "secret" not in str(raised.value)
    assert set(host.world.machines) == {Incarnation(parent.id, 1)}
    assert len((await control.sandboxes.list(states=[State.FAILED])).items) == 2
    assert (await control.sandboxes.get(parent.id)).state is State.RUNNING


async def test_a_pause_waits_for_a_fork(control: ControlPlane, host: MemoryHost) -> None:
    parent = await made(control)
    host.holds["fork"] = asyncio.Event()
    forking = asyncio.create_task(control.forks.fork(parent.id, SandboxFork()))
    await reached(host, "fork")
    pausing = asyncio.create_task(control.sleep.pause(parent.id))
    await asyncio.sleep(0.01)
    assert (await control.sandboxes.get(parent.id)).state is State.RUNNING
    host.holds.pop("fork").set()
    assert (await forking).children[0].sandbox is not None
    assert (await pausing).state is State.PAUSED


async def test_deleting_the_parent_waits_for_a_fork_and_the_children_live(
    control: ControlPlane, host: MemoryHost
) -> None:
    parent = await made(control)
    host.holds["fork"] = asyncio.Event()
    forking = asyncio.create_task(control.forks.fork(parent.id, SandboxFork(count=2)))
    await reached(host, "fork")
    deleting = asyncio.create_task(control.sandboxes.delete(parent.id))
    await asyncio.sleep(0.01)
    host.holds.pop("fork").set()
    await deleting
    children = [child.sandbox for child in (await forking).children]
    assert {incarnation.sandbox_id for incarnation in host.world.machines} == {child.id for child in children if child}
    assert len(host.world.machines) == 2


async def test_a_child_that_is_deleted_while_it_is_forked_leaves_nothing(
    control: ControlPlane, host: MemoryHost
) -> None:
    parent = await made(control)
    host.holds["child.1"] = asyncio.Event()
    forking = asyncio.create_task(control.forks.fork(parent.id, SandboxFork(count=2)))
    await reached(host, "child.1")
    children = (await control.sandboxes.list(states=[State.CREATING])).items
    deleting = [asyncio.create_task(control.sandboxes.delete(child.id)) for child in children[:1]]
    await asyncio.sleep(0.02)
    host.holds.pop("child.1").set()
    result = await forking
    await asyncio.gather(*deleting)
    assert sorted(child.sandbox is None for child in result.children) == [False, True]
    assert len(host.world.machines) == 2


# ── pause, resume ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_paused_sandbox_goes_on_where_it_was(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control)
    guest = await control.sandboxes.guest(info.id)
    paused = await control.sleep.pause(info.id)
    assert (paused.state, paused.cause, paused.incarnation) == (State.PAUSED, Cause.PAUSED_BY_USER, 1)
    resumed = await control.sleep.resume(info.id)
    assert (resumed.state, resumed.cause, resumed.incarnation) == (State.RUNNING, Cause.RESUMED_BY_USER, 1)
    assert await control.sandboxes.guest(info.id) is guest
    assert await kinds(control, info.id) == [
        f"sandbox.{kind}" for kind in ("creating", "running", "pausing", "paused", "resuming", "running")
    ]


async def test_a_cold_sandbox_comes_back_as_its_next_incarnation(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control)
    for round_ in range(10):
        await write(control, info.id, "/tmp/a", str(round_))
        await control.sleep.pause(info.id)
        assert await control.sleep.cool_if_free(info.id)
        resumed = await control.sleep.resume(info.id)
        assert resumed.incarnation == round_ + 2
        assert await read(control, info.id, "/tmp/a") == str(round_)
    assert set(host.world.machines) == {Incarnation(info.id, 11)}


async def test_pausing_twice_and_resuming_twice_is_fine(control: ControlPlane) -> None:
    info = await made(control)
    assert await control.sleep.pause(info.id) == await control.sleep.pause(info.id)
    assert await control.sleep.resume(info.id) == await control.sleep.resume(info.id)


async def test_two_pauses_at_once_are_one(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control)
    answers = await asyncio.gather(*(control.sleep.pause(info.id) for _ in range(5)))
    assert {answer.state for answer in answers} == {State.PAUSED}
    assert [name for name, _ in host.calls].count("pause") == 1


async def test_a_pause_that_fails_leaves_the_sandbox_running(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control)
    host.faults = FaultPlan(fail={"pause": SnapshotFailed("the disk is full")})
    with pytest.raises(SnapshotFailed):
        await control.sleep.pause(info.id)
    now = await control.sandboxes.get(info.id)
    assert (now.state, now.cause, now.cause_detail) == (State.RUNNING, Cause.PAUSE_FAILED, "the disk is full")
    await control.sandboxes.guest(info.id)


async def test_a_sleeper_that_cannot_be_moved_to_disk_stays_as_it_was(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control)
    await control.sleep.pause(info.id)
    host.faults = FaultPlan(fail={"cool": SnapshotFailed("the disk is full")})
    assert not await control.sleep.cool_if_free(info.id)
    assert (await control.sandboxes.get(info.id)).state is State.PAUSED
    assert (await control.sleep.resume(info.id)).incarnation == 1


async def test_a_resume_that_fails_leaves_it_paused_and_its_disk_can_be_booted(
    control: ControlPlane, host: MemoryHost
) -> None:
    info = await made(control)
    await write(control, info.id, "/root/kept", "yes")
    await control.sleep.pause(info.id)
    await control.sleep.cool_if_free(info.id)
    host.world.machines[Incarnation(info.id, 1)].corrupt = True
    with pytest.raises(SnapshotCorrupt):
        await control.sleep.resume(info.id)
    now = await control.sandboxes.get(info.id)
    assert (now.state, now.cause) == (State.PAUSED, Cause.RESUME_FAILED)
    booted = await control.sleep.resume(info.id, memory=False)
    assert (booted.state, booted.incarnation) == (State.RUNNING, 2)
    assert await read(control, info.id, "/root/kept") == "yes"


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_pause_and_resume_say_why_they_cannot(control: ControlPlane, verb: str) -> None:
    info = await made(control)
    call = getattr(control.sleep, verb)
    await control.power.stop(info.id)
    with pytest.raises(StateConflict, match="is stopped") as raised:
        await call(info.id)
    assert raised.value.details["state"] is State.STOPPED
    await control.sandboxes.delete(info.id)
    with pytest.raises(SandboxEnded):
        await call(info.id)
    with pytest.raises(SandboxNotFound):
        await call("nobody")


@pytest.mark.parametrize(
    ("verb", "step"),
    [
        ("pause", "pause"),
        ("pause", "pause.done"),
        ("resume", "resume"),
        ("resume", "resume.done"),
        ("stop", "power_off"),
        ("start", "boot"),
        ("start", "boot.done"),
        ("rollback", "rollback"),
        ("rollback", "rollback.done"),
    ],
)
async def test_a_delete_interrupts_a_verb_and_wins(
    control: ControlPlane, host: MemoryHost, verb: str, step: str
) -> None:
    info = await made(control)
    await control.snapshots.create(info.id, "before")
    if verb == "resume":
        await control.sleep.pause(info.id)
        await control.sleep.cool_if_free(info.id)
    if verb == "start":
        await control.power.stop(info.id)
    host.holds[step] = asyncio.Event()
    calls: dict[str, Any] = {
        "pause": control.sleep.pause,
        "resume": control.sleep.resume,
        "stop": control.power.stop,
        "start": control.power.start,
        "rollback": lambda sandbox_id: control.snapshots.rollback(sandbox_id, "before"),
    }
    caller = asyncio.create_task(calls[verb](info.id))
    host.calls.clear()
    await reached(host, step)
    async with asyncio.timeout(5):
        await control.sandboxes.delete(info.id)
    with pytest.raises(SandboxEnded):
        await caller
    assert (await control.sandboxes.get(info.id)).state is State.DELETED
    assert host.world.machines == {}


async def test_a_caller_that_goes_away_does_not_stop_the_pause(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control)
    host.holds["pause"] = asyncio.Event()
    caller = asyncio.create_task(control.sleep.pause(info.id))
    await reached(host, "pause")
    caller.cancel()
    host.holds.pop("pause").set()
    await control.ground.turns.settle(5)
    assert (await control.sandboxes.get(info.id)).state is State.PAUSED


async def test_a_machine_that_ends_while_it_sleeps_fails_and_can_be_started(
    control: ControlPlane, host: MemoryHost
) -> None:
    info = await made(control)
    await control.sleep.pause(info.id)
    host.end(Incarnation(info.id, 1), ExitKind.KILLED, "killed by signal 9")
    async with control.events.follow(sandbox_id=info.id, after=0) as events:
        async for event in events:
            if event.kind == "sandbox.failed":
                break
    failed = await control.sandboxes.get(info.id)
    assert (failed.cause, failed.ended_at is not None) == (Cause.VM_CRASHED, True)
    started = await control.power.start(info.id)
    assert (started.state, started.ended_at, started.incarnation) == (State.RUNNING, None, 2)


async def test_a_machine_that_ends_before_its_resume_is_recorded_fails_after_it(
    control: ControlPlane, host: MemoryHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = await made(control)
    await control.sleep.pause(info.id)
    await control.sleep.cool_if_free(info.id)
    resume = host.resume

    async def resume_and_crash(incarnation: Incarnation, successor: Incarnation, network: Network) -> Incarnation:
        now = await resume(incarnation, successor, network)
        host.end(now, ExitKind.CRASHED, "at once")
        await asyncio.sleep(0.02)
        return now

    monkeypatch.setattr(host, "resume", resume_and_crash)
    await control.sleep.resume(info.id)
    async with control.events.follow(sandbox_id=info.id, after=0) as events, asyncio.timeout(5):
        async for event in events:
            if event.kind == "sandbox.failed":
                break
    now = await control.sandboxes.get(info.id)
    assert (now.state, now.incarnation, now.cause_detail) == (State.FAILED, 2, "at once")


# ── stop, start, resize ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("asleep", [False, True])
async def test_a_stopped_sandbox_keeps_its_disk(control: ControlPlane, host: MemoryHost, asleep: bool) -> None:
    info = await made(control)
    await write(control, info.id, "/root/a", "kept")
    if asleep:
        await control.sleep.pause(info.id)
    stopped = await control.power.stop(info.id)
    assert (stopped.state, stopped.cause) == (State.STOPPED, Cause.STOPPED_BY_USER)
    assert await control.power.stop(info.id) == stopped
    with pytest.raises(StateConflict, match="start it"):
        await control.sandboxes.guest(info.id)
    started = await control.power.start(info.id)
    assert (started.state, started.cause, started.incarnation) == (State.RUNNING, Cause.STARTED_BY_USER, 2)
    assert await control.power.start(info.id) == started
    assert await read(control, info.id, "/root/a") == "kept"


@pytest.mark.parametrize("asleep", [False, True])
async def test_a_stop_that_fails_leaves_it_as_it_was(control: ControlPlane, host: MemoryHost, asleep: bool) -> None:
    info = await made(control)
    if asleep:
        await control.sleep.pause(info.id)
    host.faults = FaultPlan(fail={"power_off": HostFailure("it does not listen")})
    with pytest.raises(HostFailure):
        await control.power.stop(info.id)
    now = await control.sandboxes.get(info.id)
    assert (now.state, now.cause) == (State.PAUSED if asleep else State.RUNNING, Cause.STOP_FAILED)


async def test_a_start_that_fails_can_be_tried_again(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control)
    await control.power.stop(info.id)
    host.faults = FaultPlan(fail={"boot": VmStartFailed("no")})
    with pytest.raises(VmStartFailed):
        await control.power.start(info.id)
    now = await control.sandboxes.get(info.id)
    assert (now.state, now.cause) == (State.STOPPED, Cause.START_FAILED)
    host.faults = FaultPlan()
    assert (await control.power.start(info.id)).state is State.RUNNING


async def test_a_create_that_failed_left_nothing_to_start(control: ControlPlane, host: MemoryHost) -> None:
    host.faults = FaultPlan(fail={"create": VmStartFailed("no")})
    with pytest.raises(VmStartFailed):
        await made(control)
    host.faults = FaultPlan()
    [info] = (await control.sandboxes.list(ended=True)).items
    with pytest.raises(StateConflict, match="nothing of sandbox"):
        await control.power.start(info.id)
    now = await control.sandboxes.get(info.id)
    assert (now.state, now.cause, now.cause_detail) == (State.FAILED, Cause.CREATE_FAILED, "no")


async def test_a_guest_that_powers_itself_off_is_stopped_and_can_be_started(
    control: ControlPlane, host: MemoryHost
) -> None:
    info = await made(control)
    host.end(Incarnation(info.id, 1), ExitKind.SHUTDOWN, "the guest powered off")
    async with control.events.follow(sandbox_id=info.id, after=0) as events:
        async for event in events:
            if event.kind == "sandbox.stopped":
                break
    assert (await control.sandboxes.get(info.id)).cause is Cause.GUEST_SHUTDOWN
    assert (await control.power.start(info.id)).state is State.RUNNING


async def test_a_new_size_takes_effect_at_the_next_start(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control)
    await control.power.stop(info.id)
    resized = await control.power.resize(info.id, SandboxResize(vcpus=2, memory_mib=1024, disk_gib=16))
    assert (resized.state, resized.shape.model_dump()) == (
        State.STOPPED,
        {"vcpus": 2, "memory_mib": 1024, "disk_gib": 16},
    )
    await control.power.start(info.id)
    assert host.world.machines[Incarnation(info.id, 2)].spec.shape == resized.shape


async def test_what_cannot_be_resized_says_why(control: ControlPlane) -> None:
    info = await made(control)
    with pytest.raises(StateConflict, match=r"is running.*stop it first"):
        await control.power.resize(info.id, SandboxResize(vcpus=2))
    await control.sleep.pause(info.id)
    with pytest.raises(StateConflict, match=r"is paused.*drop what is in its memory.*stop it first"):
        await control.power.resize(info.id, SandboxResize(memory_mib=1024))
    grown = await control.power.resize(info.id, SandboxResize(disk_gib=16))
    assert (grown.state, grown.shape.disk_gib) == (State.PAUSED, 16)
    with pytest.raises(InvalidShape, match="only grows"):
        await control.power.resize(info.id, SandboxResize(disk_gib=8))


# ── ephemeral, update ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("verb", ["pause", "stop"])
async def test_an_ephemeral_sandbox_is_deleted_when_it_pauses_or_stops(
    control: ControlPlane, host: MemoryHost, verb: str
) -> None:
    info = await made(control, persistence="ephemeral")
    ended = await (control.sleep.pause if verb == "pause" else control.power.stop)(info.id)
    assert (ended.state, ended.cause) == (State.DELETED, Cause.EPHEMERAL)
    assert host.world.machines == {}


async def test_one_that_lasts_until_it_is_stopped_outlives_its_sleep(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control, persistence="until-stopped")
    assert (await control.sleep.pause(info.id)).state is State.PAUSED
    assert (await control.sleep.resume(info.id)).state is State.RUNNING
    ended = await control.power.stop(info.id)
    assert (ended.state, ended.cause, host.world.machines) == (State.DELETED, Cause.EPHEMERAL, {})


async def test_an_update_changes_what_is_given_and_nothing_else(control: ControlPlane) -> None:
    info = await made(control, name="a", labels={"a": "1"}, ttl_s=100)
    changed = await control.sandboxes.update(info.id, SandboxUpdate(labels={"b": "2"}, idle_timeout_s=None))
    assert (changed.name, changed.labels, changed.idle_timeout_s) == ("a", {"b": "2"}, None)
    assert changed.expires_at == info.expires_at
    assert (await control.sandboxes.update(info.id, SandboxUpdate(ttl_s=None))).expires_at is None
    assert await control.sandboxes.update(info.id, SandboxUpdate()) == await control.sandboxes.get(info.id)
    assert (await kinds(control, info.id))[-1] == "sandbox.updated"
    with pytest.raises(InvalidRequest, match="priority cannot be null"):
        await control.sandboxes.update(info.id, SandboxUpdate(priority=None))
    await control.sandboxes.delete(info.id)
    with pytest.raises(SandboxEnded):
        await control.sandboxes.update(info.id, SandboxUpdate(name="late"))
    with pytest.raises(SandboxNotFound):
        await control.sandboxes.update("nobody", SandboxUpdate(name="late"))


# ── snapshots ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("asleep", [False, True])
async def test_a_sandbox_can_be_made_from_a_snapshot(control: ControlPlane, asleep: bool) -> None:
    info = await made(control, memory_mib=1024, env={"A": "1", "B": "1"})
    await write(control, info.id, "/tmp/a", "then")
    if asleep:
        await control.sleep.pause(info.id)
    snapshot = await control.snapshots.create(info.id, "ready")
    assert (await control.sandboxes.get(info.id)).state is (State.PAUSED if asleep else State.RUNNING)
    await write(control, info.id, "/tmp/a", "now")
    for reference in ("ready", snapshot.id):
        other = await made(control, snapshot=reference, env={"B": "2"})
        assert (other.shape.memory_mib, other.snapshot_id, other.parent_id) == (1024, snapshot.id, None)
        assert await read(control, other.id, "/tmp/a") == "then"
        record = await control.ground.record(other.id)
        assert record.env == {"B": "2"}, "what somebody gave their sandbox is theirs"


async def test_a_snapshot_outlives_its_sandbox_and_what_was_made_from_it_outlives_it(
    control: ControlPlane, host: MemoryHost
) -> None:
    info = await made(control)
    await write(control, info.id, "/tmp/a", "kept")
    snapshot = await control.snapshots.create(info.id, "ready")
    await control.sandboxes.delete(info.id)
    other = await made(control, snapshot="ready")
    await control.snapshots.delete("ready")
    assert host.world.snapshots == {}
    assert await read(control, other.id, "/tmp/a") == "kept"
    for call in (control.snapshots.get, control.snapshots.delete):
        with pytest.raises(SnapshotNotFound):
            await call(snapshot.id)
    with pytest.raises(SnapshotNotFound):
        await made(control, snapshot="ready")


async def test_a_shape_that_is_not_that_of_the_snapshot_is_refused(control: ControlPlane) -> None:
    info = await made(control, memory_mib=1024)
    await control.snapshots.create(info.id, "ready")
    with pytest.raises(InvalidShape, match="memory_mib 1024"):
        await made(control, snapshot="ready", memory_mib=512)
    assert (await made(control, snapshot="ready", memory_mib=1024)).state is State.RUNNING


async def test_names_of_snapshots_are_unique_and_free_again_after_a_delete(control: ControlPlane) -> None:
    info = await made(control)
    await control.snapshots.create(info.id, "ready")
    with pytest.raises(Conflict, match="named 'ready' already"):
        await control.snapshots.create(info.id, "ready")
    await control.snapshots.delete("ready")
    await control.snapshots.create(info.id, "ready")
    with pytest.raises(InvalidRequest, match="looks like the id"):
        await control.snapshots.create(info.id, "sc-" + "a" * 20)


async def test_a_snapshot_that_fails_leaves_nothing_but_the_sandbox(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control)
    host.faults = FaultPlan(fail={"snapshot": SnapshotFailed("the disk is full")})
    with pytest.raises(SnapshotFailed):
        await control.snapshots.create(info.id, "ready")
    assert (await control.sandboxes.get(info.id)).state is State.RUNNING
    host.faults = FaultPlan()
    assert (await control.snapshots.create(info.id, "ready")).name == "ready"
    assert len(host.world.snapshots) == len((await control.snapshots.list()).items) == 1


async def test_snapshots_are_listed_newest_first_in_pages(control: ControlPlane) -> None:
    first, second = await made(control), await made(control)
    ids = [(await control.snapshots.create(one.id)).id for one in (first, second, first, first)]
    seen: list[str] = []
    cursor = None
    while True:
        page = await control.snapshots.list(limit=3, cursor=cursor)
        seen += [info.id for info in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == ids[::-1]
    assert [info.id for info in (await control.snapshots.list(sandbox_id=second.id)).items] == [ids[1]]
    assert (await control.snapshots.list(automatic=True)).items == []


@pytest.mark.parametrize("state", ["running", "paused", "cold", "stopped", "failed"])
async def test_a_sandbox_is_rolled_back_from_any_settled_state(
    control: ControlPlane, host: MemoryHost, state: str
) -> None:
    info = await made(control)
    await write(control, info.id, "/tmp/a", "then")
    snapshot = await control.snapshots.create(info.id, "ready")
    await write(control, info.id, "/tmp/a", "now")
    if state in ("paused", "cold"):
        await control.sleep.pause(info.id)
    if state == "cold":
        await control.sleep.cool_if_free(info.id)
    if state == "stopped":
        await control.power.stop(info.id)
    if state == "failed":
        host.end(Incarnation(info.id, 1), ExitKind.PANIC, "panic")
        async with control.events.follow(sandbox_id=info.id, after=0) as events:
            async for event in events:
                if event.kind == "sandbox.failed":
                    break
    back = await control.snapshots.rollback(info.id, "ready")
    assert (back.state, back.cause, back.incarnation, back.snapshot_id) == (
        State.RUNNING,
        Cause.ROLLED_BACK,
        2,
        snapshot.id,
    )
    assert await read(control, info.id, "/tmp/a") == "then"
    assert set(host.world.machines) == {Incarnation(info.id, 2)}


async def test_a_rollback_that_fails_changes_nothing(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control)
    await control.snapshots.create(info.id, "ready")
    await write(control, info.id, "/tmp/a", "now")
    before = await control.sandboxes.get(info.id)
    host.faults = FaultPlan(fail={"rollback": SnapshotCorrupt()})
    with pytest.raises(SnapshotCorrupt):
        await control.snapshots.rollback(info.id, "ready")
    after = await control.sandboxes.get(info.id)
    assert (after.state, after.cause, after.incarnation) == (before.state, before.cause, before.incarnation)
    assert await read(control, info.id, "/tmp/a") == "now"


async def test_a_rollback_to_a_snapshot_of_another_is_refused(control: ControlPlane) -> None:
    info, other = await made(control), await made(control)
    await control.snapshots.create(other.id, "theirs")
    with pytest.raises(InvalidRequest, match=f"is of sandbox {other.id}"):
        await control.snapshots.rollback(info.id, "theirs")
    with pytest.raises(SnapshotNotFound):
        await control.snapshots.rollback(info.id, "nothing")
    assert (await control.sandboxes.get(info.id)).incarnation == 1


@pytest.mark.parametrize("verb", ["fork", "snapshot", "rollback"])
async def test_what_needs_a_machine_is_refused_to_what_has_none(control: ControlPlane, verb: str) -> None:
    calls: dict[str, Any] = {
        "fork": lambda sandbox_id: control.forks.fork(sandbox_id, SandboxFork()),
        "snapshot": control.snapshots.create,
        "rollback": lambda sandbox_id: control.snapshots.rollback(sandbox_id, "x"),
    }
    info = await made(control)
    await control.power.stop(info.id)
    if verb != "rollback":
        with pytest.raises(StateConflict, match="is stopped"):
            await calls[verb](info.id)
    await control.sandboxes.delete(info.id)
    with pytest.raises(SandboxEnded):
        await calls[verb](info.id)
    with pytest.raises(SandboxNotFound):
        await calls[verb]("nobody")


async def test_power_of_the_memory_host_is_what_the_states_say(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control)
    machine = host.world.machines[Incarnation(info.id, 1)]
    await control.sleep.pause(info.id)
    assert machine.power is Power.HOT
    await control.sleep.cool_if_free(info.id)
    assert machine.power is Power.COLD
    await control.power.stop(info.id)
    assert machine.power is Power.OFF
