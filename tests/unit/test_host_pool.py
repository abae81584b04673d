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
from forkyard.host.pool import PARKED_MIB, SHELL_MIB, Pool
from forkyard.models import Shape

pytestmark = pytest.mark.anyio


class Parked:
    def __init__(self, entry: Shape) -> None:
        self.entry = entry
        self.alive = True

    async def kill(self) -> None:
        self.alive = False


class Foundry:
    """Counts what is ready: shells, and machines by their shape."""

    def __init__(self) -> None:
        self.ready = 0
        self.machines: Counter[Shape] = Counter()

    async def park(self, name: str, shape: Shape, *_: object) -> Any:
        self.machines[shape] += 1
        return Parked(shape)

    async def remove(self, entry: Shape) -> None:
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
    async def origin(_: Shape) -> Any:
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

SHAPES = [Shape(memory_mib=512 + 128 * number) for number in range(1, 9)]


def make_pool(foundry: Foundry, ram: Path, *, size: int = 2, memory_mib: int = 1024) -> Pool:
    async def origin(shape: Shape) -> Any:
        return SimpleNamespace(base=f"base-{shape.memory_mib}", files=SimpleNamespace(ram=ram))

    pool = Pool(foundry, origin, size=size, memory_mib=memory_mib, shells=0)  # type: ignore[arg-type]
    pool.start(Shape())
    pool.start(Shape())  # a second time is no second pool
    return pool


def use(pool: Pool, foundry: Foundry, shape: Shape) -> None:
    if (machine := pool.take(shape)) is not None:
        foundry.machines[shape] -= 1
        assert machine.alive


async def test_one_machine_is_kept_and_more_of_what_is_asked_for(tmp_path: Path) -> None:
    foundry = Foundry()
    pool = make_pool(foundry, tmp_path)
    await until(lambda: foundry.machines[Shape()] == 1)
    for _ in range(3):
        use(pool, foundry, Shape())
    await until(lambda: foundry.machines[Shape()] == 2)
    await pool.stop()
    assert not foundry.machines.total()


async def test_machines_of_all_shapes_together_stay_within_the_memory(tmp_path: Path) -> None:
    foundry = Foundry()
    pool = make_pool(foundry, tmp_path, memory_mib=5 * PARKED_MIB)
    for shape in SHAPES:
        use(pool, foundry, shape)
        use(pool, foundry, shape)
    # The one that is always kept, and what was asked for last.
    await until(lambda: foundry.machines == {Shape(): 1, SHAPES[-1]: 2, SHAPES[-2]: 2})
    await asyncio.sleep(0.1)
    assert foundry.machines.total() == 5
    await pool.stop()


async def test_machines_are_given_back_when_nobody_asks_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foundry = Foundry()
    pool = make_pool(foundry, tmp_path)
    for shape in (Shape(), Shape(), *SHAPES[:3]):
        use(pool, foundry, shape)
    await until(lambda: foundry.machines.total() == 5)
    monkeypatch.setattr(module, "WINDOW_S", 0.02)
    use(pool, foundry, Shape())  # wakes the pool; without it this takes a minute
    await until(lambda: +foundry.machines == {Shape(): 1})
    await pool.stop()


async def test_a_machine_that_died_is_not_handed_out_and_is_cleared_up(tmp_path: Path) -> None:
    foundry = Foundry()
    pool = make_pool(foundry, tmp_path)
    await until(lambda: foundry.machines[Shape()] == 1)
    machine = pool._parked[Shape()][0]
    await machine.kill()
    assert pool.take(Shape()) is None
    await until(lambda: pool._parked[Shape()] != [machine] and foundry.machines[Shape()] == 1)
    await pool.stop()
