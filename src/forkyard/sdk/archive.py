"""Directories as tar streams, both ways. Blocking code; the async client runs it in threads.

What comes out of a sandbox is untrusted: nothing may be written outside the destination, through a link or otherwise,
and no device or set-uid file is made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from forkyard.errors import InvalidPath

CHUNK_BYTES = 256 * 1024
_BLOCK = 512


def read_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


@contextlib.contextmanager
def incoming(target: Path, mode: int) -> Iterator[IO[bytes]]:
    """A file to write that becomes `target` when the block ends well, and vanishes when it does not."""
    with tempfile.NamedTemporaryFile(dir=target.absolute().parent, prefix=f".{target.name}.", delete=False) as part:
        try:
            yield part
            part.flush()
            os.fchmod(part.fileno(), mode)
            Path(part.name).replace(target)
        except BaseException:
            Path(part.name).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def spool_beside(target: Path) -> Iterator[IO[bytes]]:
    """A nameless file on the disk that will hold `target`: /tmp may be small."""
    parent = target.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=parent) as spool:
        yield spool


def pack(root: Path) -> Iterator[bytes]:
    """A tar stream of what is in the directory `root`; names are relative to it. Sockets and devices are left out."""
    yield from _pack_tree(root, "")
    yield bytes(2 * _BLOCK)


def _pack_tree(directory: Path, prefix: str) -> Iterator[bytes]:
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        path, name = Path(entry.path), prefix + entry.name
        info = tarfile.TarInfo(name)
        status = entry.stat(follow_symlinks=False)
        info.mode, info.mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
        if entry.is_symlink():
            info.type, info.linkname = tarfile.SYMTYPE, str(path.readlink())
            yield _header(info)
        elif entry.is_dir():
            info.type = tarfile.DIRTYPE
            yield _header(info)
            yield from _pack_tree(path, name + "/")
        elif entry.is_file():
            yield from _pack_file(path, info)


def _pack_file(path: Path, info: tarfile.TarInfo) -> Iterator[bytes]:
    with path.open("rb") as file:
        # The header promises the size: a file that changes while it is read must not change the stream's shape.
        info.size = left = os.fstat(file.fileno()).st_size
        yield _header(info)
        while left:
            chunk = file.read(min(CHUNK_BYTES, left)) or bytes(min(CHUNK_BYTES, left))
            left -= len(chunk)
            yield chunk
    yield bytes(-info.size % _BLOCK)


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def unpack(source: IO[bytes], root: Path) -> None:
    """Write the tar archive `source` into the directory `root`, which is made if it is missing."""
    source.seek(0)
    root.mkdir(parents=True, exist_ok=True)
    directories: list[tuple[Path, int]] = []
    made: dict[str, Path] = {}
    with tarfile.open(fileobj=source, mode="r:") as archive:
        for member in archive:
            name = member.name.strip("/") if member.name != "." else ""
            parts = [part for part in name.split("/") if part not in ("", ".")]
            if ".." in parts or member.name.startswith("/"):
                raise InvalidPath(
                    f"The sandbox sent an archive with the unsafe name {member.name!r}.", path=member.name
                )
            if not parts:
                continue
            target = root.joinpath(*parts)
            _refuse_links_above(root, parts)
            if member.isdir():
                if target.is_symlink() or (target.exists() and not target.is_dir()):
                    target.unlink()
                target.mkdir(parents=True, exist_ok=True)
                # Set last: a read-only directory could not be filled.
                directories.append((target, member.mode & 0o777))
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir() and not target.is_symlink():
                raise InvalidPath(f"{target} is a directory here, and a file in the sandbox.", path=str(target))
            target.unlink(missing_ok=True)
            if member.issym():
                target.symlink_to(member.linkname)
            elif member.islnk():
                original = made.get("/".join(part for part in member.linkname.split("/") if part not in ("", ".")))
                if original is None:
                    raise InvalidPath(
                        f"The archive's hard link {member.name!r} points to nothing in it.", path=member.name
                    )
                os.link(original, target, follow_symlinks=False)
            elif member.isreg() and (content := archive.extractfile(member)) is not None:
                with target.open("xb") as out:
                    shutil.copyfileobj(content, out, CHUNK_BYTES)
                    os.fchmod(out.fileno(), member.mode & 0o777)
                os.utime(target, (member.mtime, member.mtime))
                made["/".join(parts)] = target
    for directory, mode in reversed(directories):
        directory.chmod(mode)


def _refuse_links_above(root: Path, parts: list[str]) -> None:
    above = root
    for part in parts[:-1]:
        above = above / part
        if above.is_symlink():
            raise InvalidPath(
                f"{above} is a link; what the sandbox sent would be written through it. Remove it first.",
                path=str(above),
            )
