"""Sleep and wake, ttl, cooling, checkpoints: what happens with time, and what races with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from forkyard.control.plane import ControlPlane
from forkyard.errors import GuestUnreachable, HostFailure, SandboxEnded, SnapshotCorrupt, SnapshotFailed, StateConflict
from forkyard.guest.base import ExecSpec, Exit, Output
from forkyard.hosts.base import Incarnation
from forkyard.hosts.memory import MemoryHost, Power
from forkyard.lifecycle import Cause, State
from forkyard.models import SandboxCreate, SandboxInfo, SandboxUpdate
from forkyard.net.base import Traffic
from forkyard.store.records import SandboxRecord
from forkyard.store.sql import Store
from forkyard.vmm.base import FaultPlan

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(control: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Time passes only when a test says so."""
    monkeypatch.setattr("forkyard.control.upkeep.TICK_S", 3600.0)
    clock = Clock()
    control.ground.activity.clock = clock
    yield clock


async def made(control: ControlPlane, **fields: Any) -> SandboxInfo:
    return await control.sandboxes.create(SandboxCreate(**fields))


async def after(control: ControlPlane, clock: Clock, seconds: float) -> None:
    """The daemon's upkeep after so many seconds."""
    clock.now += seconds
    await control.upkeep.tick()
    await control.upkeep.settle()


async def state(control: ControlPlane, sandbox_id: str) -> State:
    return (await control.sandboxes.get(sandbox_id)).state


def verbs(host: MemoryHost, name: str) -> int:
    return [step for step, _ in host.calls].count(name)


# ── falling asleep ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_idle_sandbox_falls_asleep(control: ControlPlane, clock: Clock) -> None:
    info = await made(control, idle_timeout_s=10)
    await after(control, clock, 9)
    assert await state(control, info.id) is State.RUNNING
    await after(control, clock, 1)
    now = await control.sandboxes.get(info.id)
    assert (now.state, now.cause) == (State.PAUSED, Cause.IDLE)


@pytest.mark.parametrize(("moved", "stays"), [(4097, True), (4096, False)])
async def test_much_traffic_keeps_it_awake_and_a_little_does_not(
    control: ControlPlane, host: MemoryHost, clock: Clock, moved: int, stays: bool
) -> None:
    info = await made(control, idle_timeout_s=8)
    machine = host.world.machines[Incarnation(info.id, 1)]
    for turn in range(1, 6):
        machine.traffic = Traffic(bytes_out=turn, bytes_in=turn * moved - turn)
        await after(control, clock, 2)
    assert await state(control, info.id) is (State.RUNNING if stays else State.PAUSED)


async def test_the_threshold_of_traffic_can_be_changed(control: ControlPlane, host: MemoryHost, clock: Clock) -> None:
    info = await made(control, idle_timeout_s=8, activity_threshold_bytes=10**6)
    await control.sandboxes.update(info.id, SandboxUpdate(activity_threshold_bytes=0))
    for turn in range(1, 6):
        host.world.machines[Incarnation(info.id, 1)].traffic = Traffic(bytes_in=turn)
        await after(control, clock, 2)
    assert await state(control, info.id) is State.RUNNING


async def test_without_an_idle_timeout_it_never_does(control: ControlPlane, clock: Clock) -> None:
    info = await made(control, idle_timeout_s=None)
    await after(control, clock, 1e6)
    assert await state(control, info.id) is State.RUNNING


async def test_a_call_begins_the_time_anew_and_a_call_under_way_stops_it(control: ControlPlane, clock: Clock) -> None:
    info = await made(control, idle_timeout_s=10)
    clock.now += 9
    async with control.sandboxes.use(info.id):
        await after(control, clock, 100)
        assert await state(control, info.id) is State.RUNNING
    await after(control, clock, 9)
    assert await state(control, info.id) is State.RUNNING
    await after(control, clock, 1)
    assert await state(control, info.id) is State.PAUSED


