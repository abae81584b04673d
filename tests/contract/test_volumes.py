"""Volumes against the real API over a host that is only memory: names, who has what, versions, limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forkyard import Forkyard, Sandbox, Volume
from forkyard.errors import Conflict, InvalidRequest, VolumeChanged, VolumeInUse, VolumeNotFound

from .sdk_daemon import Daemon


@pytest.fixture
def volume(fy: Forkyard) -> Iterator[str]:
    yield fy.volumes.create("data", size_mib=64).name
    for sandbox in fy.sandboxes.list():
        sandbox.delete()
    for volume in fy.volumes.list():
        fy.volumes.delete(volume.name)


def modes(sandbox: Sandbox) -> dict[str, str]:
    return {one.path: one.mode for one in sandbox.info.volumes}


def test_one_writes_and_the_error_says_who(fy: Forkyard, volume: str) -> None:
    writer = fy.sandboxes.create(volumes={"/data": volume})
    assert fy.volumes.get(volume).writer == writer.id
    with pytest.raises(VolumeInUse, match=writer.id) as refused:
        fy.sandboxes.create(volumes={"/data": Volume(volume)})
    assert refused.value.details["sandbox_id"] == writer.id
    reader = fy.sandboxes.create(volumes={"/data": Volume(volume, mode="ro")})
    assert sorted(fy.volumes.get(volume).used_by) == sorted([writer.id, reader.id])
    with pytest.raises(VolumeInUse, match="in use by sandbox"):
        fy.volumes.delete(volume)
    writer.delete()
    assert fy.volumes.get(volume).writer is None
    assert fy.volumes.get(volume).version == 2, "what it wrote is the newest version"


def test_a_create_that_fails_gives_the_volume_back(fy: Forkyard, daemon: Daemon, volume: str) -> None:
    with pytest.raises(VolumeNotFound):
        fy.sandboxes.create(volumes={"/data": volume, "/other": "missing"})
    daemon.host.world.volumes.pop(fy.volumes.get(volume).id)  # a host that lost it
    with pytest.raises(VolumeNotFound):
        fy.sandboxes.create(volumes={"/data": volume})
    assert fy.volumes.get(volume).writer is None
    assert fy.volumes.get(volume).used_by == []


def test_children_and_copies_of_a_writer_have_copies(fy: Forkyard, volume: str) -> None:
    writer = fy.sandboxes.create(volumes={"/data": volume, "/ro": Volume(volume, mode="ro")})
    (child,) = writer.fork()
    assert modes(child) == {"/data": "cow", "/ro": "ro"}
    copy = fy.sandboxes.create(snapshot=writer.snapshot(), volumes={"/more": Volume(volume, mode="cow")})
    assert modes(copy) == {"/data": "cow", "/ro": "ro", "/more": "cow"}
    assert fy.volumes.get(volume).writer == writer.id


def test_a_copy_is_committed_unless_the_volume_has_changed(fy: Forkyard, volume: str) -> None:
    one, two = (fy.sandboxes.create(volumes={"/data": Volume(volume, mode="cow")}) for _ in range(2))
    assert fy.volumes.commit(volume, one.id).version == 2
    with pytest.raises(VolumeChanged):
        fy.volumes.commit(volume, two.id)
    assert fy.volumes.commit(volume, two.id, force=True).version == 3
    assert [(v.version, v.kept, v.source) for v in fy.volumes.versions(volume)] == [
        (2, True, one.id),
        (3, True, two.id),
    ], "the first was nobody's wish"
    fy.volumes.delete_version(volume, 2)
    with pytest.raises(InvalidRequest, match="all that volume"):
        fy.volumes.delete_version(volume, 3)
    with pytest.raises(VolumeNotFound, match="no version 2"):
        fy.sandboxes.create(volumes={"/data": Volume(volume, mode="cow", version=2)})
    other = fy.sandboxes.create()
    with pytest.raises(InvalidRequest, match="has no copy"):
        fy.volumes.commit(volume, other.id)


@pytest.mark.parametrize(
    ("volumes", "why"),
    [
        ({"data": "data"}, "volumes"),
        ({"/": "data"}, "volumes"),
        ({"/a/../b": "data"}, "no plain absolute path"),
        ({"/proc/x": "data"}, "the machine's own"),
        ({"/data": Volume("data", mode="cow"), "/data/in": Volume("data", mode="cow")}, "inside another"),
        ({"/data": {"name": "data", "mode": "rw", "version": 1}}, "an older version"),
        ({"/data": {"name": "data", "mood": "rw"}}, "mood"),
        ({f"/d{i}": Volume("data", mode="cow") for i in range(5)}, "volumes"),
    ],
)
def test_what_cannot_be_mounted_is_refused(fy: Forkyard, volume: str, volumes: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        fy.sandboxes.create(volumes=volumes)  # type: ignore[arg-type]


def test_names_are_unique_and_sizes_have_limits(fy: Forkyard, daemon: Daemon, volume: str) -> None:
    with pytest.raises(Conflict, match="already"):
        fy.volumes.create(volume)
    for name, size_mib in (("a b", 64), ("../x", 64), ("small", 1), ("large", 2**20)):
        with pytest.raises(InvalidRequest):
            fy.volumes.create(name, size_mib=size_mib)
    with pytest.raises(VolumeNotFound, match="forkyard volumes ls"):
        fy.volumes.get("nothing")


def test_a_cache_is_a_copy_of_a_volume_and_the_client_is_told_where(fy: Forkyard, volume: str) -> None:
    one = fy.sandboxes.create(cache=["pip", "npm"])
    assert modes(one) == {"/var/cache/forkyard/pip": "cow", "/var/cache/forkyard/npm": "cow"}
    assert one.exec("echo $PIP_CACHE_DIR $npm_config_cache").stdout.split() == [
        "/var/cache/forkyard/pip",
        "/var/cache/forkyard/npm",
    ]
    assert {info.name for info in fy.volumes.list()} == {"data", "cache-pip", "cache-npm"}
    assert fy.sandboxes.create(cache=["pip"], env={"PIP_CACHE_DIR": "/mine"}).exec("echo $PIP_CACHE_DIR").stdout == (
        "/mine\n"
    )
