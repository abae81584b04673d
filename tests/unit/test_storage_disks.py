"""Disks are kept as long as something rests on them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from forkyard.storage.disks import Disks, backing_file, chain


def make(path: Path, backing: Path | None = None) -> Path:
    name = str(backing).encode() if backing else b""
    path.write_bytes(struct.pack(">4sIQI", b"QFI\xfb", 3, 20 if name else 0, len(name)) + name)
    return path


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path / "disks")


def test_a_chain_is_followed_down_to_the_template(disks: Disks, tmp_path: Path) -> None:
    base = tmp_path / "base.raw"
    base.write_bytes(b"raw")
    template = make(tmp_path / "template.qcow2", base)
    sealed = make(disks.new_path(), template)
    top = make(disks.new_path(), sealed)
    assert chain(top) == [top, sealed, template, base]


def test_what_nothing_rests_on_is_removed_and_the_rest_stays(disks: Disks, tmp_path: Path) -> None:
    template = make(tmp_path / "template.qcow2")
    sealed = make(disks.new_path(), template)
    child, other = make(disks.new_path(), sealed), make(disks.new_path(), sealed)
    for path in (sealed, child, other):
        disks.release(path)
    disks.collect([child])
    assert sealed.exists() and child.exists() and template.exists()
    assert not other.exists()
    disks.collect([])
    assert not sealed.exists() and not child.exists()
    assert template.exists(), "what is not a disk of machines is not ours to remove"


def test_a_disk_that_is_being_made_is_not_taken_away(disks: Disks) -> None:
    path = make(disks.new_path())
    disks.collect([])
    assert path.exists()
    disks.release(path)
    disks.collect([])
    assert not path.exists()


@pytest.mark.parametrize("junk", [b"", b"QFI\xfb", b"x" * 100, struct.pack(">4sIQI", b"QFI\xfb", 3, 1 << 60, 5)])
def test_a_damaged_header_ends_a_chain(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "junk"
    path.write_bytes(junk)
    assert backing_file(path) is None


def test_a_chain_that_bites_its_tail_ends(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    make(one, two)
    make(two, one)
    assert chain(one) == [one, two]


def grown(path: Path, size_bytes: int) -> Path:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"x" * size_bytes)
        file.flush()
        os.fsync(file.fileno())
    return path


def stack(disks: Disks, template: Path, sizes: list[int]) -> list[Path]:
    """From the top down."""
    below, layers = template, []
    for size in reversed(sizes):
        below = grown(make(disks.new_path(), below), size)
        layers.insert(0, below)
    return layers


def test_half_of_the_layers_are_folded_and_small_ones_below_too(disks: Disks, tmp_path: Path) -> None:
    template = make(tmp_path / "template.qcow2")
    layers = stack(disks, template, [8192] * 8)
    assert disks.layers(layers[0]) == layers
    assert disks.fold(layers[0]) == template, "all are small"


def test_a_large_layer_is_not_copied_for_a_few_small_ones(disks: Disks, tmp_path: Path) -> None:
    template = make(tmp_path / "template.qcow2")
    layers = stack(disks, template, [8192, 8192, 8192, 8192, 1_000_000, 8192])
    assert disks.fold(layers[0]) == layers[4]
    layers = stack(disks, template, [8192, 1_000_000, 8192, 8192, 500_000, 8192])
    assert disks.fold(layers[0]) == template, "it is among those that must go, and so others may go with it"