async def test_looking_at_a_sandbox_neither_wakes_it_nor_keeps_it_awake(control: ControlPlane, clock: Clock) -> None:
    info = await made(control, idle_timeout_s=10)

    async def look() -> None:
        await control.sandboxes.get(info.id)
        await control.sandboxes.list()
        await control.sandboxes.logs(info.id)
        await control.events.page(sandbox_id=info.id)
        await control.sandboxes.update(info.id, SandboxUpdate(name="seen"))

    clock.now += 9
    await look()
    await control.sandboxes.usage(info.id)
    await after(control, clock, 1)
    assert await state(control, info.id) is State.PAUSED
    await look()
    with pytest.raises(StateConflict, match="is paused"):
        await control.sandboxes.usage(info.id)
    assert await state(control, info.id) is State.PAUSED


async def test_output_in_the_background_is_activity(control: ControlPlane, clock: Clock) -> None:
    info = await made(control, idle_timeout_s=10)
    guest: Any = await control.sandboxes.guest(info.id)
    running = await guest.start(ExecSpec("cat", stdin=True))
    for _ in range(5):
        await after(control, clock, 5)
        await guest.write_stdin(running.id, b"x")  # the test writes past the control plane: only `cat` is heard
        while not (await guest.exec_info(running.id)).stdout_bytes:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
    assert await state(control, info.id) is State.RUNNING
    for _ in range(4):
        await after(control, clock, 2.5)
        assert await state(control, info.id) is State.RUNNING
    await after(control, clock, 2.5)
    assert await state(control, info.id) is State.PAUSED


async def test_a_quiet_command_in_the_background_does_not_keep_it_awake(control: ControlPlane, clock: Clock) -> None:
    info = await made(control, idle_timeout_s=10)
    async with control.sandboxes.use(info.id) as guest:
        await guest.start(ExecSpec("sleep 60"))
    await after(control, clock, 10)
    assert await state(control, info.id) is State.PAUSED


async def test_an_agent_that_does_not_answer_is_no_reason_to_stay_awake(control: ControlPlane, clock: Clock) -> None:
    info = await made(control, idle_timeout_s=10)
    guest: Any = await control.sandboxes.guest(info.id)
    await guest.vanish()
    await after(control, clock, 10)
    assert await state(control, info.id) is State.PAUSED


async def test_an_idle_ephemeral_sandbox_is_deleted(control: ControlPlane, clock: Clock) -> None:
    info = await made(control, idle_timeout_s=10, persistence="ephemeral")
    await after(control, clock, 10)
    now = await control.sandboxes.get(info.id)
    assert (now.state, now.cause) == (State.DELETED, Cause.EPHEMERAL)


async def test_a_pause_that_fails_is_tried_again_at_the_next_look(
    control: ControlPlane, host: MemoryHost, clock: Clock
) -> None:
    info = await made(control, idle_timeout_s=10)
    host.faults = FaultPlan(fail={"pause": SnapshotFailed("full")})
    await after(control, clock, 10)
    assert await state(control, info.id) is State.RUNNING
    host.faults = FaultPlan()
    await after(control, clock, 1)
    assert await state(control, info.id) is State.PAUSED


async def test_the_time_of_the_last_activity_is_kept(control: ControlPlane, clock: Clock) -> None:
    info = await made(control)
    async with control.sandboxes.use(info.id):
        pass
    first = (await control.sandboxes.get(info.id)).last_active_at
    clock.now += 20
    await control.sleep.pause(info.id)
    assert first is not None
    now = (await control.sandboxes.get(info.id)).last_active_at
    assert now is not None
    assert abs((now - first).total_seconds() + 20) < 5  # 20 s before the pause


# ── waking ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cold", [False, True])
async def test_a_call_wakes_a_sleeper(control: ControlPlane, cold: bool) -> None:
    info = await made(control)
    await control.sleep.pause(info.id)
    if cold:
        await control.sleep.cool_if_free(info.id)
    async with control.sandboxes.use(info.id) as guest:
        await guest.ping()
    now = await control.sandboxes.get(info.id)
    assert (now.state, now.cause) == (State.RUNNING, Cause.WOKEN)


