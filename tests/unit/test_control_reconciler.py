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
from forkyard.models import Persistence, SandboxCreate, Shape
from forkyard.store.records import IdempotencyClaim, NewSandbox
from forkyard.store.sql import Store
from forkyard.vmm.base import ExitKind, FaultPlan

pytestmark = pytest.mark.anyio

ID = "s123456789abcdefghij"
MACHINE, NEXT = Incarnation(ID, 1), Incarnation(ID, 2)
S = State


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await Store.open(tmp_path / "forkyard.db")
    yield store
    await store.close()


WAY: dict[State, list[State]] = {
    S.CREATING: [],
    S.RUNNING: [S.RUNNING],
    S.PAUSING: [S.RUNNING, S.PAUSING],
    S.PAUSED: [S.RUNNING, S.PAUSING, S.PAUSED],
    S.RESUMING: [S.RUNNING, S.PAUSING, S.PAUSED, S.RESUMING],
    S.STOPPING: [S.RUNNING, S.STOPPING],
    S.STOPPED: [S.RUNNING, S.STOPPING, S.STOPPED],
    S.STARTING: [S.RUNNING, S.STOPPING, S.STOPPED, S.STARTING],
    S.DELETING: [S.RUNNING, S.DELETING],
    S.DELETED: [S.RUNNING, S.DELETING, S.DELETED],
    S.FAILED: [S.RUNNING, S.FAILED],
}


async def record_in(store: Store, state: State, *, persistence: Persistence = "sticky") -> None:
    new = NewSandbox(ID, Shape(), persistence=persistence)
    await store.add_sandbox(new, IdempotencyClaim("key", "retry", "hash"))
    at = State.CREATING
    for to in WAY[state]:
        assert await store.transition(ID, 1, at, to, Cause.VM_CRASHED if to is State.FAILED else Cause.REQUESTED)
        at = to


async def world_with(machine: str, incarnation: Incarnation = MACHINE) -> MemoryWorld:
    host = MemoryHost(lambda incarnation, spec: FakeGuest())
    if machine != "nothing":
        await host.create(incarnation, CreateSpec(Shape()))
    if machine in ("hot", "cold"):
        await host.pause(incarnation)
    if machine == "cold":
        await host.cool(incarnation)
    if machine == "stopped":
        await host.power_off(incarnation)
    if machine == "dead":
        host.end(incarnation, ExitKind.CRASHED, "gone")
    return host.world


async def restarted(store: Store, world: MemoryWorld, faults: FaultPlan | None = None) -> ControlPlane:
    control = ControlPlane(store, MemoryHost(lambda incarnation, spec: FakeGuest(), world, faults))
    await control.start()
    return control


