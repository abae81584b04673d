"""Disks of VMs: overlays as QEMU reads them, and finding the one in use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from forkyard.errors import HostFailure, VmCrashed
from forkyard.models import Shape
from forkyard.vmm.base import VmRecord
from forkyard.vmm.qemu import disks

needs_qemu_img = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="qemu-img judges our images")


def record(tmp_path: Path, disk_gib: int = 8) -> VmRecord:
    return VmRecord("a-1", tmp_path, os.getuid(), Shape(disk_gib=disk_gib), tmp_path / "disk.qcow2")


def qemu_img(*words: object) -> str:
    return subprocess.run(["qemu-img", *map(str, words)], capture_output=True, text=True, check=True).stdout


@needs_qemu_img
@pytest.mark.parametrize("disk_gib", [4, 8, 1024])
def test_an_overlay_is_a_sound_image_of_the_right_size(tmp_path: Path, disk_gib: int) -> None:
    base = tmp_path / "bäse.raw"
    base.write_bytes(b"base" * 1024)
    path = tmp_path / "disk.qcow2"
    disks.make_overlay(path, base, "raw", record(tmp_path, disk_gib))
    qemu_img("check", path)
    info = json.loads(qemu_img("info", "--output=json", path))
    assert info["virtual-size"] == disk_gib << 30
    assert info["backing-filename"] == str(base)
    assert info["backing-filename-format"] == "raw"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 < 100_000


@needs_qemu_img
def test_overlays_on_overlays_show_what_is_below_and_keep_what_is_written(tmp_path: Path) -> None:
    base = tmp_path / "base.raw"
    base.write_bytes(b"base".ljust(1 << 20, b"."))
    below, above = tmp_path / "below.qcow2", tmp_path / "above.qcow2"
    disks.make_overlay(below, base, "raw", record(tmp_path))
    subprocess.run(["qemu-io", "-c", "write -P 0x41 1M 64k", below], check=True, stdout=subprocess.DEVNULL)
    disks.seal(below)
    disks.make_overlay(above, below, "qcow2", record(tmp_path))
    subprocess.run(["qemu-io", "-c", "write -P 0x42 3G 64k", above], check=True, stdout=subprocess.DEVNULL)
    qemu_img("check", above)
    reads = [("-v 0 4", "base"), ("-P 0x41 1M 64k", ""), ("-P 0x42 3G 64k", ""), ("-P 0 2M 64k", "")]
    for what, shown in reads:
        read = subprocess.run(
            ["qemu-io", "-r", "-c", f"read {what}", above], capture_output=True, text=True, check=True
        )
        assert "verification failed" not in read.stdout
        assert shown in read.stdout


def test_an_overlay_is_never_made_over_another_file_or_over_nothing(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.touch()
    taken = tmp_path / "taken"
    taken.write_text("precious")
    with pytest.raises(HostFailure, match="exists"):
        disks.make_overlay(taken, base, "raw", record(tmp_path))
    assert taken.read_text() == "precious"
    with pytest.raises(HostFailure, match="does not exist"):
        disks.make_overlay(tmp_path / "new", tmp_path / "nothing", "raw", record(tmp_path))
    assert not (tmp_path / "new").exists()


def test_a_path_too_long_for_an_image_is_refused() -> None:
    with pytest.raises(HostFailure, match="longer than a disk can refer to"):
        disks.empty_overlay(Path("/" + "x" * 1023), "raw", 1 << 30)


def node(name: str, file: str, below: str | None) -> dict[str, Any]:
    return {"node-name": name, "file": file, **({"backing_file": below} if below else {})}


def test_the_disk_in_use_is_the_highest_that_stands_on_another() -> None:
    nodes = [
        node("disk", "json:{}", None),
        node("#block1", "/v/base", "/v/raw"),
        node("top-9", "/v/9", "/v/2"),
        node("top-10", "/v/10", "/v/9"),
        node("top-2", "/v/2", "/v/base"),
        node("top-11", "json:{}", None),
    ]
    assert disks.tops(nodes) == (disks.Top(10, Path("/v/10")), {}, ["top-11"])


def test_volumes_in_use_are_found_by_their_slot() -> None:
    size = {"image": {"virtual-size": 1 << 30}}
    nodes = [
        node("top-1", "/v/1", "/v/base"),
        node("volume-0-top-1", "/v/a", "/v/version") | size,
        node("volume-0-top-2", "/v/b", "/v/a") | size,
        node("volume-2-top-1", "/v/c", "/v/other") | size,
        node("volume-2-top-2", "json:{}", None) | size,
        node("volume-1", "json:{}", None),
    ]
    root, volumes, prepared = disks.tops(nodes)
    assert root == disks.Top(1, Path("/v/1"))
    assert volumes == {
        0: disks.Top(2, Path("/v/b"), 0, 1 << 30),
        2: disks.Top(1, Path("/v/c"), 2, 1 << 30),
    }
    assert prepared == ["volume-2-top-2"]


def test_a_machine_that_never_got_a_disk_is_no_vm() -> None:
    with pytest.raises(VmCrashed):
        disks.tops([node("disk", "json:{}", None), node("placeholder", "null-co://", None)])