@pytest.mark.parametrize("cold", [False, True])
async def test_many_callers_wake_it_once(control: ControlPlane, host: MemoryHost, cold: bool) -> None:
    info = await made(control)
    await control.sleep.pause(info.id)
    if cold:
        await control.sleep.cool_if_free(info.id)
    host.faults = FaultPlan(delay_s={"resume": 0.02})

    async def call() -> None:
        async with control.sandboxes.use(info.id) as guest:
            await guest.ping()

    await asyncio.gather(*(call() for _ in range(50)))
    assert verbs(host, "resume") == 1


async def test_a_wake_that_fails_is_told_to_all_who_wait_and_the_next_tries_again(
    control: ControlPlane, host: MemoryHost
) -> None:
    info = await made(control)
    await control.sleep.pause(info.id)
    host.faults = FaultPlan(fail={"resume": SnapshotCorrupt()}, delay_s={"resume": 0.02})
    calls = (control.sandboxes.guest(info.id) for _ in range(20))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, SnapshotCorrupt) for outcome in outcomes)
    assert verbs(host, "resume") == 1
    host.faults = FaultPlan()
    await control.sandboxes.guest(info.id)


async def test_a_call_that_comes_while_it_falls_asleep_waits_and_is_served(
    control: ControlPlane, host: MemoryHost, clock: Clock
) -> None:
    info = await made(control, idle_timeout_s=10)
    host.holds["pause"] = asyncio.Event()
    clock.now += 10
    await control.upkeep.tick()
    while not verbs(host, "pause"):
        await asyncio.sleep(0.001)
    caller = asyncio.create_task(control.sandboxes.guest(info.id))
    await asyncio.sleep(0.02)
    assert not caller.done()
    host.holds.pop("pause").set()
    await (await caller).ping()
    assert await state(control, info.id) is State.RUNNING


