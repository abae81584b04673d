"""The verbs, on a host that is only memory: what callers at once, failures and late ends mean."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forkyard.control.ground import new_id
from forkyard.control.keys import Keys
from forkyard.control.plane import ControlPlane
from forkyard.errors import (
    Conflict,
    ForkyardError,
    GuestUnreachable,
    HostFailure,
    IdempotencyConflict,
    InternalError,
    InvalidRequest,
    NoCapacity,
    NotFound,
    SandboxEnded,
    SandboxNotFound,
    StateConflict,
    Unauthenticated,
    VmCrashed,
    VmStartFailed,
)
from forkyard.hosts.base import Created, CreateSpec, Incarnation
from forkyard.hosts.memory import MemoryHost
from forkyard.lifecycle import Cause, State
from forkyard.models import SandboxCreate, SandboxInfo
from forkyard.store.sql import Store
from forkyard.vmm.base import ExitKind, FaultPlan

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def in_state(control: ControlPlane, state: State) -> SandboxInfo:
    """The first sandbox to reach this state."""
    async with asyncio.timeout(5), control.events.follow(after=0) as events:
        async for event in events:
            if event.kind == f"sandbox.{state}":
                assert event.sandbox_id is not None
                return await control.sandboxes.get(event.sandbox_id)
    raise AssertionError("the events ended")


# ── create ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_created_sandbox_runs(control: ControlPlane, host: MemoryHost) -> None:
    info = await control.sandboxes.create(SandboxCreate(name="box", memory_mib=1024, labels={"a": "b"}))
    assert (info.state, info.cause, info.name, info.labels) == (State.RUNNING, Cause.READY, "box", {"a": "b"})
    assert info.template == "memory-1-1024-8"
    assert await control.sandboxes.guest(info.id) is host.guest(Incarnation(info.id, 1))


def test_ids_are_legal_host_names_and_do_not_repeat() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(one) == 20 and one[0].isalpha() and one.isalnum() and one == one.lower() for one in ids)


@pytest.mark.parametrize("error", [VmStartFailed("no room"), NoCapacity("all in use"), HostFailure("broken")])
async def test_a_failed_create_raises_its_error_and_leaves_nothing(
    control: ControlPlane, host: MemoryHost, error: ForkyardError
) -> None:
    host.faults = FaultPlan(fail={"create": error})
    with pytest.raises(type(error)) as raised:
        await control.sandboxes.create(SandboxCreate())
    assert raised.value is error
    [info] = (await control.sandboxes.list(ended=True)).items
    assert (info.state, info.cause, info.cause_detail) == (State.FAILED, Cause.CREATE_FAILED, error.message)
    assert host.world.machines == {}


async def test_an_unexpected_error_in_create_is_internal_and_says_nothing_of_the_inside(
    control: ControlPlane, host: MemoryHost
) -> None:
    host.faults = FaultPlan(fail={"create": ZeroDivisionError("secret")})
    with pytest.raises(InternalError) as raised:
        await control.sandboxes.create(SandboxCreate())
    [info] = (await control.sandboxes.list(ended=True)).items
    assert "secret" not in raised.value.message + str(info.cause_detail)
    assert info.state is State.FAILED


async def test_a_caller_that_goes_away_does_not_stop_the_create(control: ControlPlane, host: MemoryHost) -> None:
    host.hold_creates = asyncio.Event()
    caller = asyncio.create_task(control.sandboxes.create(SandboxCreate()))
    await in_state(control, State.CREATING)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    host.hold_creates.set()
    assert (await in_state(control, State.RUNNING)).state is State.RUNNING


async def test_a_machine_that_ends_between_its_answer_and_its_record_fails_the_create(
    control: ControlPlane, host: MemoryHost, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = host.create

    async def make_and_crash(incarnation: Incarnation, spec: CreateSpec) -> Created:
        created = await make(incarnation, spec)
        host.end(incarnation, ExitKind.PANIC, "the kernel panicked")
        await in_state(control, State.FAILED)
        return created

    monkeypatch.setattr(host, "create", make_and_crash)
    with pytest.raises(VmCrashed, match="the kernel panicked"):
        await control.sandboxes.create(SandboxCreate())
    [info] = (await control.sandboxes.list(ended=True)).items
    assert (info.state, info.cause) == (State.FAILED, Cause.GUEST_PANIC)
    assert host.world.machines == {}


# ── idempotency ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_retry_with_the_same_key_gets_the_same_sandbox(control: ControlPlane) -> None:
    first = await control.sandboxes.create(SandboxCreate(name="a"), api_key_id="k", idempotency_key="retry")
    again = await control.sandboxes.create(SandboxCreate(name="a"), api_key_id="k", idempotency_key="retry")
    assert again == first
    assert len((await control.sandboxes.list()).items) == 1


async def test_the_order_of_labels_does_not_make_a_request_different(control: ControlPlane) -> None:
    first = await control.sandboxes.create(SandboxCreate(labels={"a": "1", "b": "2"}), idempotency_key="retry")
    again = await control.sandboxes.create(SandboxCreate(labels={"b": "2", "a": "1"}), idempotency_key="retry")
    assert again.id == first.id


async def test_concurrent_retries_make_one_sandbox(control: ControlPlane, host: MemoryHost) -> None:
    host.hold_creates = asyncio.Event()
    callers = [
        asyncio.create_task(control.sandboxes.create(SandboxCreate(), idempotency_key="retry")) for _ in range(10)
    ]
    await in_state(control, State.CREATING)
    assert not any(caller.done() for caller in callers)
    host.hold_creates.set()
    infos = await asyncio.gather(*callers)
    assert len({info.id for info in infos}) == 1
    assert len(host.world.machines) == 1


async def test_concurrent_retries_share_a_failure_and_the_next_one_tries_again(
    control: ControlPlane, host: MemoryHost
) -> None:
    host.faults = FaultPlan(fail={"create": NoCapacity("full")})
    calls = (control.sandboxes.create(SandboxCreate(), idempotency_key="retry") for _ in range(5))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, NoCapacity) for outcome in outcomes)
    assert len((await control.sandboxes.list(ended=True)).items) == 1
    host.faults = FaultPlan()
    info = await control.sandboxes.create(SandboxCreate(), idempotency_key="retry")
    assert info.state is State.RUNNING


@pytest.mark.parametrize("under_way", [True, False])
async def test_the_same_key_with_another_request_is_a_conflict(
    control: ControlPlane, host: MemoryHost, under_way: bool
) -> None:
    host.hold_creates = asyncio.Event()
    first = asyncio.create_task(control.sandboxes.create(SandboxCreate(name="a"), idempotency_key="retry"))
    await in_state(control, State.CREATING)
    if not under_way:
        host.hold_creates.set()
        await first
    with pytest.raises(IdempotencyConflict):
        await control.sandboxes.create(SandboxCreate(name="b"), idempotency_key="retry")
    host.hold_creates.set()
    await first


async def test_a_caller_that_goes_away_and_retries_gets_what_it_began(control: ControlPlane, host: MemoryHost) -> None:
    host.hold_creates = asyncio.Event()
    caller = asyncio.create_task(control.sandboxes.create(SandboxCreate(), idempotency_key="retry"))
    begun = await in_state(control, State.CREATING)
    caller.cancel()
    await asyncio.wait({caller})
    retry = asyncio.create_task(control.sandboxes.create(SandboxCreate(), idempotency_key="retry"))
    host.hold_creates.set()
    assert (await retry).id == begun.id


# ── delete ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_deleting_removes_the_machine_and_keeps_the_record(control: ControlPlane, host: MemoryHost) -> None:
    info = await control.sandboxes.create(SandboxCreate())
    await control.sandboxes.delete(info.id)
    await control.sandboxes.delete(info.id)
    gone = await control.sandboxes.get(info.id)
    assert (gone.state, gone.cause) == (State.DELETED, Cause.DELETED_BY_USER)
    assert gone.ended_at is not None
    assert host.world.machines == {}


async def test_concurrent_deletes_are_one(control: ControlPlane) -> None:
    info = await control.sandboxes.create(SandboxCreate())
    await asyncio.gather(*(control.sandboxes.delete(info.id) for _ in range(10)))
    kinds = [event.kind for event in (await control.events.page(sandbox_id=info.id)).items]
    assert kinds == ["sandbox.creating", "sandbox.running", "sandbox.deleting", "sandbox.deleted"]


async def test_deleting_what_is_being_created_ends_the_create(control: ControlPlane, host: MemoryHost) -> None:
    host.hold_creates = asyncio.Event()
    caller = asyncio.create_task(control.sandboxes.create(SandboxCreate(), idempotency_key="retry"))
    begun = await in_state(control, State.CREATING)
    await control.sandboxes.delete(begun.id)
    with pytest.raises(SandboxEnded, match="was deleted before this was done"):
        await caller
    assert (await control.sandboxes.get(begun.id)).state is State.DELETED
    assert host.world.machines == {}
    host.hold_creates = None
    again = await control.sandboxes.create(SandboxCreate(), idempotency_key="retry")
    assert again.id != begun.id


async def test_a_delete_that_failed_can_be_tried_again(control: ControlPlane, host: MemoryHost) -> None:
    info = await control.sandboxes.create(SandboxCreate())
    host.faults = FaultPlan(fail={"destroy": HostFailure("the process does not go away")})
    with pytest.raises(HostFailure):
        await control.sandboxes.delete(info.id)
    assert (await control.sandboxes.get(info.id)).state is State.DELETING
    host.faults = FaultPlan()
    await control.sandboxes.delete(info.id)
    assert (await control.sandboxes.get(info.id)).state is State.DELETED


async def test_a_caller_that_goes_away_does_not_stop_the_delete(control: ControlPlane, host: MemoryHost) -> None:
    info = await control.sandboxes.create(SandboxCreate())
    host.faults = FaultPlan(delay_s={"destroy": 0.05})
    caller = asyncio.create_task(control.sandboxes.delete(info.id))
    await in_state(control, State.DELETING)
    caller.cancel()
    assert (await in_state(control, State.DELETED)).id == info.id


async def test_creates_and_deletes_at_once_leave_nothing(control: ControlPlane, host: MemoryHost) -> None:
    async def one(number: int) -> None:
        begun = asyncio.create_task(control.sandboxes.create(SandboxCreate(name=str(number))))
        await asyncio.sleep(0.001 * (number % 7))
        for info in (await control.sandboxes.list(limit=1000)).items:
            if info.name == str(number):
                await control.sandboxes.delete(info.id)
        await asyncio.wait({begun})
        if begun.exception() is None:
            await control.sandboxes.delete(begun.result().id)
        else:
            assert isinstance(begun.exception(), SandboxEnded)

    await asyncio.gather(*(one(number) for number in range(20)))
    assert host.world.machines == {}
    assert (await control.sandboxes.list()).items == []


# ── guests, logs, ends ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ask", ["get", "delete", "guest", "logs", "usage"])
async def test_an_unknown_id_is_not_found(control: ControlPlane, ask: str) -> None:
    with pytest.raises(SandboxNotFound, match="nosuchsandbox"):
        await getattr(control.sandboxes, ask)("nosuchsandbox")


async def test_the_guest_of_a_sandbox_that_is_not_running_says_why(control: ControlPlane, host: MemoryHost) -> None:
    host.hold_creates = asyncio.Event()
    caller = asyncio.create_task(control.sandboxes.create(SandboxCreate()))
    begun = await in_state(control, State.CREATING)
    with pytest.raises(StateConflict, match="is creating: it is not running"):
        await control.sandboxes.guest(begun.id)
    host.hold_creates.set()
    await caller
    await control.sandboxes.delete(begun.id)
    with pytest.raises(SandboxEnded, match="deleted_by_user") as raised:
        await control.sandboxes.guest(begun.id)
    assert raised.value.details["cause"] is Cause.DELETED_BY_USER


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (ExitKind.PANIC, Cause.GUEST_PANIC),
        (ExitKind.CRASHED, Cause.VM_CRASHED),
        (ExitKind.KILLED, Cause.VM_CRASHED),
    ],
)
async def test_a_machine_that_ends_by_itself_fails_its_sandbox_and_keeps_its_logs(
    control: ControlPlane, host: MemoryHost, kind: ExitKind, cause: Cause
) -> None:
    info = await control.sandboxes.create(SandboxCreate())
    host.end(Incarnation(info.id, 1), kind, "so it went")
    failed = await in_state(control, State.FAILED)
    assert (failed.cause, failed.cause_detail) == (cause, "so it went")
    with pytest.raises(SandboxEnded, match="so it went"):
        await control.sandboxes.guest(info.id)
    assert "console" in (await control.sandboxes.logs(info.id)).console
    await control.sandboxes.delete(info.id)
    with pytest.raises(SandboxEnded):
        await control.sandboxes.logs(info.id)


async def test_a_machine_whose_end_is_not_recorded_yet_is_unreachable(control: ControlPlane, host: MemoryHost) -> None:
    info = await control.sandboxes.create(SandboxCreate())
    host.world.machines.clear()
    for ask in (control.sandboxes.guest, control.sandboxes.usage):
        with pytest.raises(GuestUnreachable):
            await ask(info.id)


async def test_the_end_of_an_older_incarnation_does_not_touch_the_sandbox(
    control: ControlPlane, host: MemoryHost
) -> None:
    first = await control.sandboxes.create(SandboxCreate())
    second = await control.sandboxes.create(SandboxCreate())
    stale = Incarnation(first.id, 7)
    host.world.machines[stale] = host.world.machines[Incarnation(first.id, 1)]
    host.end(stale, ExitKind.CRASHED, "stale")
    del host.world.machines[stale]
    host.world.machines[Incarnation(first.id, 1)].exit = None
    host.end(Incarnation(second.id, 1), ExitKind.CRASHED, "real")
    assert (await in_state(control, State.FAILED)).id == second.id
    assert (await control.sandboxes.get(first.id)).state is State.RUNNING


async def test_the_logs_of_a_create_that_failed_are_empty(control: ControlPlane, host: MemoryHost) -> None:
    host.faults = FaultPlan(fail={"create": VmStartFailed("no")})
    with pytest.raises(VmStartFailed):
        await control.sandboxes.create(SandboxCreate())
    [info] = (await control.sandboxes.list(ended=True)).items
    assert (await control.sandboxes.logs(info.id)).console == ""


# ── list ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_pages_of_a_list_do_not_shift_while_sandboxes_come_and_go(control: ControlPlane) -> None:
    made = [(await control.sandboxes.create(SandboxCreate())).id for _ in range(7)]
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = await control.sandboxes.list(limit=3, cursor=cursor)
        seen += [info.id for info in page.items]
        cursor = page.next_cursor
        await control.sandboxes.create(SandboxCreate())
        if cursor is None:
            break
    assert seen == made[::-1]


async def test_a_last_page_that_is_full_has_no_cursor(control: ControlPlane) -> None:
    for _ in range(2):
        await control.sandboxes.create(SandboxCreate())
    assert (await control.sandboxes.list(limit=2)).next_cursor is None


@pytest.mark.parametrize("cursor", ["", "x", "%%%", "bm8", "9" * 200, "OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk6YQ"])
async def test_a_cursor_that_is_none_is_refused(control: ControlPlane, cursor: str) -> None:
    with pytest.raises(InvalidRequest, match="no cursor"):
        await control.sandboxes.list(cursor=cursor)


async def test_ended_sandboxes_are_listed_when_asked_for(control: ControlPlane) -> None:
    gone = await control.sandboxes.create(SandboxCreate())
    await control.sandboxes.delete(gone.id)
    here = await control.sandboxes.create(SandboxCreate())
    ids: Callable[[Any], list[str]] = lambda page: [info.id for info in page.items]  # noqa: E731
    assert ids(await control.sandboxes.list()) == [here.id]
    assert ids(await control.sandboxes.list(ended=True)) == [here.id, gone.id]
    assert ids(await control.sandboxes.list(states=[State.DELETED])) == [gone.id]


# ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_follower_sees_every_event_in_order_however_slow_it_is(control: ControlPlane) -> None:
    async with control.events.follow() as events:
        for number in range(250):
            await control.events.publish("test.tick", data={"n": number})
        seen = [(await asyncio.wait_for(anext(events), 5)).data["n"] for _ in range(250)]
    assert seen == list(range(250))


async def test_a_follower_of_one_sandbox_is_woken_by_its_next_event(control: ControlPlane) -> None:
    info = await control.sandboxes.create(SandboxCreate())
    async with control.events.follow(sandbox_id=info.id) as events:
        waiting = asyncio.ensure_future(anext(events))
        await control.events.publish("test.other")
        await control.sandboxes.delete(info.id)
        assert (await asyncio.wait_for(waiting, 5)).kind == "sandbox.deleting"


async def test_followers_are_bounded(control: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkyard.control.events.MAX_FOLLOWERS", 1)
    async with control.events.follow():
        with pytest.raises(NoCapacity):
            async with control.events.follow():
                pass
    async with control.events.follow():
        pass


async def test_pages_of_events_continue_after_the_last_id(control: ControlPlane) -> None:
    for number in range(5):
        await control.events.publish("test.tick", data={"n": number})
    seen: list[int] = []
    after = 0
    while True:
        page = await control.events.page(after=after, limit=2)
        seen += [event.id for event in page.items]
        if page.next_cursor is None:
            break
        after = int(page.next_cursor)
    assert seen == sorted(set(seen))
    assert len(seen) == 6  # the start of the daemon is the first


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_key_is_known_by_its_hash_alone(store: Store, tmp_path: Path) -> None:
    keys = Keys(store)
    created = await keys.create("ci")
    assert await keys.authenticate(created.key) == created.id
    for file in tmp_path.iterdir():
        assert created.key.encode() not in file.read_bytes()


@pytest.mark.parametrize("wrong", [None, "", "fy_wrong", "\udcff"])
async def test_a_wrong_key_is_refused(store: Store, wrong: str | None) -> None:
    with pytest.raises(Unauthenticated):
        await Keys(store).authenticate(wrong)


async def test_a_deleted_key_is_refused_at_once(store: Store) -> None:
    keys = Keys(store)
    created = await keys.create("ci")
    await keys.create("other")
    await keys.authenticate(created.key)
    await keys.delete(created.id)
    with pytest.raises(Unauthenticated):
        await keys.authenticate(created.key)


async def test_the_last_key_and_unknown_keys_cannot_be_deleted(store: Store) -> None:
    keys = Keys(store)
    created = await keys.create("only")
    with pytest.raises(Conflict, match="last API key"):
        await keys.delete(created.id)
    with pytest.raises(NotFound):
        await keys.delete("k-unknown")


async def test_the_key_file_is_private_and_made_once(store: Store, tmp_path: Path) -> None:
    keys, path = Keys(store), tmp_path / "state" / "api-key"
    await keys.ensure_file(path)
    first = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    await keys.authenticate(first.strip())
    await keys.ensure_file(path)
    assert path.read_text() == first
    path.write_text("fy_of_another_database\n")
    await keys.ensure_file(path)
    await keys.authenticate(path.read_text().strip())


async def test_use_of_a_key_is_noted(store: Store) -> None:
    keys = Keys(store)
    created = await keys.create("ci")
    assert (await keys.list())[0].last_used_at is None
    await keys.authenticate(created.key)
    assert (await keys.list())[0].last_used_at is not None
