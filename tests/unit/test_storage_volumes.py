"""Volumes as files: versions on disks that become one file when too many rest on each other."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from annotated_types import Ge

from forkyard.models.volumes import VolumeCreate
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


def test_no_two_versions_ever_have_one_number(volumes: Volumes, disks: Disks, place: Path) -> None:
    newest = volumes.keep("v")

    def publish(into: Volumes) -> int:
        disk = disks.new_path()
        asyncio.run(disks.make_overlay(disk, newest.disk, 1))
        return into.publish("v", disk, SIZE_BYTES, kept=False, source=None).number

    assert publish(volumes) == newest.number + 1
    volumes.drop("v", newest.number + 1)
    again = Volumes(place / "volumes", disks)
    again.load()
    assert again.find("v").number == newest.number
    assert publish(again) == newest.number + 2
    again.drop("v", newest.number)
    assert publish(again) == newest.number + 3


def test_dropping_the_newest_one_after_the_other_gives_no_number_back(volumes: Volumes, disks: Disks) -> None:
    newest = volumes.keep("v")

    def publish() -> int:
        disk = disks.new_path()
        asyncio.run(disks.make_overlay(disk, newest.disk, 1))
        return volumes.publish("v", disk, SIZE_BYTES, kept=True, source=None).number

    second, third = publish(), publish()
    volumes.drop("v", third)
    volumes.drop("v", second)
    assert publish() == third + 1


def test_a_number_is_spent_before_its_version_goes(
    volumes: Volumes, disks: Disks, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    number, disk = volumes.find("v").number, disks.new_path()
    disk.touch()
    monkeypatch.setattr(volumes, "_forget", killed)
    with pytest.raises(Killed):
        volumes.drop("v", number)
    (place / "volumes" / "v" / f"{number}.json").unlink()
    again = Volumes(place / "volumes", disks)
    again.load()
    assert again.publish("v", disk, SIZE_BYTES, kept=False, source=None).number == number + 1


def test_the_smallest_volume_there_may_be_is_made(place: Path, disks: Disks) -> None:
    least = next(one.ge for one in VolumeCreate.model_fields["size_mib"].metadata if isinstance(one, Ge))
    made = Volumes(place / "volumes", disks).make("small", cast(int, least) << 20)
    assert made.disk.exists()


def test_who_may_write_to_an_empty_volume(place: Path, disks: Disks) -> None:
    volumes = Volumes(place / "volumes", disks)

    def root_of(disk: Path) -> str:
        raw = place / f"{disk.stem}.raw"
        subprocess.run(["qemu-img", "convert", "-O", "raw", str(disk), str(raw)], check=True)
        asked = ["debugfs", "-R", "stat /", str(raw)]
        return " ".join(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split())

    ours = root_of(volumes.make("ours", SIZE_BYTES).disk)
    assert "Mode: 0755" in ours
    assert "User: 1000" in ours
    everybodys = root_of(volumes.make("everybodys", SIZE_BYTES, for_all=True).disk)
    assert "Mode: 01777" in everybodys
    assert "User: 0 Group: 0" in everybodys
    assert "system.posix_acl_default" in everybodys