async def test_a_call_that_saw_it_running_just_before_it_falls_asleep_keeps_it_awake(
    control: ControlPlane, host: MemoryHost, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = await made(control, idle_timeout_s=10)
    clock.now += 10
    transition = store.transition
    entered = asyncio.Event()
    leave = asyncio.Event()

    async def call() -> None:
        async with control.sandboxes.use(info.id):
            entered.set()
            await leave.wait()

    async def slow_transition(*args: Any, **changes: Any) -> SandboxRecord | None:
        if args[3] is State.PAUSING:
            asyncio.create_task(call())  # noqa: RUF006
            await entered.wait()
        return await transition(*args, **changes)

    monkeypatch.setattr(store, "transition", slow_transition)
    await control.upkeep.tick()
    await control.upkeep.settle()
    assert await state(control, info.id) is State.RUNNING
    assert verbs(host, "pause") == 0
    leave.set()


async def test_calls_and_sleep_that_race_lose_no_call(control: ControlPlane, host: MemoryHost, clock: Clock) -> None:
    """The guest is only reached while its machine runs, and it never sleeps in the middle of a call."""
    info = await made(control, idle_timeout_s=0.001)
    served = 0

    async def call(number: int) -> None:
        nonlocal served
        await asyncio.sleep(number % 7 * 0.002)
        async with control.sandboxes.use(info.id):
            for _ in range(3):
                record = await control.ground.record(info.id)
                machine = host.world.machines[Incarnation(info.id, record.incarnation)]
                assert (record.state, machine.power) == (State.RUNNING, Power.RUNNING)
                await asyncio.sleep(0.001)
            served += 1

    async def sleeper() -> None:
        while served < 60:
            await after(control, clock, 1)
            await control.sleep.cool_if_free(info.id)
            await asyncio.sleep(0)

    async with asyncio.timeout(60):
        await asyncio.gather(sleeper(), *(call(number) for number in range(60)))
    assert served == 60


async def test_a_sandbox_that_is_deleted_while_it_wakes_is_gone_for_the_caller(
    control: ControlPlane, host: MemoryHost
) -> None:
    info = await made(control)
    await control.sleep.pause(info.id)
    host.holds["resume"] = asyncio.Event()
    caller = asyncio.create_task(control.sandboxes.guest(info.id))
    while not verbs(host, "resume"):
        await asyncio.sleep(0.001)
    await control.sandboxes.delete(info.id)
    with pytest.raises(SandboxEnded):
        await caller


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cold", [False, True])
async def test_a_stream_stays_open_over_a_sleep_and_goes_on_without_loss(
    control: ControlPlane, host: MemoryHost, cold: bool
) -> None:
    info = await made(control)
    async with control.following.execute(info.id, ExecSpec("cat", stdin=True)) as feed:
        items = aiter(feed)

        async def typed(text: bytes) -> Output | Exit:
            async with control.sandboxes.use(info.id) as guest:
                await guest.write_stdin(feed.id, text)
            item = await asyncio.wait_for(anext(items), 5)
            assert not isinstance(item, GuestUnreachable)
            return item  # type: ignore[return-value]

        assert await typed(b"one") == Output("stdout", 0, b"one")
        waiting = asyncio.ensure_future(anext(items))
        await control.sleep.pause(info.id)
        if cold:
            await control.sleep.cool_if_free(info.id)
        await asyncio.sleep(0.02)
        assert not waiting.done()
        assert await state(control, info.id) is State.PAUSED
        async with control.sandboxes.use(info.id) as guest:
            await guest.write_stdin(feed.id, b"two", close=True)
        assert await asyncio.wait_for(waiting, 5) == Output("stdout", 3, b"two")
        assert isinstance(await asyncio.wait_for(anext(items), 5), Exit)


async def test_an_open_stream_does_not_keep_a_sandbox_awake_but_output_does(
    control: ControlPlane, clock: Clock
) -> None:
    info = await made(control, idle_timeout_s=10)
    async with control.following.execute(info.id, ExecSpec("cat", stdin=True)) as feed:
        items = aiter(feed)
        guest = await control.sandboxes.guest(info.id)
        clock.now += 9
        await guest.write_stdin(feed.id, b"x")
        await anext(items)
        await after(control, clock, 9)
        assert await state(control, info.id) is State.RUNNING
        await after(control, clock, 1)
        assert await state(control, info.id) is State.PAUSED


async def test_a_call_that_waits_for_a_quiet_command_keeps_it_awake(control: ControlPlane, clock: Clock) -> None:
    info = await made(control, idle_timeout_s=10)
    async with control.following.execute(info.id, ExecSpec("sleep 60"), hold=True):
        await after(control, clock, 100)
        assert await state(control, info.id) is State.RUNNING
    await after(control, clock, 10)
    assert await state(control, info.id) is State.PAUSED


async def test_a_stream_of_a_sandbox_that_did_not_sleep_breaks_when_its_channel_does(control: ControlPlane) -> None:
    info = await made(control)
    async with control.following.execute(info.id, ExecSpec("cat", stdin=True)) as feed:
        guest: Any = await control.sandboxes.guest(info.id)
        await guest.vanish()
        with pytest.raises(GuestUnreachable):
            await anext(aiter(feed))


@pytest.mark.parametrize("end", ["stop", "delete"])
async def test_a_stream_of_a_sandbox_that_is_stopped_or_deleted_says_so(control: ControlPlane, end: str) -> None:
    info = await made(control)
    async with control.following.execute(info.id, ExecSpec("cat", stdin=True)) as feed:
        waiting = asyncio.ensure_future(anext(aiter(feed)))
        await control.sleep.pause(info.id)
        await control.sleep.cool_if_free(info.id)
        await asyncio.sleep(0.01)
        await (control.power.stop if end == "stop" else control.sandboxes.delete)(info.id)
        with pytest.raises(StateConflict if end == "stop" else SandboxEnded):
            await asyncio.wait_for(waiting, 5)


# ── ttl, cooling, checkpoints ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("before", ["running", "paused", "stopped"])
async def test_a_ttl_deletes_whatever_its_state(
    control: ControlPlane, host: MemoryHost, clock: Clock, before: str
) -> None:
    info = await made(control, ttl_s=0.02)
    if before == "paused":
        await control.sleep.pause(info.id)
    if before == "stopped":
        await control.power.stop(info.id)
    await asyncio.sleep(0.03)
    await after(control, clock, 0)
    now = await control.sandboxes.get(info.id)
    assert (now.state, now.cause) == (State.DELETED, Cause.TTL)
    assert host.world.machines == {}


async def test_a_ttl_may_pause_instead_and_a_new_one_begins_anew(control: ControlPlane, clock: Clock) -> None:
    info = await made(control, ttl_s=0.02, on_ttl="pause")
    await asyncio.sleep(0.03)
    await after(control, clock, 0)
    now = await control.sandboxes.get(info.id)
    assert (now.state, now.cause) == (State.PAUSED, Cause.TTL)
    await after(control, clock, 0)
    assert await state(control, info.id) is State.PAUSED
    await control.sandboxes.update(info.id, SandboxUpdate(ttl_s=100))
    await control.sleep.resume(info.id)
    await after(control, clock, 0)
    assert await state(control, info.id) is State.RUNNING


@pytest.mark.parametrize("on_ttl", ["pause", "stop"])
async def test_a_ttl_that_only_made_it_sleep_begins_anew_whoever_wakes_it(
    control: ControlPlane, clock: Clock, on_ttl: str
) -> None:
    info = await made(control, ttl_s=0.3, on_ttl=on_ttl)
    await asyncio.sleep(0.35)
    await after(control, clock, 0)
    asleep = await control.sandboxes.get(info.id)
    assert (asleep.state, asleep.cause) == (State.PAUSED if on_ttl == "pause" else State.STOPPED, Cause.TTL)
    if on_ttl == "pause":
        async with control.sandboxes.use(info.id):
            pass
    else:
        await control.power.start(info.id)
    awake = await control.sandboxes.get(info.id)
    assert awake.state is State.RUNNING
    assert awake.expires_at is not None
    assert awake.expires_at > awake.updated_at
    await after(control, clock, 0)
    assert await state(control, info.id) is State.RUNNING


@pytest.mark.parametrize("way", ["wake", "resume", "start"])
async def test_a_ttl_that_stands_still_begins_anew_when_it_runs(control: ControlPlane, clock: Clock, way: str) -> None:
    info = await made(control, ttl_s=0.3)
    await (control.power.stop if way == "start" else control.sleep.pause)(info.id, hold_ttl=True)
    assert (await control.sandboxes.get(info.id)).expires_at is None
    await asyncio.sleep(0.35)
    await after(control, clock, 0)
    assert await state(control, info.id) in (State.PAUSED, State.STOPPED)
    if way == "wake":
        await control.sleep.awake(info.id)
    else:
        await (control.power.start if way == "start" else control.sleep.resume)(info.id, ttl_s=100)
    now = await control.sandboxes.get(info.id)
    assert now.expires_at is not None
    lasts_s = (now.expires_at - now.updated_at).total_seconds()
    assert lasts_s == pytest.approx(0.3 if way == "wake" else 100)


async def test_a_ttl_runs_on_if_it_could_not_fall_asleep(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control, ttl_s=100)
    host.faults = FaultPlan(fail={"pause": HostFailure("not now")})
    with pytest.raises(HostFailure):
        await control.sleep.pause(info.id, hold_ttl=True)
    now = await control.sandboxes.get(info.id)
    assert now.state is State.RUNNING
    assert now.expires_at is not None


async def test_a_ttl_that_is_renewed_while_upkeep_looks_is_not_the_end(
    control: ControlPlane, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = await made(control, ttl_s=0.02)
    await asyncio.sleep(0.03)
    read = store.list_unfinished

    async def slow_read() -> list[SandboxRecord]:
        found = await read()
        await control.sandboxes.update(info.id, SandboxUpdate(ttl_s=100))
        return found

    monkeypatch.setattr(store, "list_unfinished", slow_read)
    await after(control, clock, 0)
    assert await state(control, info.id) is State.RUNNING


async def test_an_idle_one_that_lasts_until_it_is_stopped_sleeps(control: ControlPlane, clock: Clock) -> None:
    info = await made(control, persistence="until-stopped", idle_timeout_s=10)
    await after(control, clock, 10)
    await after(control, clock, 0)
    assert await state(control, info.id) is State.PAUSED


async def test_a_delete_that_failed_is_tried_again(control: ControlPlane, host: MemoryHost, clock: Clock) -> None:
    info = await made(control, persistence="ephemeral", idle_timeout_s=10)
    host.faults = FaultPlan(fail={"destroy": HostFailure("it does not go away")})
    await after(control, clock, 10)
    await after(control, clock, 0)
    assert await state(control, info.id) is State.DELETING
    host.faults = FaultPlan()
    await after(control, clock, 29)
    assert await state(control, info.id) is State.DELETING
    await after(control, clock, 1)
    now = await control.sandboxes.get(info.id)
    assert (now.state, now.cause) == (State.DELETED, Cause.EPHEMERAL)


async def test_a_sleeper_is_moved_to_disk_after_a_while(control: ControlPlane, host: MemoryHost, clock: Clock) -> None:
    info = await made(control)
    await control.sleep.pause(info.id)
    machine = host.world.machines[Incarnation(info.id, 1)]
    await after(control, clock, 59)
    assert machine.power is Power.HOT
    await after(control, clock, 1)
    assert machine.power is Power.COLD
    await after(control, clock, 100)
    assert verbs(host, "cool") == 1


async def test_cooling_that_fails_is_tried_again_after_a_while(
    control: ControlPlane, host: MemoryHost, clock: Clock
) -> None:
    info = await made(control)
    await control.sleep.pause(info.id)
    host.faults = FaultPlan(fail={"cool": SnapshotFailed("full")})
    await after(control, clock, 60)
    await after(control, clock, 1)
    assert verbs(host, "cool") == 1
    host.faults = FaultPlan()
    await after(control, clock, 60)
    assert host.world.machines[Incarnation(info.id, 1)].power is Power.COLD


async def test_a_wake_waits_for_cooling_under_way_and_nothing_is_lost(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control)
    await control.sleep.pause(info.id)
    host.holds["cool"] = asyncio.Event()
    cooling = asyncio.create_task(control.sleep.cool_if_free(info.id))
    while not verbs(host, "cool"):
        await asyncio.sleep(0.001)
    caller = asyncio.create_task(control.sandboxes.guest(info.id))
    await asyncio.sleep(0.01)
    host.holds.pop("cool").set()
    assert await cooling
    await (await caller).ping()
    assert (await control.sandboxes.get(info.id)).incarnation == 2


async def test_checkpoints_are_a_ring(control: ControlPlane, host: MemoryHost, clock: Clock) -> None:
    info = await made(control, checkpoint_every_s=10, checkpoints_kept=3, idle_timeout_s=None)
    await control.snapshots.create(info.id, "mine")
    await after(control, clock, 0)
    taken: list[str] = []
    for _ in range(5):
        async with control.sandboxes.use(info.id):
            pass
        await after(control, clock, 10)
        taken = [item.id for item in (await control.snapshots.list(automatic=True)).items]
    assert len(taken) == 3
    assert verbs(host, "snapshot") == 6
    assert len(host.world.snapshots) == 4
    back = await control.snapshots.rollback(info.id, taken[-1])
    assert back.state is State.RUNNING
    await control.sandboxes.delete(info.id)
    assert [item.name for item in (await control.snapshots.list()).items] == ["mine"]


async def test_no_checkpoint_is_taken_of_what_did_nothing_since_the_last(
    control: ControlPlane, host: MemoryHost, clock: Clock
) -> None:
    info = await made(control, checkpoint_every_s=10, idle_timeout_s=None)
    await after(control, clock, 0)
    clock.now += 1
    async with control.sandboxes.use(info.id):
        pass
    for _ in range(5):
        await after(control, clock, 10)
    assert verbs(host, "snapshot") == 1


async def test_no_checkpoint_is_taken_of_a_sleeper(control: ControlPlane, host: MemoryHost, clock: Clock) -> None:
    info = await made(control, checkpoint_every_s=10)
    await after(control, clock, 0)
    await control.sleep.pause(info.id)
    await after(control, clock, 20)
    assert verbs(host, "snapshot") == 0
