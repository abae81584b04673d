"""The cache is swept of what nobody needs, and of nothing else."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

import pytest

from forkyard.errors import Conflict
from forkyard.host.cache import DAY_S, Cache, used_now


def qcow2(path: Path, backing: Path | None) -> None:
    name = str(backing).encode() if backing else b""
    path.write_bytes(struct.pack(">4sIQI", b"QFI\xfb", 3, 20 if name else 0, len(name)) + name)


def entry(cache: Path, kind: str, key: str, *, backing: Path | None = None, days_old: float = 100) -> Path:
    directory = cache / kind / key
    directory.mkdir(parents=True)
    if kind == "images":
        (directory / "disk.raw").write_bytes(b"raw")
    else:
        qcow2(directory / "disk.qcow2", backing)
    (directory / "manifest.json").write_text("{}")
    at = time.time() - days_old * DAY_S
    os.utime(directory / "manifest.json", (at, at))
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    found = Cache(tmp_path / "cache", tmp_path / "state", "me", keep_days=30)
    found.register()
    return found


def test_old_ones_go_and_young_ones_stay(cache: Cache, tmp_path: Path) -> None:
    image = entry(tmp_path / "cache", "images", "old")
    template = entry(tmp_path / "cache", "templates", "old", backing=image / "disk.raw")
    young = entry(tmp_path / "cache", "templates", "young", days_old=29)
    assert cache.sweep() == [template, image]
    assert not template.exists()
    assert young.exists()


def test_an_image_stays_as_long_as_a_template_rests_on_it(cache: Cache, tmp_path: Path) -> None:
    image = entry(tmp_path / "cache", "images", "old")
    entry(tmp_path / "cache", "templates", "young", backing=image / "disk.raw", days_old=1)
    assert cache.sweep() == []


def test_what_a_disk_of_any_daemon_rests_on_stays_also_while_that_daemon_is_down(cache: Cache, tmp_path: Path) -> None:
    image = entry(tmp_path / "cache", "images", "old")
    template = entry(tmp_path / "cache", "templates", "old", backing=image / "disk.raw")
    other = tmp_path / "other"
    (other / "disks").mkdir(parents=True)
    qcow2(other / "disks/a.qcow2", template / "disk.qcow2")
    qcow2(other / "disks/b.qcow2", other / "disks/a.qcow2")
    Cache(tmp_path / "cache", other, "other", keep_days=30).register()
    assert cache.sweep() == []
    (other / "disks/b.qcow2").unlink()
    (other / "disks/a.qcow2").unlink()
    assert cache.sweep() == [template, image]


def test_one_that_is_used_begins_anew(cache: Cache, tmp_path: Path) -> None:
    template = entry(tmp_path / "cache", "templates", "old")
    used_now(template)
    assert cache.sweep() == []


def test_one_that_is_being_built_or_has_no_manifest_is_left_alone(cache: Cache, tmp_path: Path) -> None:
    template = entry(tmp_path / "cache", "templates", "old")
    half = tmp_path / "cache/templates/half"
    half.mkdir()
    with template.with_name(".old.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cache.sweep() == []
    assert cache.sweep() == [template]
    assert half.exists()


def test_an_image_goes_at_once_with_its_templates_unless_a_disk_rests_on_it(cache: Cache, tmp_path: Path) -> None:
    image = entry(tmp_path / "cache", "images", "one", days_old=0)
    template = entry(tmp_path / "cache", "templates", "of-one", backing=image / "disk.raw", days_old=0)
    other = entry(tmp_path / "cache", "images", "two", days_old=0)
    others = entry(tmp_path / "cache", "templates", "of-two", backing=other / "disk.raw", days_old=0)
    disk = tmp_path / "state/disks/a.qcow2"
    disk.parent.mkdir(parents=True)
    qcow2(disk, template / "disk.qcow2")
    with pytest.raises(Conflict, match="1 disks"):
        cache.remove_image(image)
    assert image.exists() and template.exists()
    disk.unlink()
    with image.with_name(".one.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Conflict, match="right now"):
            cache.remove_image(image)
    cache.remove_image(image)
    assert not image.exists() and not template.exists()
    assert other.exists() and others.exists()
