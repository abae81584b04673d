"""Snapshots' pages on tmpfs: read once, shared, given back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from forkyard.errors import SnapshotCorrupt
from forkyard.host import layers as module
from forkyard.host.layers import Layers
from forkyard.models import Shape
from forkyard.storage.snapshots import PAGE, Saved, Snapshots


class Counting(Snapshots):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.loads = 0

    def load(self, saved: Saved, layer: Path) -> None:
        self.loads += 1
        super().load(saved, layer)


@pytest.fixture
def snapshots(tmp_path: Path) -> Counting:
    (tmp_path / "ram").mkdir()
    snapshots = Counting(tmp_path / "snapshots")
    for name in ("one", "two"):
        (tmp_path / "layer").write_bytes(name.encode().ljust(PAGE) * 4)
        (tmp_path / "state").write_bytes(b"state")
        (tmp_path / "disk").write_bytes(b"disk")
        snapshots.write(name, "t", Shape(), tmp_path / "layer", tmp_path / "state", tmp_path / "disk")
    return snapshots


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    asyncio.run(main())


def there(tmp_path: Path) -> int:
    return len(list((tmp_path / "ram").iterdir()))


def test_many_at_once_read_it_once_and_share_the_file(snapshots: Counting, tmp_path: Path) -> None:
    layers = Layers(snapshots, tmp_path / "ram", 1 << 20)

    async def work() -> None:
        async def one() -> Path:
            async with layers.use("one", keep=True) as (saved, path):
                assert saved.id == "one"
                assert path.read_bytes()[:3] == b"one"
                return path

        paths = await asyncio.gather(*(one() for _ in range(5)))
        assert len({*paths, await one()}) == 1
        assert snapshots.loads == 1
        assert there(tmp_path) == 1, "kept for the next one"
        layers.clear()
        assert there(tmp_path) == 0

    run(work)


def test_what_nobody_else_will_want_is_gone_at_once(snapshots: Counting, tmp_path: Path) -> None:
    layers = Layers(snapshots, tmp_path / "ram", 1 << 20)

    async def work() -> None:
        async with layers.use("one", keep=False):
            assert there(tmp_path) == 1
        assert there(tmp_path) == 0

    run(work)


def test_the_least_recently_used_makes_room(snapshots: Counting, tmp_path: Path) -> None:
    layers = Layers(snapshots, tmp_path / "ram", 6 * PAGE)

    async def work() -> None:
        async with layers.use("one", keep=True) as (_, one):
            async with layers.use("two", keep=True) as (_, two):
                assert one.exists()
                assert two.exists(), "both are in use, whatever the budget"
            assert one.exists()
            assert not two.exists()
        assert one.exists()
        async with layers.use("two", keep=True):
            pass
        assert not one.exists()

    run(work)


def test_one_that_is_deleted_while_in_use_goes_with_its_last_user(snapshots: Counting, tmp_path: Path) -> None:
    layers = Layers(snapshots, tmp_path / "ram", 1 << 20)

    async def work() -> None:
        async with layers.use("one", keep=True) as (_, path):
            layers.forget("one")
            assert path.exists()
        assert there(tmp_path) == 0

    run(work)


def test_idle_ones_give_their_memory_back(snapshots: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.02)
    layers = Layers(snapshots, tmp_path / "ram", 1 << 20)

    async def work() -> None:
        async with layers.use("one", keep=True):
            pass
        assert there(tmp_path) == 1
        async with asyncio.timeout(5):
            while there(tmp_path):
                await asyncio.sleep(0.01)

    run(work)


def test_a_damaged_one_is_refused_every_time_and_leaves_nothing(snapshots: Counting, tmp_path: Path) -> None:
    pages = tmp_path / "snapshots/one/pages"
    pages.chmod(0o600)
    pages.write_bytes(b"x" * pages.stat().st_size)
    layers = Layers(snapshots, tmp_path / "ram", 1 << 20)

    async def work() -> None:
        for _ in range(2):
            with pytest.raises(SnapshotCorrupt):
                async with layers.use("one", keep=True):
                    pass
        assert snapshots.loads == 2
        assert there(tmp_path) == 0

    run(work)


def test_a_caller_that_gives_up_while_it_is_read_leaves_it_to_the_others(snapshots: Counting, tmp_path: Path) -> None:
    layers = Layers(snapshots, tmp_path / "ram", 1 << 20)

    async def work() -> None:
        async def one() -> None:
            async with layers.use("one", keep=True):
                pass

        impatient, patient = asyncio.create_task(one()), asyncio.create_task(one())
        await asyncio.sleep(0)
        impatient.cancel()
        await patient
        assert snapshots.loads == 1
        layers.clear()
        assert there(tmp_path) == 0

    run(work)
