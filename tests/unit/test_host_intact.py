"""Saved memory is checked once for all who want it, and never believed when it has changed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forkyard.errors import SnapshotCorrupt
from forkyard.host import intact as module
from forkyard.host.intact import Intact
from forkyard.models import Shape
from forkyard.storage.snapshots import PAGE, Saved, Snapshots

pytestmark = pytest.mark.anyio


class Counting(Snapshots):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.readings = 0

    def verify(self, saved: Saved) -> None:
        self.readings += 1
        super().verify(saved)


@pytest.fixture
def snapshots(tmp_path: Path) -> Counting:
    snapshots = Counting(tmp_path / "snapshots")
    (tmp_path / "layer").write_bytes(b"one".ljust(PAGE) * 4)
    (tmp_path / "state").write_bytes(b"state")
    (tmp_path / "disk").write_bytes(b"disk")
    snapshots.write("one", "t", Shape(), tmp_path / "layer", tmp_path / "state", tmp_path / "disk")
    return snapshots


async def whole(intact: Intact) -> None:
    saved, reading = await intact.open("one")
    assert saved.id == "one"
    await asyncio.shield(reading)


async def test_many_at_once_and_soon_after_read_it_once(snapshots: Counting) -> None:
    intact = Intact(snapshots)
    await asyncio.gather(*(whole(intact) for _ in range(5)))
    await whole(intact)
    assert snapshots.readings == 1


async def test_it_is_read_again_after_a_while(snapshots: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    intact = Intact(snapshots)
    await whole(intact)
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    await whole(intact)
    assert snapshots.readings == 2


async def test_one_that_is_written_to_is_not_believed(snapshots: Counting) -> None:
    intact = Intact(snapshots)
    await whole(intact)
    pages = snapshots.pages("one")
    pages.chmod(0o600)
    pages.write_bytes(b"x" * pages.stat().st_size)
    for _ in range(2):
        with pytest.raises(SnapshotCorrupt, match="pages have changed"):
            await whole(intact)
    assert snapshots.readings == 3


async def test_a_caller_that_gives_up_leaves_the_reading_to_the_others(snapshots: Counting) -> None:
    intact = Intact(snapshots)
    impatient, patient = asyncio.create_task(whole(intact)), asyncio.create_task(whole(intact))
    await asyncio.sleep(0)
    impatient.cancel()
    await patient
    assert snapshots.readings <= 2
