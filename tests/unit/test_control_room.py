"""Who is let in, and who must go: admission, quotas, eviction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.control.placement import Limits, admit, disk_shortfall_bytes, eviction_order
from forkyard.control.plane import ControlPlane
from forkyard.control.room import MACHINE_BYTES
from forkyard.errors import NoCapacity, QuotaExceeded
from forkyard.hosts.base import Capacity, Incarnation
from forkyard.hosts.memory import MemoryHost, Power
from forkyard.lifecycle import Cause, State
from forkyard.models import SandboxCreate, SandboxFork, SandboxInfo, Shape
from forkyard.settings import Settings
from forkyard.store import sql
from forkyard.store.records import Load, SandboxRecord
from forkyard.store.sql import Store
from forkyard.vmm.base import FaultPlan

pytestmark = pytest.mark.anyio

MIB, GIB = 2**20, 2**30
PLENTY = Capacity(memory_mib=10**6, disk_free_bytes=2**50)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def limits() -> Limits:
    return Limits()


@pytest.fixture
async def control(store: Store, host: MemoryHost, limits: Limits) -> AsyncIterator[ControlPlane]:
    control = ControlPlane(store, host, limits)
    await control.start()
    yield control
    host.faults = FaultPlan()
    await control.stop(destroy=True)
    assert host.world.machines == {}


async def made(control: ControlPlane, key: str = "k1", **fields: Any) -> SandboxInfo:
    return await control.sandboxes.create(SandboxCreate(**fields), api_key_id=key)


async def asleep(control: ControlPlane, **fields: Any) -> SandboxInfo:
    info = await made(control, **fields)
    return await control.sleep.pause(info.id)


def sized(host: MemoryHost, **sizes: int) -> None:
    for incarnation, machine in host.world.machines.items():
        machine.stored_bytes = sizes.get(incarnation.sandbox_id, 0)


# ── placement, pure ──────────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 10**6), st.integers(0, 10**5), st.integers(128, 16384), st.integers(1, 10**6))
def test_no_more_memory_is_given_than_the_host_has_times_the_ratio(
    used: int, held: int, wanted: int, total: int
) -> None:
    limits = Limits(memory_overcommit=2.0)
    try:
        admit(limits, Capacity(total, 0), Load(used, 0, 0, 0, 0.0), wanted, held_mib=held, creates=True)
    except NoCapacity as error:
        assert used + held + wanted > 2 * total
        assert error.details["retry_after_s"] > 0
    else:
        assert used + held + wanted <= 2 * total


def test_a_quota_of_creates_says_when_to_ask_again() -> None:
    limits = Limits(quota_creates_per_minute=3)
    load = Load(0, 0, 0, key_creates=3, key_oldest_create_s=20.0)
    with pytest.raises(QuotaExceeded) as raised:
        admit(limits, PLENTY, load, 512, held_mib=0, creates=True)
    assert raised.value.details["retry_after_s"] == 40.0
    admit(limits, PLENTY, load, 512, held_mib=0, creates=False)


@pytest.mark.parametrize(
    ("budget", "reserve", "free", "stored", "need", "missing"),
    [
        (None, 10, 100, 0, 50, 0),
        (None, 10, 100, 0, 90, 0),
        (None, 10, 100, 0, 91, 1),
        (200, 0, 1000, 150, 50, 0),
        (200, 0, 1000, 150, 51, 1),
        (200, 10, 100, 150, 95, 45),
        (200, 90, 100, 150, 20, 10),
    ],
)
def test_what_is_missing_on_disk(
    budget: int | None, reserve: int, free: int, stored: int, need: int, missing: int
) -> None:
    limits = Limits(disk_budget_bytes=budget, disk_reserve_bytes=reserve)
    assert disk_shortfall_bytes(limits, Capacity(0, free), stored, need) == missing


def _record(name: str, **fields: Any) -> SandboxRecord:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    plain = SandboxRecord(
        id=name,
        name=None,
        state=State.PAUSED,
        cause=Cause.IDLE,
        cause_detail=None,
        incarnation=1,
        shape=Shape(),
        labels={},
        env={},
        template=None,
        key_id=None,
        parent_id=None,
        snapshot_id=None,
        persistence="sticky",
        priority=5,
        idle_timeout_s=None,
        ttl_s=None,
        checkpoint_every_s=None,
        checkpoints_kept=5,
        expires_at=None,
        last_active_at=now,
        created_at=now,
        updated_at=now,
        ended_at=None,
    )
    return replace(plain, **fields)


def test_the_lowest_priority_goes_first_then_the_least_recently_active() -> None:
    later = datetime(2026, 1, 2, tzinfo=UTC)
    records = [
        _record("used-lately", last_active_at=later),
        _record("used-before"),
        _record("important", priority=9),
        _record("unimportant", priority=0, last_active_at=later),
        _record("never-used", last_active_at=None, created_at=datetime(2025, 1, 1, tzinfo=UTC)),
        _record("persistent", persistence="persistent", priority=0),
        _record("ephemeral", persistence="ephemeral", priority=0),
        _record("running", state=State.RUNNING, priority=0),
        _record("stopped", state=State.STOPPED, priority=1),
        _record("failed", state=State.FAILED, priority=0),
    ]
    order = [record.id for record in eviction_order(records)]
    assert order == ["unimportant", "stopped", "never-used", "used-before", "used-lately", "important"]


def test_limits_come_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKYARD_DISK_BUDGET_GIB", "1.5")
    monkeypatch.setenv("FORKYARD_QUOTA_RUNNING", "3")
    limits = Limits.of(Settings())
    assert (limits.disk_budget_bytes, limits.quota_running) == (3 * GIB // 2, 3)
    assert (limits.memory_overcommit, limits.disk_reserve_bytes) == (4.0, GIB)


# ── memory and quotas ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("limits", [Limits(memory_overcommit=2.0)])
async def test_a_machine_that_would_overcommit_the_host_is_refused(control: ControlPlane, host: MemoryHost) -> None:
    host.room = Capacity(512, 2**50)
    first, _ = await made(control), await made(control)
    with pytest.raises(NoCapacity, match="limit of 1024 MiB"):
        await made(control)
    assert len((await control.sandboxes.list(ended=True)).items) == 2, "a refused create leaves no record"
    await control.sandboxes.delete(first.id)
    await made(control)


@pytest.mark.parametrize("limits", [Limits(memory_overcommit=2.0)])
async def test_creates_at_once_do_not_share_the_last_place(control: ControlPlane, host: MemoryHost) -> None:
    host.room = Capacity(512, 2**50)
    outcomes = await asyncio.gather(*(made(control) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(outcome, SandboxInfo) for outcome in outcomes) == 2
    assert sum(isinstance(outcome, NoCapacity) for outcome in outcomes) == 6


@pytest.mark.parametrize("limits", [Limits(memory_overcommit=1.0)])
async def test_when_memory_is_short_sleepers_are_moved_to_disk(control: ControlPlane, host: MemoryHost) -> None:
    host.room = Capacity(1024, 2**50)
    older, newer = await asleep(control), await asleep(control)
    third = await made(control)
    machines = host.world.machines
    assert machines[Incarnation(older.id, 1)].power is Power.COLD
    assert machines[Incarnation(newer.id, 1)].power is Power.HOT
    await control.sandboxes.guest(newer.id)  # its own memory is not counted against it
    with pytest.raises(NoCapacity):
        await control.sandboxes.guest(older.id)
    await control.sleep.pause(third.id)
    await control.sandboxes.guest(older.id)
    assert machines[Incarnation(third.id, 1)].power is Power.COLD


@pytest.mark.parametrize("limits", [Limits(memory_overcommit=1.0)])
async def test_a_stopped_one_is_started_only_if_there_is_room(control: ControlPlane, host: MemoryHost) -> None:
    host.room = Capacity(1024, 2**50)
    info = await made(control)
    await control.power.stop(info.id)
    others = [await made(control), await made(control)]
    with pytest.raises(NoCapacity):
        await control.power.start(info.id)
    assert (await control.sandboxes.get(info.id)).state is State.STOPPED
    await control.sandboxes.delete(others[0].id)
    assert (await control.power.start(info.id)).state is State.RUNNING


@pytest.mark.parametrize("limits", [Limits(memory_overcommit=1.0)])
async def test_of_a_fork_as_many_children_live_as_there_is_room_for(control: ControlPlane, host: MemoryHost) -> None:
    host.room = Capacity(2048, 2**50)
    parent, sleeper = await made(control), await asleep(control)
    result = await control.forks.fork(parent.id, SandboxFork(count=5))
    problems = [child.problem["code"] if child.problem else None for child in result.children]
    assert problems == [None, None, None, "no_capacity", "no_capacity"]
    assert host.world.machines[Incarnation(sleeper.id, 1)].power is Power.COLD
    with pytest.raises(NoCapacity):
        await control.forks.fork(parent.id, SandboxFork(count=2))


@pytest.mark.parametrize("limits", [Limits(quota_running=2)])
async def test_a_key_has_a_quota_of_running_sandboxes(control: ControlPlane) -> None:
    first, second = await made(control), await made(control)
    with pytest.raises(QuotaExceeded, match="2 are its quota"):
        await made(control)
    await made(control, key="k2")
    await control.sleep.pause(first.id)
    await made(control)
    with pytest.raises(QuotaExceeded):
        await control.sandboxes.guest(first.id)
    await control.power.stop(second.id)
    await control.sandboxes.guest(first.id)


@pytest.mark.parametrize("limits", [Limits(quota_memory_mib=1536)])
async def test_a_key_has_a_quota_of_memory(control: ControlPlane) -> None:
    await made(control, memory_mib=1024)
    with pytest.raises(QuotaExceeded, match="1536 MiB"):
        await made(control, memory_mib=1024)
    await made(control, memory_mib=512)


@pytest.mark.parametrize("limits", [Limits(quota_creates_per_minute=3)])
async def test_a_key_has_a_quota_of_creates_per_minute_and_forks_count(
    control: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = await made(control)
    result = await control.forks.fork(parent.id, SandboxFork(count=3), api_key_id="k1")
    assert [child.problem["code"] if child.problem else None for child in result.children] == [
        None,
        None,
        "quota_exceeded",
    ]
    with pytest.raises(QuotaExceeded) as raised:
        await made(control)
    assert 50 < raised.value.details["retry_after_s"] <= 60
    later = sql._now() + timedelta(seconds=61)
    monkeypatch.setattr(sql, "_now", lambda: later)
    await made(control)


@pytest.mark.parametrize("limits", [Limits(quota_creates_per_minute=1)])
async def test_a_retry_of_a_create_costs_no_quota(control: ControlPlane) -> None:
    request = SandboxCreate()
    first = await control.sandboxes.create(request, api_key_id="k1", idempotency_key="retry")
    again = await control.sandboxes.create(request, api_key_id="k1", idempotency_key="retry")
    assert again.id == first.id


# ── disk ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("limits", [Limits(disk_budget_bytes=4 * GIB)])
async def test_the_least_important_sleeper_is_evicted_with_an_event(control: ControlPlane, host: MemoryHost) -> None:
    keep = await asleep(control, priority=7)
    victim = await asleep(control, priority=1)
    never = await asleep(control, priority=0, persistence="persistent")
    awake = await made(control, priority=0)
    sized(host, **{keep.id: GIB, victim.id: GIB, never.id: GIB, awake.id: GIB})
    await made(control)
    gone = await control.sandboxes.get(victim.id)
    assert (gone.state, gone.cause) == (State.DELETED, Cause.EVICTED)
    assert "to make room" in (gone.cause_detail or "")
    kinds = [event.kind for event in (await control.events.page(sandbox_id=victim.id)).items]
    assert kinds[-3:] == ["sandbox.deleting", "sandbox.deleted", "sandbox.evicted"]
    for other in (keep, never, awake):
        assert (await control.sandboxes.get(other.id)).state in (State.PAUSED, State.RUNNING)


@pytest.mark.parametrize("limits", [Limits(disk_budget_bytes=4 * GIB)])
async def test_no_more_is_evicted_than_needed(control: ControlPlane, host: MemoryHost) -> None:
    sleepers = [await asleep(control) for _ in range(4)]
    sized(host, **{info.id: GIB for info in sleepers})
    await made(control)
    states = [(await control.sandboxes.get(info.id)).state for info in sleepers]
    assert states == [State.DELETED, State.PAUSED, State.PAUSED, State.PAUSED]


@pytest.mark.parametrize("limits", [Limits(disk_budget_bytes=2 * GIB)])
async def test_what_does_not_fit_without_evicting_the_persistent_is_refused(
    control: ControlPlane, host: MemoryHost
) -> None:
    kept = await asleep(control, persistence="persistent")
    sized(host, **{kept.id: 2 * GIB})
    with pytest.raises(NoCapacity, match="FORKYARD_DISK_BUDGET_GIB"):
        await made(control)
    assert (await control.sandboxes.get(kept.id)).state is State.PAUSED
    assert len(host.world.machines) == 1


@pytest.mark.parametrize("limits", [Limits(disk_reserve_bytes=GIB)])
async def test_the_reserve_of_the_disk_is_kept_free(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control)
    host.room = Capacity(10**6, GIB + MACHINE_BYTES)
    await made(control)
    with pytest.raises(NoCapacity):
        await control.snapshots.create(info.id)
    host.room = Capacity(10**6, GIB)
    with pytest.raises(NoCapacity):
        await made(control)


@pytest.mark.parametrize("limits", [Limits(disk_budget_bytes=2 * GIB)])
async def test_snapshots_count_and_make_room_by_eviction(control: ControlPlane, host: MemoryHost) -> None:
    info = await made(control, persistence="persistent")
    other = await asleep(control)
    sized(host, **{other.id: GIB + 600 * MIB})
    await control.snapshots.create(info.id)
    assert (await control.sandboxes.get(other.id)).cause is Cause.EVICTED


@pytest.mark.parametrize("limits", [Limits(disk_budget_bytes=2 * GIB)])
async def test_a_sleeper_is_not_evicted_to_save_itself(control: ControlPlane, host: MemoryHost) -> None:
    info = await asleep(control)
    sized(host, **{info.id: 2 * GIB})
    assert not await control.sleep.cool_if_free(info.id)
    assert (await control.sandboxes.get(info.id)).state is State.PAUSED


@pytest.mark.parametrize("limits", [Limits(disk_budget_bytes=GIB)])
async def test_a_sandbox_in_use_or_busy_is_not_evicted(control: ControlPlane, host: MemoryHost) -> None:
    busy = await asleep(control)
    sized(host, **{busy.id: GIB})
    async with control.ground.turns.take(busy.id):
        with pytest.raises(NoCapacity):
            await made(control)
    with control.ground.activity.using(busy.id), pytest.raises(NoCapacity):
        await made(control)
    assert (await control.sandboxes.get(busy.id)).state is State.PAUSED
    await made(control)
    assert (await control.sandboxes.get(busy.id)).state is State.DELETED
