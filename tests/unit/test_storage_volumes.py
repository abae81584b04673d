"""Volumes as files: versions on disks that become one file when too many rest on each other."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forkyard.storage import volumes as module
from forkyard.storage.disks import Disks, seal
from forkyard.storage.volumes import Volumes

SIZE_BYTES = 64 << 20


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the user who folds can walk through."""
    with tempfile.TemporaryDirectory(prefix="fyv-", dir="/tmp") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture
def disks(place: Path) -> Disks:
    return Disks(place / "disks")


@pytest.fixture
def volumes(place: Path, disks: Disks) -> Volumes:
    """One volume, v, whose newest version rests on three others."""
    volumes = Volumes(place / "volumes", disks)
    top = volumes.make("v", SIZE_BYTES).disk
    for _ in range(3):
        above = disks.new_path()
        asyncio.run(disks.make_overlay(above, top, 1))
        seal(above)
        top = above
    volumes.publish("v", top, SIZE_BYTES, kept=False, source=None)
    return volumes


def test_a_version_on_many_layers_becomes_one_file(volumes: Volumes, disks: Disks) -> None:
    volumes.fold("v", 2)
    (version,) = volumes.versions("v")
    assert disks.layers(version.disk) == [version.disk]


def test_a_volume_that_goes_while_it_is_folded_leaves_nothing(
    volumes: Volumes, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set((place / "disks").iterdir())
    run = module._run

    def goes_meanwhile(*argv: str, **options: Any) -> None:
        run(*argv, **options)
        volumes.delete("v")

    monkeypatch.setattr(module, "_run", goes_meanwhile)
    volumes.fold("v", 2)
    assert set((place / "disks").iterdir()) == before
