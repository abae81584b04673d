"""What a start of the daemon makes of what it finds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forkyard.control.plane import ControlPlane
from forkyard.errors import HostFailure
from forkyard.guest.fake import FakeGuest
from forkyard.hosts.base import CreateSpec, Incarnation
from forkyard.hosts.memory import MemoryHost, MemoryWorld
from forkyard.lifecycle import Cause, State
from forkyard.models import SandboxCreate, Shape
from forkyard.store.records import IdempotencyClaim, NewSandbox
from forkyard.store.sql import Store
from forkyard.vmm.base import ExitKind, FaultPlan

pytestmark = pytest.mark.anyio

ID = "s123456789abcdef"
MACHINE = Incarnation(ID, 1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(tmp_path / "forkyard.db")
    yield store
    await store.close()


async def record_in(store: Store, state: State) -> None:
    await store.add_sandbox(NewSandbox(ID, Shape()), IdempotencyClaim("key", "retry", "hash"))
    way = {
        State.CREATING: [],
        State.RUNNING: [State.RUNNING],
        State.DELETING: [State.RUNNING, State.DELETING],
        State.DELETED: [State.RUNNING, State.DELETING, State.DELETED],
        State.FAILED: [State.RUNNING, State.FAILED],
    }
    at = State.CREATING
    for to in way[state]:
        assert await store.transition(ID, 1, at, to, Cause.VM_CRASHED if to is State.FAILED else Cause.REQUESTED)
        at = to


async def world_with(machine: str) -> MemoryWorld:
    host = MemoryHost(lambda incarnation, spec: FakeGuest())
    if machine != "none":
        await host.create(MACHINE, CreateSpec(Shape()))
    if machine == "dead":
        host.end(MACHINE, ExitKind.CRASHED, "gone")
    return host.world


async def restarted(store: Store, world: MemoryWorld, faults: FaultPlan | None = None) -> ControlPlane:
    control = ControlPlane(store, MemoryHost(lambda incarnation, spec: FakeGuest(), world, faults))
    await control.start()
    return control


@pytest.mark.parametrize(
    ("state", "machine", "rebooted", "expected", "cause", "kept"),
    [
        (State.RUNNING, "alive", False, State.RUNNING, Cause.REQUESTED, True),
        (State.RUNNING, "dead", False, State.FAILED, Cause.VM_CRASHED, True),
        (State.RUNNING, "dead", True, State.FAILED, Cause.HOST_RESTARTED, True),
        (State.RUNNING, "none", False, State.FAILED, Cause.DAEMON_RESTARTED, False),
        (State.RUNNING, "none", True, State.FAILED, Cause.HOST_RESTARTED, False),
        (State.CREATING, "alive", False, State.FAILED, Cause.DAEMON_RESTARTED, False),
        (State.CREATING, "dead", False, State.FAILED, Cause.DAEMON_RESTARTED, False),
        (State.CREATING, "none", False, State.FAILED, Cause.DAEMON_RESTARTED, False),
        (State.DELETING, "alive", False, State.DELETED, Cause.DELETED_BY_USER, False),
        (State.DELETING, "dead", False, State.DELETED, Cause.DELETED_BY_USER, False),
        (State.DELETING, "none", False, State.DELETED, Cause.DELETED_BY_USER, False),
        (State.FAILED, "alive", False, State.FAILED, Cause.VM_CRASHED, False),
        (State.FAILED, "dead", False, State.FAILED, Cause.VM_CRASHED, True),
        (State.FAILED, "none", False, State.FAILED, Cause.VM_CRASHED, False),
        (State.DELETED, "alive", False, State.DELETED, Cause.REQUESTED, False),
        (State.DELETED, "dead", False, State.DELETED, Cause.REQUESTED, False),
    ],
)
async def test_a_restart_brings_record_and_machine_in_step(
    store: Store, state: State, machine: str, rebooted: bool, expected: State, cause: Cause, kept: bool
) -> None:
    await record_in(store, state)
    world = await world_with(machine)
    world.rebooted = rebooted
    control = await restarted(store, world)
    info = await control.sandboxes.get(ID)
    assert (info.state, info.cause) == (expected, cause)
    assert set(world.machines) == ({MACHINE} if kept else set())
    if expected is State.FAILED and state is not State.FAILED:
        assert info.cause_detail
    await control.stop()


@pytest.mark.parametrize("machine", ["alive", "dead"])
async def test_a_machine_that_no_sandbox_wants_is_destroyed(store: Store, machine: str) -> None:
    world = await world_with(machine)
    control = await restarted(store, world)
    assert world.machines == {}
    await control.stop()


async def test_a_machine_of_another_incarnation_is_destroyed(store: Store) -> None:
    await record_in(store, State.RUNNING)
    world = await world_with("alive")
    world.machines[Incarnation(ID, 2)] = world.machines[MACHINE]
    control = await restarted(store, world)
    assert set(world.machines) == {MACHINE}
    await control.stop()


async def test_an_adopted_sandbox_goes_on_with_the_same_guest(store: Store) -> None:
    world = MemoryWorld()
    first = await restarted(store, world)
    info = await first.sandboxes.create(SandboxCreate())
    guest = await first.sandboxes.guest(info.id)
    await first.stop()
    second = await restarted(store, world)
    assert await second.sandboxes.guest(info.id) is guest
    kinds = [event.kind for event in (await second.events.page(sandbox_id=info.id)).items]
    assert kinds == ["sandbox.creating", "sandbox.running", "sandbox.adopted"]
    await second.stop()


async def test_a_create_cut_off_by_a_restart_frees_its_idempotency_key(store: Store) -> None:
    await record_in(store, State.CREATING)
    control = await restarted(store, MemoryWorld())
    claim = IdempotencyClaim("key", "retry", "hash")
    assert (await store.add_sandbox(NewSandbox("s999999999999999", Shape()), claim)).id == "s999999999999999"
    await control.stop()


async def test_leftovers_that_cannot_be_removed_do_not_keep_the_daemon_from_starting(store: Store) -> None:
    await record_in(store, State.DELETING)
    world = await world_with("alive")
    control = await restarted(store, world, FaultPlan(fail={"destroy": HostFailure("stuck")}))
    assert (await control.sandboxes.get(ID)).state is State.DELETING
    await control.stop()
    control = await restarted(store, world)
    assert (await control.sandboxes.get(ID)).state is State.DELETED
    await control.stop()


async def test_a_normal_stop_leaves_machines_running_and_a_destroying_one_none(store: Store) -> None:
    world = MemoryWorld()
    control = await restarted(store, world)
    info = await control.sandboxes.create(SandboxCreate())
    await control.stop()
    assert len(world.machines) == 1
    control = await restarted(store, world)
    await control.stop(destroy=True)
    assert world.machines == {}
    record = await store.sandbox(info.id)
    assert record is not None
    assert record.state is State.DELETED


async def test_starts_and_stops_are_events(store: Store) -> None:
    control = await restarted(store, MemoryWorld())
    await control.stop()
    assert [event.kind for event in await store.list_events()] == ["daemon.started", "daemon.stopped"]
