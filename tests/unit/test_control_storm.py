"""Random verbs at once, failing hosts, crashing machines, killed daemons: after every storm the store, the table of
states and the machines that are really there agree."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forkyard.control import upkeep
from forkyard.control.plane import ControlPlane
from forkyard.errors import ForkyardError, HostFailure
from forkyard.guest.fake import FakeGuest
from forkyard.hosts.base import Incarnation
from forkyard.hosts.memory import MemoryHost, MemoryWorld, Power
from forkyard.lifecycle import State, allowed
from forkyard.models import SandboxCreate, SandboxFork
from forkyard.store.migrate import migrate
from forkyard.store.sql import Store
from forkyard.vmm.base import ExitKind, FaultPlan

VERBS = [
    "create",
    "ephemeral",
    "delete",
    "pause",
    "resume",
    "boot",
    "stop",
    "start",
    "fork",
    "badfork",
    "pausepause",
    "pausefork",
    "deleteresume",
    "snapshot",
    "rollback",
    "forget",
    "cool",
    "use",
    "idle",
    "crash",
    "shutdown",
]
STEPS = ["create", "pause", "cool", "resume", "power_off", "boot", "fork", "child.1", "snapshot", "rollback"]
TOLD_LATE = ["create.done", "pause.done", "resume.done", "boot.done", "snapshot.done", "rollback.done"]
#: What the host may have of a sandbox in this state.
FITS: dict[State, set[str]] = {
    State.RUNNING: {"running"},
    State.PAUSED: {"hot", "cold"},
    State.STOPPED: {"off", "dead"},
    State.FAILED: {"dead", "off", "nothing"},
    State.DELETED: {"nothing"},
}
SETTLED = set(FITS)


@dataclass(frozen=True)
class Burst:
    verbs: list[tuple[str, int]]
    failing: str | None
    delay_ms: int
    ending: str


bursts = st.builds(
    Burst,
    verbs=st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 5)), min_size=1, max_size=8),
    failing=st.none() | st.sampled_from(STEPS),
    delay_ms=st.integers(0, 3),
    ending=st.sampled_from(["settled", "settled", "settled", "killed", "rebooted"]),
)


@dataclass
class Yard:
    """A daemon that can be killed, on a world that stays."""

    store: Store
    world: MemoryWorld = field(default_factory=MemoryWorld)
    host: MemoryHost = field(init=False)
    control: ControlPlane = field(init=False)

    async def start(self) -> None:
        self.host = MemoryHost(lambda incarnation, spec: FakeGuest(), self.world)
        self.control = ControlPlane(self.store, self.host)
        await self.control.start()
        self.world.rebooted = False

    async def kill(self) -> None:
        """Nothing is finished and nothing is told: every task is gone at whatever line it was."""
        while mine := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in mine:
                task.cancel()
            await asyncio.wait(mine)
        await self.store._write(lambda connection: None)  # transactions that were on their way are whole

    async def act(self, verb: str, number: int) -> None:
        control = self.control
        ids = [record.id for record in await self.store.list_sandboxes()]
        if verb in ("create", "ephemeral") or not ids:
            persistence: Any = "ephemeral" if verb == "ephemeral" else "sticky"
            await control.sandboxes.create(SandboxCreate(persistence=persistence, idle_timeout_s=0.001))
            return
        one = ids[number % len(ids)]
        snapshots = [item.id for item in await self.store.list_snapshots()]
        calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "delete": lambda: control.sandboxes.delete(one),
            "pause": lambda: control.sleep.pause(one),
            "resume": lambda: control.sleep.resume(one),
            "boot": lambda: control.sleep.resume(one, memory=False),
            "stop": lambda: control.power.stop(one),
            "start": lambda: control.power.start(one),
            "fork": lambda: control.forks.fork(one, SandboxFork(count=2)),
            "badfork": lambda: self._bad_fork(one, number),
            "pausepause": lambda: _both(control.sleep.pause(one), control.sleep.pause(one, durable=True)),
            "pausefork": lambda: _both(control.sleep.pause(one), control.forks.fork(one, SandboxFork(count=1))),
            "deleteresume": lambda: _both(control.sandboxes.delete(one), control.sleep.resume(one)),
            "snapshot": lambda: control.snapshots.create(one),
            "rollback": lambda: control.snapshots.rollback(one, (snapshots or ["none"])[0]),
            "forget": lambda: control.snapshots.delete((snapshots or ["none"])[-1]),
            "cool": lambda: control.sleep.cool_if_free(one),
            "use": lambda: self._use(one),
            "idle": lambda: control.upkeep.tick(),
            "crash": lambda: self._end(one, ExitKind.CRASHED),
            "shutdown": lambda: self._end(one, ExitKind.SHUTDOWN),
        }
        await calls[verb]()

    async def _bad_fork(self, sandbox_id: str, number: int) -> None:
        count = (0, -1, 1000)[number % 3]
        with pytest.raises(ValueError, match="count"):
            await self.control.forks.fork(sandbox_id, SandboxFork(count=count))

    async def _use(self, sandbox_id: str) -> None:
        async with self.control.sandboxes.use(sandbox_id) as guest:
            await guest.ping()

    async def _end(self, sandbox_id: str, kind: ExitKind) -> None:
        for incarnation, machine in self.world.machines.items():
            if incarnation.sandbox_id == sandbox_id and machine.exit is None and machine.power in ("running", "hot"):
                self.host.end(incarnation, kind, "a storm")
                return

    def found(self, incarnation: Incarnation) -> str:
        machine = self.world.machines.get(incarnation)
        if machine is None:
            return "nothing"
        return "dead" if machine.exit is not None else str(machine.power)

    async def check(self) -> None:
        records = await self.store.list_sandboxes()
        for record in records:
            assert record.state in SETTLED, record
            assert self.found(Incarnation(record.id, record.incarnation)) in FITS[record.state], record
            assert (record.ended_at is not None) == (record.state in (State.FAILED, State.DELETED)), record
            if record.persistence == "ephemeral":
                assert record.state not in (State.PAUSED,), record
        wanted = {Incarnation(record.id, record.incarnation) for record in records}
        assert set(self.world.machines) <= wanted, "a machine that nobody knows"
        assert {item.id for item in await self.store.list_snapshots()} == set(self.world.snapshots)
        assert await self.store.list_snapshots(ready=False) == []
        hot = {key.sandbox_id for key, machine in self.world.machines.items() if machine.power is Power.HOT}
        dead = {key.sandbox_id for key, machine in self.world.machines.items() if machine.exit is not None}
        assert hot - dead <= set(self.control.ground.hot), "memory that is held and not counted"
        assert not any(self.control.ground.turns.busy(record.id) for record in records)
        await self._check_history()

    async def _check_history(self) -> None:
        """Every change of state ever made is one the table knows."""
        states = {str(state) for state in State}
        at: dict[str, State] = {}
        for event in await self.store.list_events():
            kind = event.kind.removeprefix("sandbox.")
            if event.sandbox_id is None or not event.kind.startswith("sandbox.") or kind not in states:
                continue
            to = State(kind)
            before = at.get(event.sandbox_id)
            assert (before is None and to is State.CREATING) or (before is not None and allowed(before, to)), event
            at[event.sandbox_id] = to
        assert at == {record.id: record.state for record in await self.store.list_sandboxes()}


async def _both(*verbs: Coroutine[Any, Any, Any]) -> None:
    """At once; each may be refused because of the other."""
    for outcome in await asyncio.gather(*verbs, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, ForkyardError):
            raise outcome


async def _storm(yard: Yard, burst: Burst, chance: random.Random) -> None:
    delays = {step: burst.delay_ms / 1000 for step in [*STEPS, *TOLD_LATE]} if burst.delay_ms else {}
    failing = {burst.failing: HostFailure("a storm")} if burst.failing else {}
    yard.host.faults = FaultPlan(delay_s=delays, fail=failing)
    tasks = [asyncio.create_task(yard.act(verb, number)) for verb, number in burst.verbs]
    if burst.ending == "killed":
        await asyncio.sleep(chance.random() * 0.02)
        await yard.kill()
        await yard.start()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, ForkyardError | asyncio.CancelledError):
            raise outcome
    yard.host.faults = FaultPlan()
    if burst.ending == "rebooted":
        await _quiet(yard)
        await yard.kill()
        yard.world.reboot()
        await yard.start()
    await _quiet(yard)


async def _quiet(yard: Yard) -> None:
    for _ in range(3):  # an end may be told after the verb that was under way
        await yard.control.upkeep.settle()
        await yard.control.ground.turns.settle(10)
        await asyncio.sleep(0.002)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    database = tmp_path_factory.mktemp("empty") / "forkyard.db"
    migrate(database)
    return database


@pytest.fixture(scope="module", autouse=True)
def no_ticks_but_those_of_the_storm() -> Iterator[None]:
    """Upkeep that looks around by itself may put a sandbox to sleep in the middle of a check."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upkeep, "TICK_S", 3600.0)
        yield


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(storms=st.lists(bursts, min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_after_every_storm_store_states_and_machines_agree(
    storms: list[Burst], seed: int, empty: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def run() -> None:
        directory = tmp_path_factory.mktemp("storm")
        shutil.copy(empty, directory / "forkyard.db")
        store = await Store.open(directory / "forkyard.db")
        yard = Yard(store)
        await yard.start()
        chance = random.Random(seed)
        async with asyncio.timeout(60):
            await asyncio.gather(yard.act("create", 0), yard.act("create", 0))
            for burst in storms:
                await _storm(yard, burst, chance)
                await yard.check()
            await yard.control.stop(destroy=True)
        assert yard.world.machines == {}
        await store.close()
        shutil.rmtree(directory)

    asyncio.run(run())