#: For every state of the record: what the host found -> what becomes of it, and why.
MATRIX: dict[State, dict[str, tuple[State, Cause]]] = {
    S.CREATING: {
        "alive": (S.FAILED, Cause.CREATE_FAILED),
        "dead": (S.FAILED, Cause.CREATE_FAILED),
        "nothing": (S.FAILED, Cause.CREATE_FAILED),
    },
    S.RUNNING: {
        "alive": (S.RUNNING, Cause.REQUESTED),
        "hot": (S.RUNNING, Cause.WOKEN),
        "stopped": (S.STOPPED, Cause.DAEMON_RESTARTED),
        "stopped, rebooted": (S.STOPPED, Cause.HOST_RESTARTED),
        "dead": (S.FAILED, Cause.VM_CRASHED),
        "dead, rebooted": (S.FAILED, Cause.HOST_RESTARTED),
        "nothing": (S.FAILED, Cause.DAEMON_RESTARTED),
        "nothing, rebooted": (S.FAILED, Cause.HOST_RESTARTED),
    },
    S.PAUSING: {
        "alive": (S.RUNNING, Cause.PAUSE_FAILED),
        "hot": (S.PAUSED, Cause.DAEMON_RESTARTED),
        "cold": (S.PAUSED, Cause.DAEMON_RESTARTED),
        "stopped, rebooted": (S.STOPPED, Cause.HOST_RESTARTED),
        "dead": (S.FAILED, Cause.VM_CRASHED),
        "nothing": (S.FAILED, Cause.DAEMON_RESTARTED),
    },
    S.PAUSED: {
        "alive": (S.RUNNING, Cause.DAEMON_RESTARTED),
        "hot": (S.PAUSED, Cause.REQUESTED),
        "cold": (S.PAUSED, Cause.REQUESTED),
        "cold, rebooted": (S.PAUSED, Cause.REQUESTED),
        "stopped, rebooted": (S.STOPPED, Cause.HOST_RESTARTED),
        "dead": (S.FAILED, Cause.VM_CRASHED),
        "nothing": (S.FAILED, Cause.DAEMON_RESTARTED),
    },
    S.RESUMING: {
        "alive": (S.RUNNING, Cause.DAEMON_RESTARTED),
        "hot": (S.PAUSED, Cause.RESUME_FAILED),
        "cold, rebooted": (S.PAUSED, Cause.RESUME_FAILED),
        "stopped, rebooted": (S.STOPPED, Cause.HOST_RESTARTED),
        "dead": (S.FAILED, Cause.VM_CRASHED),
        "nothing": (S.FAILED, Cause.DAEMON_RESTARTED),
    },
    S.STOPPING: {
        "alive": (S.RUNNING, Cause.STOP_FAILED),
        "hot": (S.PAUSED, Cause.DAEMON_RESTARTED),
        "stopped": (S.STOPPED, Cause.STOPPED_BY_USER),
        "dead": (S.STOPPED, Cause.STOPPED_BY_USER),
        "dead, rebooted": (S.STOPPED, Cause.STOPPED_BY_USER),
        "nothing": (S.FAILED, Cause.DAEMON_RESTARTED),
    },
    S.STOPPED: {
        "alive": (S.RUNNING, Cause.DAEMON_RESTARTED),
        "cold": (S.PAUSED, Cause.DAEMON_RESTARTED),
        "stopped": (S.STOPPED, Cause.REQUESTED),
        "stopped, rebooted": (S.STOPPED, Cause.REQUESTED),
        "dead": (S.STOPPED, Cause.REQUESTED),
        "nothing": (S.FAILED, Cause.DAEMON_RESTARTED),
    },
    S.STARTING: {
        "alive": (S.RUNNING, Cause.DAEMON_RESTARTED),
        "cold": (S.STOPPED, Cause.START_FAILED),
        "stopped": (S.STOPPED, Cause.START_FAILED),
        "dead": (S.STOPPED, Cause.START_FAILED),
        "nothing": (S.FAILED, Cause.DAEMON_RESTARTED),
    },
    S.FAILED: {
        "alive": (S.FAILED, Cause.VM_CRASHED),
        "stopped": (S.FAILED, Cause.VM_CRASHED),
        "dead": (S.FAILED, Cause.VM_CRASHED),
        "nothing": (S.FAILED, Cause.VM_CRASHED),
    },
    S.DELETING: dict.fromkeys(["alive", "hot", "cold", "stopped", "dead", "nothing"], (S.DELETED, Cause.REQUESTED)),
    S.DELETED: dict.fromkeys(["alive", "hot", "cold", "stopped", "dead"], (S.DELETED, Cause.REQUESTED)),
}
#: Of these nothing is kept on the host.
GONE = {S.CREATING, S.DELETING, S.DELETED}


def test_the_matrix_has_every_state() -> None:
    assert set(MATRIX) == set(WAY) == set(State)


@pytest.mark.parametrize(
    ("state", "found", "expected", "cause"),
    [(state, found, *become) for state, row in MATRIX.items() for found, become in row.items()],
)
async def test_a_restart_brings_record_and_machine_in_step(
    store: Store, state: State, found: str, expected: State, cause: Cause
) -> None:
    await record_in(store, state)
    machine, _, rebooted = found.partition(", ")
    world = await world_with(machine)
    world.rebooted = bool(rebooted)
    control = await restarted(store, world)
    await control.ground.turns.settle(5)
    info = await control.sandboxes.get(ID)
    assert (info.state, info.cause) == (expected, cause)
    kept = {MACHINE} if machine != "nothing" and state not in GONE else set()
    assert set(world.machines) == kept
    if info.state is not state and expected is not State.RUNNING and state not in GONE and cause in Cause:
        assert info.cause_detail or cause is Cause.STOPPED_BY_USER
    await control.stop()


