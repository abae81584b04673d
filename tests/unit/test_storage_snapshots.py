"""A snapshot on disk is whole and right, or it is refused."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkyard.errors import SnapshotCorrupt, SnapshotFailed, SnapshotNotFound
from forkyard.models import Shape
from forkyard.storage.snapshots import PAGE, Snapshots
from forkyard.vmm.qemu.pages import places

SHAPE = Shape(memory_mib=128)
SIZE = 128 << 20


def make_layer(path: Path, pages: dict[int, bytes]) -> Path:
    with path.open("wb") as file:
        os.truncate(file.fileno(), SIZE)
        for page, content in pages.items():
            os.pwrite(file.fileno(), content * PAGE, page * PAGE)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "state").write_bytes(b"device state")
    (tmp_path / "disk").write_bytes(b"disk")
    return tmp_path


def save(place: Path, pages: dict[int, bytes]) -> Snapshots:
    snapshots = Snapshots(place / "snapshots")
    layer = make_layer(place / "layer", pages)
    snapshots.write("sc-one", "template", SHAPE, layer, place / "state", place / "disk")
    return snapshots


def content(snapshots: Snapshots, name: str) -> dict[int, bytes]:
    """The first byte of each page, of one that is found whole."""
    saved, _ = snapshots.open(name)
    snapshots.verify(saved)
    data = snapshots.pages(name).read_bytes()
    return {
        page: data[place.offset + page * PAGE - place.start :][:1]
        for place in places(snapshots.pages(name), saved.runs)
        for page in range(place.start // PAGE, place.end // PAGE)
    }


def test_what_was_saved_comes_back_page_by_page(place: Path) -> None:
    snapshots = save(place, {0: b"a", 1: b"b", 700: b"\0", 32767: b"z"})
    saved = snapshots.read("sc-one")
    assert content(snapshots, "sc-one") == {0: b"a", 1: b"b", 700: b"\0", 32767: b"z"}, "zeros are a page, not a hole"
    assert saved.disk == place / "disk"
    assert snapshots.ids() == ["sc-one"]


def test_a_page_that_comes_again_replaces_the_first(place: Path) -> None:
    snapshots = Snapshots(place / "snapshots")
    with contextlib.closing(snapshots.begin("sc-one")) as writing:
        writing.save([(0, 2 * PAGE), (9 * PAGE, 10 * PAGE)], memoryview(b"a" * PAGE + b"b" * PAGE + b"c" * PAGE))
        writing.save([(10 * PAGE, 11 * PAGE), (PAGE, 2 * PAGE)], memoryview(b"d" * PAGE + b"B" * PAGE))
        assert snapshots.ids() == [], "it is not there before it is finished"
        writing.finish("template", SHAPE, place / "state", place / "disk")
    assert content(snapshots, "sc-one") == {0: b"a", 1: b"B", 9: b"c", 10: b"d"}


def test_one_that_is_given_up_leaves_nothing(place: Path) -> None:
    snapshots = Snapshots(place / "snapshots")
    with contextlib.closing(snapshots.begin("sc-one")) as writing:
        writing.save([(0, PAGE)], memoryview(bytes(PAGE)))
    assert list((place / "snapshots").iterdir()) == []


@settings(max_examples=8, deadline=None)
@given(st.sets(st.integers(0, 32767), max_size=40))
def test_any_set_of_pages_survives(tmp_path_factory: pytest.TempPathFactory, pages: set[int]) -> None:
    place = tmp_path_factory.mktemp("snapshot")
    (place / "state").write_bytes(b"s")
    (place / "disk").write_bytes(b"d")
    written = {page: bytes([page % 251 + 1]) for page in pages}
    assert content(save(place, written), "sc-one") == written


@pytest.mark.parametrize("name", ["pages", "device-state", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_damage_is_found_out(place: Path, name: str, damage: str) -> None:
    snapshots = save(place, {3: b"x", 9: b"y"})
    file = place / "snapshots" / "sc-one" / name
    data = bytearray(file.read_bytes())
    file.unlink()
    if damage == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    with pytest.raises((SnapshotCorrupt, SnapshotNotFound)):
        content(snapshots, "sc-one")


def test_a_write_that_fails_leaves_nothing(place: Path) -> None:
    snapshots = Snapshots(place / "snapshots")
    with pytest.raises(SnapshotFailed):
        snapshots.write("sc-one", "t", SHAPE, make_layer(place / "layer", {1: b"x"}), place / "missing", place / "disk")
    assert list((place / "snapshots").iterdir()) == []


def test_a_crash_in_the_middle_of_a_write_is_cleaned_up(place: Path) -> None:
    snapshots = save(place, {1: b"x"})
    (place / "snapshots" / ".sc-two").mkdir()
    (place / "snapshots" / "sc-three").mkdir()
    snapshots.clean()
    assert {p.name for p in (place / "snapshots").iterdir()} == {"sc-one"}


def test_a_copy_outlives_its_source(place: Path) -> None:
    snapshots = save(place, {5: b"q"})
    snapshots.copy("sc-one", "sc-two", place / "disk")
    snapshots.delete("sc-one")
    assert content(snapshots, "sc-two") == {5: b"q"}
