"""What an archive becomes in a repository: a tree, and a commit of it. Blocking.

Nothing is ever unpacked onto the disk: its files become blobs, whatever their names say. Archives are strangers': what one
takes of memory and time is bounded, and no file is in memory as a whole.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
import zipfile
from collections.abc import Generator
from dataclasses import dataclass
from typing import IO, Literal

from forkyard.control.identities import Principal
from forkyard.errors import InvalidRequest, RepoFull
from forkyard.git.commits import MAX_LINK_BYTES
from forkyard.git.objects import EXECUTABLE, FILE, SYMLINK, PackWriter
from forkyard.git.refs import signed
from forkyard.git.trees import first_commit, new_tree
from forkyard.images import archives
from forkyard.models.git import Person

#: What an archive that is not whole, or none, leads to.
BROKEN = (*archives.BROKEN, zipfile.BadZipFile, ValueError, RuntimeError)
MAX_MEMBERS = 200_000
#: Directories above all files, each counted again for each file: they are held in memory.
MAX_ABOVE = 2_000_000
#: Of a zip archive's list of its files.
MAX_LIST_BYTES = 64 * 2**20
#: What an archive comes to when it is unpacked, also what is skipped of it. What is taken is bounded by the quota.
MAX_UNPACKED_BYTES = 64 * 2**30


@dataclass(frozen=True)
class Archive:
    file: IO[bytes]
    kind: Literal["tar", "zip"]
    strip: int
    message: str
    author: Person | None
    directory: str | None = None  # of what is left after `strip`


def imported(archive: Archive, pack: PackWriter, by: Principal, most_bytes: int) -> str:
    """Blocking: the commit that an archive becomes."""
    edit = new_tree()
    files: dict[str, tuple[int, str]] = {}  # of the archive, by the names they have there
    members = _tar_members if archive.kind == "tar" else _zip_members
    empty, above = True, 0
    with contextlib.closing(members(archive.file, most_bytes)) as found:
        for member in found:
            name = _placed(member.path, archive.strip, archive.directory)
            if name is None:
                continue
            above += name.count("/")
            if above > MAX_ABOVE:
                raise InvalidRequest(
                    "the files of the archive lie too deep, and are too many; push it with git instead"
                )
            if member.content is not None:
                files[member.path] = member.mode, pack.add_blob(member.content, member.size)
            elif member.same_as not in files:
                raise InvalidRequest(f"{member.path!r} is a link to {member.same_as!r}, which is no file before it")
            else:
                files[member.path] = files[member.same_as]
            empty = False
            if edit.entry(name) is not None:
                edit.delete(name)  # the later one of two wins, as it does when unpacked
            edit.put(name, *files[member.path], careful=False)
            if pack.size_bytes > most_bytes:
                raise RepoFull(f"the archive does not fit: the quota is {most_bytes} bytes")
    if archive.directory is not None and empty:
        raise InvalidRequest(f"the archive has nothing below {archive.directory!r}", field="directory")
    return first_commit(edit, pack, signed(archive.author, by), archive.message)


@dataclass(frozen=True)
class _Member:
    """A file, read before the next one is asked for; or a link, or another name of a file before it."""

    path: str
    mode: int = FILE
    content: IO[bytes] | None = None
    size: int = 0
    same_as: str | None = None


def _tar_members(file: IO[bytes], most_bytes: int) -> Generator[_Member, None, None]:
    room = most_bytes
    with tarfile.open(fileobj=file, mode="r:*", tarinfo=archives.Member) as archive:
        for info in archives.members(archive, most=MAX_MEMBERS, most_bytes=MAX_UNPACKED_BYTES):
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep all that it has seen
            room = _counted(info.name, info.size, room)
            name = info.name.removeprefix("./").rstrip("/")
            if info.isdir():
                continue
            if info.issym():
                yield _link(name, info.linkname.encode("utf-8", "surrogateescape"))
            elif info.islnk():
                yield _Member(name, same_as=info.linkname.removeprefix("./"))
            elif info.isreg():
                yield _Member(name, _mode(info.mode), archive.extractfile(info), info.size)
            else:
                raise InvalidRequest(f"{info.name!r} is a device or a pipe; a repository holds files", path=info.name)


class _Sips(io.BufferedReader):
    """A file of which only so much is taken into memory at once: the list at the end of a zip archive may be all of it."""

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = MAX_LIST_BYTES + 1 if size is None or size < 0 else size
        data = bytearray()
        while len(data) < wanted and (piece := super().read(min(wanted - len(data), 1 << 20))):
            data += piece
            if len(data) > MAX_LIST_BYTES:
                raise zipfile.BadZipFile(f"its list of files has more than {MAX_LIST_BYTES} bytes")
        return bytes(data)


def _zip_members(file: IO[bytes], most_bytes: int) -> Generator[_Member, None, None]:
    room = most_bytes
    with _Sips(io.FileIO(os.dup(file.fileno()))) as sips, zipfile.ZipFile(sips) as archive:
        for count, info in enumerate(archive.infolist()):
            if count >= MAX_MEMBERS:
                raise InvalidRequest(f"an archive has at most {MAX_MEMBERS} files; push it with git instead")
            room = _counted(info.filename, info.file_size, room)
            if info.is_dir():
                continue
            mode = info.external_attr >> 16
            name = info.filename.removeprefix("./")
            with archive.open(info) as content:
                # What it says of its size may be a lie.
                if stat.S_ISLNK(mode):
                    yield _link(name, content.read(MAX_LINK_BYTES + 1))
                else:
                    yield _Member(name, _mode(mode), content, info.file_size)


def _mode(mode: int) -> int:
    return EXECUTABLE if mode & 0o100 else FILE


def _counted(name: str, size: int, room: int) -> int:
    if size > room:
        raise RepoFull(f"the archive does not fit: with {name!r} it exceeds the quota, unpacked")
    return room - size


def _link(name: str, target: bytes) -> _Member:
    if not target or b"\0" in target or len(target) > MAX_LINK_BYTES:
        raise InvalidRequest(f"the symlink {name!r} does not hold a path", path=name)
    return _Member(name, SYMLINK, io.BytesIO(target), len(target))


def _placed(path: str, strip: int, directory: str | None) -> str | None:
    """Without its first parts and the directory; None if nothing is left, or it is elsewhere. A path that leads out is
    refused before any is taken off."""
    if path.startswith("/") or ".." in path.split("/"):
        raise InvalidRequest(f"the archive has an entry {path!r}, which leads out of it", path=path)
    name = "/".join(path.split("/")[strip:])
    if directory is not None:
        name = name.removeprefix(f"{directory}/") if name.startswith(f"{directory}/") else ""
    return name or None
