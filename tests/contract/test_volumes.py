"""Volumes against the real API over a host that is only memory: names, who has what, versions, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import CancelledError
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from forkyard import Forkyard, Sandbox, Volume
from forkyard.control.volume_files import ROOT, inside
from forkyard.errors import (
    Conflict,
    FileConflict,
    FileMissing,
    InvalidPath,
    InvalidRequest,
    VolumeChanged,
    VolumeInUse,
    VolumeNotFound,
)
from forkyard.guest.base import Guest
from forkyard.models import FileInfo, SandboxCreate
from forkyard.models.volumes import VolumeCommit

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
        ({"/d": {"name": "data", "mode": "xx"}}, "^volumes\\./d\\.mode='xx' .* 'rw', 'ro' or 'cow'.$"),
        ({"/d": "no name"}, "^volumes\\./d\\.name='no name' "),
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


def test_the_command_line_names_a_version_and_says_what_it_does_not_understand(
    fy: Forkyard, daemon: Daemon, volume: str
) -> None:
    first = fy.volumes.snapshot(volume).version
    fy.sandboxes.create(volumes={"/data": volume}).delete()
    made = daemon.cli("create", "--volume", f"{volume}@{first}:/old:ro", "--volume", f"{volume}:/new")
    (sandbox,) = fy.sandboxes.list()
    assert made.stdout.strip() == sandbox.id
    assert {one.path: (one.mode, one.version) for one in sandbox.info.volumes} == {
        "/old": ("ro", first),
        "/new": ("rw", None),
    }
    assert "NAME[@VERSION]:/PATH[:MODE]" in daemon.cli("create", "--volume", f"{volume}@x:/d:ro").stderr
    assert "volumes./d.mode='xx' is not possible" in daemon.cli("create", "--volume", f"{volume}:/d:xx").stderr


def test_files_are_in_a_volume_all_of_them_or_none(fy: Forkyard, daemon: Daemon, volume: str) -> None:
    files = daemon._control.volume_files

    async def written(error: BaseException | None) -> None:
        async with files.opened(volume, write=True):
            if error is not None:
                raise error

    before = fy.volumes.versions(volume)
    for error in (FileConflict(f"{ROOT}/a: is a directory"), asyncio.CancelledError()):
        with pytest.raises((FileConflict, CancelledError)):
            daemon._run(written(error))
        assert fy.volumes.versions(volume) == before
        assert (fy.volumes.get(volume).writer, fy.sandboxes.list()) == (None, [])
    daemon._run(written(None))
    assert [(one.version, one.kept) for one in fy.volumes.versions(volume)] == [(2, False)]
    with pytest.raises(FileConflict) as raised:
        daemon._run(written(FileConflict(f"{ROOT}/a: is a directory")))
    assert raised.value.message == "/a: is a directory", "a path of the volume"


def test_who_comes_while_files_are_written_is_told_to_wait(fy: Forkyard, daemon: Daemon, volume: str) -> None:
    control = daemon._control
    copy = fy.sandboxes.create(volumes={"/data": Volume(volume, mode="cow")})

    async def work() -> None:
        async with control.volume_files.opened(volume, write=True):
            assert (await control.volumes.keep(volume)).version == 1, "not what is written by now"
            with pytest.raises(VolumeInUse, match="try again when that is done"):
                async with control.volume_files.opened(volume, write=True):
                    pass
            with pytest.raises(VolumeInUse, match="try again when that is done"):
                await control.sandboxes.create(SandboxCreate(volumes={"/data": Volume(volume)}))
            with pytest.raises(VolumeInUse, match="commit when that is done"):
                await control.volumes.commit(volume, VolumeCommit(sandbox_id=copy.id))
        assert (await control.volumes.get(volume)).version == 2
        async with control.volume_files.opened(volume, write=True):
            await control.sandboxes.delete(copy.id)
            with pytest.raises(VolumeInUse, match="delete it when that is done"):
                await control.volumes.delete(volume)

    daemon._run(work())


class Links:
    """A guest that has these links in the volume, and `/file` and `/dir`."""

    def __init__(self, links: dict[str, str]) -> None:
        self._links = links

    async def stat(self, place: str) -> FileInfo:
        path = place.removeprefix(ROOT)
        if path not in self._links and path not in ("/file", "/dir", "/dir/file"):
            raise (FileConflict if path.startswith("/file/") else FileMissing)(f"{place}: it is not there")
        fields: dict[str, Any] = {
            "size": 0,
            "mode": 0,
            "owner": "root",
            "group": "root",
            "modified_at": datetime.now(UTC),
        }
        kind = "symlink" if path in self._links else "directory" if path == "/dir" else "file"
        return FileInfo.model_validate(
            {"name": path, "path": place, "type": kind, "target": self._links.get(path), **fields}
        )


def where(path: str, *, follow: bool = True, **links: str) -> str:
    guest = cast(Guest, Links({f"/{name}".replace("__", "/"): target for name, target in links.items()}))
    return asyncio.run(inside(guest, path, follow=follow)).removeprefix(ROOT)


@pytest.mark.parametrize(
    ("path", "links", "place"),
    [
        ("/", {}, ""),
        ("/../../file", {}, "/file"),
        ("dir//file/", {}, "/dir/file"),
        ("/new/below/x", {}, "/new/below/x"),
        ("/file/x", {}, "/file/x"),
        ("/link", {"link": "file"}, "/file"),
        ("/link/file", {"link": "dir"}, "/dir/file"),
        ("/dir/link", {"dir__link": "../other", "other": "./dir/../file"}, "/file"),
        ("/link/x", {"link": "nothing/here"}, "/nothing/here/x"),
        ("/link", {"link": "nothing/../other", "other": "file"}, "/file"),
    ],
)
def test_links_within_a_volume_are_followed(path: str, links: dict[str, str], place: str) -> None:
    assert where(path, **links) == place


def test_the_last_link_of_a_path_is_what_is_described_and_removed() -> None:
    assert where("/a/b", follow=False, a="dir", dir__b="/etc/passwd") == "/dir/b"


@pytest.mark.parametrize(
    ("path", "links"),
    [
        ("/link", {"link": "/etc/passwd"}),
        ("/link/x", {"link": "/"}),
        ("/link/x", {"link": ".."}),
        ("/link", {"link": "dir/../../etc/passwd"}),
        ("/link", {"link": "nothing/../../etc/passwd"}),
        ("/link", {"link": "other", "other": "/etc"}),
        ("/dir/link", {"dir__link": f"..{ROOT}/../../file"}),
    ],
)
def test_links_that_lead_out_of_a_volume_are_refused(path: str, links: dict[str, str]) -> None:
    with pytest.raises(InvalidPath, match=f"^{path}: leads out of the volume"):
        where(path, **links)


@pytest.mark.parametrize(
    "links", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": "./" * 2000 + "x/" * 2000 + "../" * 2000 + "a"}]
)
def test_links_that_lead_nowhere_end(links: dict[str, str]) -> None:
    with pytest.raises(InvalidPath, match="too many links"):
        where("/a", **links)
