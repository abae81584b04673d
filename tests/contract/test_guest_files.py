"""Files under the real agent: odd names, full disks, hostile archives, watches."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from forkyard.errors import FileConflict, FileMissing, GuestDiskFull, InvalidPath, InvalidRequest
from forkyard.guest.base import Guest
from forkyard.guest.client import connect
from forkyard.guest.local import LocalAgent
from forkyard.models import WatchEvent

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(os.getuid() != 0, reason="the agent runs as root")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def guest(tmp_path: Path, front: Path | None) -> AsyncIterator[Guest]:
    (tmp_path / "agent").mkdir()
    async with LocalAgent(tmp_path / "agent", front) as agent:
        guest = await connect(agent.socket, timeout_s=10)
        yield guest
        await guest.aclose()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "files"
    path.mkdir()
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def content(guest: Guest, path: str | Path, **options: int) -> bytes:
    async with guest.read_file(str(path), **options) as chunks:
        return b"".join([chunk async for chunk in chunks])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def tars_in(directory: Path) -> list[Path]:
    """Processes of tar that work on this directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[0] == b"tar" and os.fsencode(directory) in words:
                found.append(process)
    return found


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.uid = kind, target, mode, 4711
    return info


async def test_a_large_file_arrives_as_it_was_sent(guest: Guest, root: Path) -> None:
    data = os.urandom(5 << 20) + b"end"
    await guest.write_file(f"{root}/big", pieces(data[:1], data[1 : 1 << 20], b"", data[1 << 20 :]))
    assert (root / "big").read_bytes() == data
    assert await content(guest, root / "big") == data


async def test_names_that_are_not_utf_8_can_be_listed_read_moved_and_removed(guest: Guest, root: Path) -> None:
    raw = os.fsencode(root) + b"/caf\xe9 \xff\n.txt"
    Path(os.fsdecode(raw)).write_bytes(b"latin")
    (info,) = await guest.list_dir(str(root))
    assert info.path.encode() and info.size == 5
    assert await content(guest, info.path) == b"latin"
    assert await guest.stat(info.path) == info
    await guest.move(info.path, f"{info.path}\uf7fe")
    assert names(root) == [os.fsdecode(b"caf\xe9 \xff\n.txt\xfe")]
    await guest.remove(f"{info.path}\uf7fe")
    assert names(root) == []


async def test_a_full_disk_is_said_and_leaves_the_old_file(guest: Guest, small_disk: Path) -> None:
    (small_disk / "old").write_bytes(b"old")
    with pytest.raises(GuestDiskFull):
        await guest.write_file(f"{small_disk}/old", pieces(*[bytes(1 << 18)] * 16))
    assert (small_disk / "old").read_bytes() == b"old"
    assert names(small_disk) == ["old"]
    data = archive((member("big"), bytes(2 << 20)))
    with pytest.raises(GuestDiskFull):
        await guest.upload_tar(str(small_disk), pieces(data))


async def test_a_move_between_disks_copies(guest: Guest, root: Path, small_disk: Path) -> None:
    (root / "dir").mkdir()
    (root / "dir" / "f").write_bytes(b"x")
    await guest.move(f"{root}/dir", f"{small_disk}/moved")
    assert (small_disk / "moved" / "f").read_bytes() == b"x"
    assert not (root / "dir").exists()
    with pytest.raises(FileMissing):
        await guest.move(f"{root}/dir", f"{small_disk}/again")


async def test_writing_through_a_symlink_keeps_the_link(guest: Guest, root: Path) -> None:
    (root / "target").write_bytes(b"old")
    (root / "link").symlink_to("target")
    await guest.write_file(f"{root}/link", pieces(b"new"))
    assert (root / "link").is_symlink() and (root / "target").read_bytes() == b"new"
    info = await guest.stat(f"{root}/link")
    assert (info.type, info.target) == ("symlink", "target")


