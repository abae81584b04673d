"""How many hypervisors are kept ready."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forkyard.host import pool as module
from forkyard.host.pool import SHELL_MIB, Pool
from forkyard.models import Shape

pytestmark = pytest.mark.anyio


class Foundry:
    """Counts shells."""

    def __init__(self) -> None:
        self.ready = 0

    async def start_shell(self, name: str, *_: object) -> Any:
        self.ready += 1
        return SimpleNamespace(name=name)

    async def discard(self, _: object) -> None:
        self.ready -= 1

    async def until(self, ready: int) -> None:
        async with asyncio.timeout(5):
            while self.ready != ready:
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