@pytest.mark.parametrize("state", [S.RESUMING, S.STARTING])
async def test_a_successor_that_came_to_life_unrecorded_is_taken_over(store: Store, state: State) -> None:
    await record_in(store, state)
    world = await world_with("alive", NEXT)
    control = await restarted(store, world)
    info = await control.sandboxes.get(ID)
    assert (info.state, info.incarnation) == (S.RUNNING, 2)
    assert set(world.machines) == {NEXT}
    await control.sandboxes.guest(ID)
    await control.stop()


@pytest.mark.parametrize(("machine", "expected"), [("dead", S.FAILED), ("stopped", S.STOPPED), ("cold", S.PAUSED)])
async def test_a_successor_that_came_and_went_is_not_lost(store: Store, machine: str, expected: State) -> None:
    await record_in(store, S.RESUMING)
    world = await world_with(machine, NEXT)
    control = await restarted(store, world)
    info = await control.sandboxes.get(ID)
    assert (info.state, info.incarnation) == (expected, 2)
    assert set(world.machines) == {NEXT}
    await control.stop()


async def test_a_failed_sandbox_keeps_its_disk_over_a_restart_and_can_be_started(store: Store) -> None:
    await record_in(store, S.FAILED)
    world = await world_with("alive")
    control = await restarted(store, world)
    assert world.machines[MACHINE].power == "off"
    assert (await control.power.start(ID)).state is S.RUNNING
    assert set(world.machines) == {NEXT}
    await control.stop()


async def test_after_a_reboot_a_stopped_sandbox_says_that_its_disk_is_kept(store: Store) -> None:
    await record_in(store, S.RUNNING)
    world = await world_with("alive")
    world.reboot()
    control = await restarted(store, world)
    assert "its disk is kept: start it" in ((await control.sandboxes.get(ID)).cause_detail or "")
    assert (await control.power.start(ID)).state is S.RUNNING
    await control.stop()


async def test_an_ephemeral_sandbox_that_lost_its_memory_is_deleted(store: Store) -> None:
    await record_in(store, S.RUNNING, persistence="ephemeral")
    world = await world_with("stopped")
    control = await restarted(store, world)
    await control.upkeep.tick()
    await control.upkeep.settle()
    info = await control.sandboxes.get(ID)
    assert (info.state, info.cause) == (S.DELETED, Cause.EPHEMERAL)
    assert world.machines == {}
    await control.stop()


async def test_half_made_snapshots_are_cleared_away(store: Store) -> None:
    await record_in(store, S.RUNNING)
    world = await world_with("alive")
    await store.add_snapshot("sc-half", ID, Shape(), name="half")
    await store.add_snapshot("sc-whole", ID, Shape(), name="whole")
    await store.finish_snapshot("sc-whole", size_bytes=1, paused_ms=1)
    for snapshot_id in ("sc-half", "sc-whole"):
        await MemoryHost(lambda incarnation, spec: FakeGuest(), world).snapshot(MACHINE, snapshot_id)
    control = await restarted(store, world)
    assert [info.id for info in (await control.snapshots.list()).items] == ["sc-whole"]
    assert set(world.snapshots) == {"sc-whole"}
    assert (await control.snapshots.create(ID, "half")).name == "half"
    await control.stop()


async def test_the_checkpoints_of_a_delete_that_was_cut_off_go_with_it(store: Store) -> None:
    await record_in(store, S.DELETING)
    await store.add_snapshot("sc-auto", ID, Shape(), automatic=True)
    await store.finish_snapshot("sc-auto", size_bytes=1, paused_ms=1)
    control = await restarted(store, MemoryWorld())
    assert await store.list_snapshots() == await store.list_snapshots(ready=False) == []
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
    assert (await store.add_sandbox(NewSandbox("s9999999999999999999", Shape()), claim)).id == "s9999999999999999999"
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