async def test_new_files_and_directories_belong_to_the_user_named(guest: Guest, root: Path) -> None:
    info = await guest.write_file(f"{root}/a/b/f", pieces(b"x"), user="nobody")
    assert info.owner == "nobody"
    assert (root / "a" / "b").owner() == "nobody"
    assert (await guest.write_file(f"{root}/a/b/f", pieces(b"y"))).owner == "nobody"


async def test_only_regular_files_are_read_and_written(guest: Guest, root: Path) -> None:
    os.mkfifo(root / "fifo")
    for ask in (content(guest, root / "fifo"), guest.write_file(f"{root}/fifo", pieces(b""))):
        with pytest.raises(FileConflict):
            async with asyncio.timeout(5):
                await ask


async def test_files_of_proc_are_read_though_their_size_is_zero(guest: Guest) -> None:
    assert b"Linux" in await content(guest, "/proc/version")


async def test_a_path_may_start_at_home_and_go_up(guest: Guest) -> None:
    assert (await guest.stat("~")).path == "/root"
    assert (await guest.stat("~/../etc/passwd")).path == "/etc/passwd"
    assert (await guest.stat(".")).path == "/root"
    assert (await guest.stat("/etc//./passwd/")).path == "/etc/passwd"


@pytest.mark.parametrize("path", ["x" * 5000, "/" + "y" * 300])
async def test_a_path_too_long_is_invalid(guest: Guest, path: str) -> None:
    with pytest.raises(InvalidPath):
        await guest.stat(path)


async def test_a_large_directory_is_listed_whole(guest: Guest, root: Path) -> None:
    for number in range(3000):
        (root / f"{number:04}").touch()
    assert [info.name for info in sorted(await guest.list_dir(str(root)), key=lambda info: info.name)] == [
        f"{number:04}" for number in range(3000)
    ]


async def test_a_tree_is_removed_without_following_links_out_of_it(guest: Guest, root: Path) -> None:
    (root / "keep").mkdir()
    (root / "keep" / "f").touch()
    (root / "tree" / "sub").mkdir(parents=True)
    (root / "tree" / "link").symlink_to(root / "keep")
    await guest.remove(f"{root}/tree", recursive=True)
    assert names(root) == ["keep"] and (root / "keep" / "f").exists()
    with pytest.raises(InvalidPath):
        await guest.remove("/", recursive=True)


