"""How many machines and hypervisors are kept ready."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forkyard.host import pool as module
from forkyard.host.pool import PARKED_MIB, SHELL_MIB, Pool, Wish
from forkyard.models import Shape

pytestmark = pytest.mark.anyio


class Parked:
    def __init__(self, entry: str) -> None:
        self.entry = entry
        self.alive = True

    async def kill(self) -> None:
        self.alive = False


class Foundry:
    """Counts what is ready: shells, and machines by what they are made of."""

    def __init__(self) -> None:
        self.ready = 0
        self.machines: Counter[str] = Counter()
        self.held: asyncio.Event | None = None

    async def park(self, name: str, shape: Shape, origin: Any, _: object) -> Any:
        if self.held is not None:
            await self.held.wait()
        self.machines[origin.base] += 1
        return Parked(origin.base)

    async def remove(self, entry: str) -> None:
        self.machines[entry] -= 1

    async def start_shell(self, name: str, *_: object) -> Any:
        self.ready += 1
        return SimpleNamespace(name=name)

    async def discard(self, _: object) -> None:
        self.ready -= 1

    async def until(self, ready: int) -> None:
        await until(lambda: self.ready == ready)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUIET_S", 0.02)


def make(foundry: Foundry, memory_mib: int = 1024) -> Pool:
    async def origin(_: Wish) -> Any:
        raise AssertionError("no machine is wanted")

    pool = Pool(foundry, origin, size=0, memory_mib=memory_mib, shells=2)  # type: ignore[arg-type]
    pool.start(Shape())
    return pool


def take(pool: Pool, ram: Path, count: int, foundry: Foundry) -> None:
    for _ in range(count):
        if pool.take_shell("base", Shape(), ram) is not None:
            foundry.ready -= 1


async def test_as_many_shells_are_ready_as_were_wanted_at_once(tmp_path: Path) -> None:
    foundry = Foundry()
    pool = make(foundry)
    take(pool, tmp_path, 1, foundry)
    await foundry.until(2)
    take(pool, tmp_path, 7, foundry)
    await foundry.until(7)
    take(pool, tmp_path, 1, foundry)
    await foundry.until(7)
    await pool.stop()
    assert foundry.ready == 0


async def test_the_surplus_goes_when_nobody_wants_it_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foundry = Foundry()
    pool = make(foundry)
    take(pool, tmp_path, 7, foundry)
    await foundry.until(7)
    monkeypatch.setattr(module, "WINDOW_S", 0.02)
    await asyncio.sleep(0.05)
    take(pool, tmp_path, 1, foundry)
    await foundry.until(2)
    await pool.stop()


async def test_shells_stay_within_the_memory_for_the_pool(tmp_path: Path) -> None:
    foundry = Foundry()
    pool = make(foundry, memory_mib=4 * SHELL_MIB)
    take(pool, tmp_path, 7, foundry)
    await foundry.until(4)
    await asyncio.sleep(0.1)
    assert foundry.ready == 4
    await pool.stop()


# ── machines ─────────────────────────────────────────────────────────────────────────────────────────────────────

PLAIN = Wish(Shape())
OTHERS = [Wish(Shape(memory_mib=512 + 128 * number)) for number in range(1, 9)]
VOLUMES = Wish(Shape(), (("/data", Path("/disks/1"), False),))


def base(wish: Wish) -> str:
    return f"base-{wish.shape.memory_mib}{''.join(path for path, _, _ in wish.places)}"


def make_pool(
    foundry: Foundry, ram: Path, *, size: int = 2, memory_mib: int = 1024, has: Callable[[Wish], bool] = lambda _: True
) -> Pool:
    async def origin(wish: Wish) -> Any:
        return SimpleNamespace(base=base(wish), files=SimpleNamespace(ram=ram)) if has(wish) else None

    pool = Pool(foundry, origin, size=size, memory_mib=memory_mib, shells=0)  # type: ignore[arg-type]
    pool.start(Shape())
    pool.start(Shape())  # a second time is no second pool
    return pool


def use(pool: Pool, foundry: Foundry, wish: Wish) -> None:
    if (machine := pool.take(wish)) is not None:
        foundry.machines[base(wish)] -= 1
        assert machine.alive


def ready(foundry: Foundry) -> dict[str, int]:
    return dict(+foundry.machines)


async def test_one_machine_is_kept_and_more_of_what_is_asked_for(tmp_path: Path) -> None:
    foundry = Foundry()
    pool = make_pool(foundry, tmp_path)
    await until(lambda: foundry.machines[base(PLAIN)] == 1)
    for _ in range(3):
        use(pool, foundry, PLAIN)
    await until(lambda: foundry.machines[base(PLAIN)] == 2)
    await pool.stop()
    assert not foundry.machines.total()


async def test_machines_of_all_shapes_together_stay_within_the_memory(tmp_path: Path) -> None:
    foundry = Foundry()
    pool = make_pool(foundry, tmp_path, memory_mib=5 * PARKED_MIB)
    for wish in OTHERS:
        use(pool, foundry, wish)
        use(pool, foundry, wish)
    # The one that is always kept, and what was asked for last.
    await until(lambda: ready(foundry) == {base(PLAIN): 1, base(OTHERS[-1]): 2, base(OTHERS[-2]): 2})
    await asyncio.sleep(0.1)
    assert foundry.machines.total() == 5
    await pool.stop()


async def test_machines_are_given_back_when_nobody_asks_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foundry = Foundry()
    pool = make_pool(foundry, tmp_path)
    for wish in (PLAIN, PLAIN, *OTHERS[:3]):
        use(pool, foundry, wish)
    await until(lambda: foundry.machines.total() == 5)
    monkeypatch.setattr(module, "WINDOW_S", 0.02)
    use(pool, foundry, PLAIN)  # wakes the pool; without it this takes a minute
    await until(lambda: ready(foundry) == {base(PLAIN): 1})
    await pool.stop()


async def test_a_machine_that_died_is_not_handed_out_and_is_cleared_up(tmp_path: Path) -> None:
    foundry = Foundry()
    pool = make_pool(foundry, tmp_path)
    await until(lambda: foundry.machines[base(PLAIN)] == 1)
    machine = pool._parked[PLAIN][0]
    await machine.kill()
    assert pool.take(PLAIN) is None
    await until(lambda: pool._parked[PLAIN] != [machine] and foundry.machines[base(PLAIN)] == 1)
    await pool.stop()


async def test_machines_with_volumes_are_kept_as_long_as_there_is_something_to_make_them_of(tmp_path: Path) -> None:
    foundry, there = Foundry(), {PLAIN}
    pool = make_pool(foundry, tmp_path, has=lambda wish: wish in there)
    pool.ask_for(VOLUMES)
    await until(lambda: ready(foundry) == {base(PLAIN): 1})
    there.add(VOLUMES)
    pool.ask_for(VOLUMES)
    await until(lambda: ready(foundry) == {base(PLAIN): 1, base(VOLUMES): 2})
    assert pool.take(Wish(Shape(), (("/data", Path("/disks/2"), False),))) is None, "another version"
    await pool.give_up(lambda wish: wish == VOLUMES)
    assert ready(foundry) == {base(PLAIN): 1}
    await pool.stop()


async def test_what_is_being_made_of_a_version_that_goes_is_not_finished(tmp_path: Path) -> None:
    foundry = Foundry()
    pool = make_pool(foundry, tmp_path)
    await until(lambda: ready(foundry) == {base(PLAIN): 1})
    foundry.held = asyncio.Event()
    use(pool, foundry, VOLUMES)
    await until(lambda: pool._parking is not None)
    await pool.give_up(lambda wish: wish == VOLUMES)
    foundry.held.set()
    use(pool, foundry, PLAIN)
    await until(lambda: ready(foundry) == {base(PLAIN): 1})
    await asyncio.sleep(0.1)
    assert ready(foundry) == {base(PLAIN): 1}
    await pool.stop()
    assert not ready(foundry)