@pytest.mark.parametrize(
    "members",
    [
        [(member("../escaped"), b"x")],
        [(member("a/../../escaped"), b"x")],
        [(member("link", tarfile.SYMTYPE, "{root}"), b""), (member("link/escaped"), b"x")],
        [(member("link", tarfile.SYMTYPE, ".."), b""), (member("link/escaped"), b"x")],
    ],
    ids=["dot dot", "hidden dot dot", "absolute symlink", "relative symlink"],
)
async def test_no_archive_writes_outside_its_directory(
    guest: Guest, root: Path, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    for info, _ in members:
        info.linkname = info.linkname.replace("{root}", str(root))
    with pytest.raises((InvalidRequest, FileConflict)):
        await guest.upload_tar(f"{root}/in", pieces(archive(*members)))
    assert names(root) in ([], ["in"])


async def test_absolute_members_and_hard_links_stay_inside(guest: Guest, root: Path) -> None:
    (root / "secret").write_text("secret")
    inside = member(f"{root}/abs")
    await guest.upload_tar(f"{root}/in", pieces(archive((inside, b"x"))))
    assert (root / "in" / str(root).lstrip("/") / "abs").read_bytes() == b"x"
    with pytest.raises(InvalidRequest):
        await guest.upload_tar(f"{root}/in2", pieces(archive((member("h", tarfile.LNKTYPE, "../secret"), b""))))
    assert not (root / "in2" / "h").exists()


async def test_what_an_archive_brings_belongs_to_the_user_and_links_are_kept(guest: Guest, root: Path) -> None:
    (root / "in").mkdir()
    os.chown(root / "in", 65534, 65534)
    root.parent.parent.chmod(0o755)
    root.parent.chmod(0o755)
    data = archive((member("f", mode=0o755), b"x"), (member("abs", tarfile.SYMTYPE, "/usr/bin/env"), b""))
    await guest.upload_tar(f"{root}/in", pieces(data))
    assert (root / "in" / "f").owner() == "root"
    assert (root / "in" / "f").stat().st_mode & 0o777 == 0o755
    assert (root / "in" / "abs").readlink() == Path("/usr/bin/env")


async def test_bytes_that_are_no_archive_are_refused(guest: Guest, root: Path) -> None:
    with pytest.raises(InvalidRequest):
        await guest.upload_tar(f"{root}/in", pieces(os.urandom(20_000)))


async def test_an_abandoned_download_leaves_no_process(guest: Guest, root: Path) -> None:
    (root / "big").write_bytes(bytes(32 << 20))
    async with guest.download_tar(str(root)) as chunks:
        await anext(chunks)
        assert tars_in(root)
    async with asyncio.timeout(10):
        while tars_in(root):
            await asyncio.sleep(0.02)
    assert len(await content(guest, root / "big", length=10)) == 10


async def take(events: AsyncIterator[WatchEvent], wanted: tuple[str, str]) -> list[tuple[str, str]]:
    """Events up to the wanted one."""
    seen: list[tuple[str, str]] = []
    async with asyncio.timeout(10):
        async for event in events:
            seen.append((event.type, event.path))
            if seen[-1] == wanted:
                return seen
    raise AssertionError(f"{wanted} did not come: {seen}")


async def test_a_recursive_watch_follows_directories_as_they_come_move_and_go(guest: Guest, root: Path) -> None:
    (root / "old").mkdir()
    async with guest.watch(str(root), recursive=True) as events:
        (root / "old" / "f").write_text("x")
        await take(events, ("modified", f"{root}/old/f"))
        (root / "a" / "b" / "c").mkdir(parents=True)
        (root / "a" / "b" / "c" / "f").touch()
        await take(events, ("created", f"{root}/a/b/c/f"))
        (root / "a").rename(root / "z")
        (root / "z" / "b" / "c" / "f").write_text("y")
        await take(events, ("modified", f"{root}/z/b/c/f"))
        (root / "z").rename(root.parent / "out")
        await take(events, ("deleted", f"{root}/z"))
        (root.parent / "out" / "unseen").touch()
        (root / "seen").touch()
        assert ("created", f"{root}/z/unseen") not in await take(events, ("created", f"{root}/seen"))


async def test_a_watched_file_reports_changes_and_its_end_ends_the_watch(guest: Guest, root: Path) -> None:
    (root / "f").touch()
    async with guest.watch(f"{root}/f") as events:
        (root / "f").write_text("x")
        await take(events, ("modified", f"{root}/f"))
        (root / "f").chmod(0o600)
        await take(events, ("attributes", f"{root}/f"))
        (root / "f").unlink()
        await take(events, ("deleted", f"{root}/f"))
        assert [event async for event in events] == []


async def test_too_much_for_a_watcher_who_does_not_read_is_an_overflow(guest: Guest, root: Path) -> None:
    async with guest.watch(str(root)) as events:
        for number in range(20_000):
            (root / f"{number}").touch()
        await guest.ping()
        await take(events, ("overflow", str(root)))


async def test_a_watch_of_nothing_is_refused(guest: Guest, root: Path) -> None:
    with pytest.raises(FileMissing):
        async with guest.watch(f"{root}/nothing"):
            pass


async def test_values_out_of_range_are_refused(guest: Guest, root: Path) -> None:
    for ask in (guest.chmod(str(root), 0o10000), guest.list_dir(str(root), depth=0), guest.mkdir(f"{root}/x", mode=-1)):
        with pytest.raises(InvalidRequest):
            await ask
