"""`python -m forkyard.images.unpack ROOT TASK`: layers, one over the other, into a root directory.

Owns: the tar entries of layers, whiteouts, and what is put over them. A program of its own that locks itself into ROOT
before it reads the first entry: wherever a name or a link leads, it leads below ROOT. TASK is a JSON file
that says what to do; how it went is told on stdout, as JSON.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import posixpath
import shutil
import stat
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

from forkyard.errors import InvalidRequest
from forkyard.images.archives import Member, members

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
MAX_ENTRIES = 2_000_000
_CHUNK_BYTES = 1 << 20
#: Of one file, as its header says it: the stream has a bound of its own, but what is skipped is looked for to its end.
_MAX_FILE_BYTES = 1 << 37
#: What entries that do not fit together, or on any disk, come to.
_UNFIT = frozenset(
    [
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
    ]
)
_XATTRS = ("user.", "security.capability")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class Refused(Exception):
    """The image is not one."""


class Room:
    """What all layers may still come to."""

    def __init__(self, most_bytes: int) -> None:
        self.left_bytes = most_bytes


class Measured:
    """A stream that counts and hashes what is read from it."""

    def __init__(self, chunks: Iterator[bytes], room: Room) -> None:
        self._chunks, self._room, self._ahead = chunks, room, b""
        self.hashed = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        while size < 0 or len(self._ahead) < size:
            chunk = next(self._chunks, b"")
            if not chunk:
                break
            self._room.left_bytes -= len(chunk)
            if self._room.left_bytes < 0:
                raise Refused("the image is larger than this host takes")
            self.hashed.update(chunk)
            self._ahead += chunk
        taken, self._ahead = (self._ahead, b"") if size < 0 else (self._ahead[:size], self._ahead[size:])
        return taken


def _inflated(file: IO[bytes]) -> Iterator[bytes]:
    """A gzip stream, of one member or several."""
    inflater = zlib.decompressobj(wbits=31)
    whole = False
    while chunk := file.read(_CHUNK_BYTES):
        while chunk:
            if whole:
                inflater, whole = zlib.decompressobj(wbits=31), False
            try:
                data = inflater.decompress(chunk, _CHUNK_BYTES)
            except zlib.error as error:
                raise Refused(f"a layer cannot be unpacked: {error}") from None
            if data:
                yield data
            chunk = inflater.unconsumed_tail
            if inflater.eof:
                whole, chunk = True, inflater.unused_data.lstrip(b"\0")
    if not whole:
        raise Refused("a layer is cut off")


def _plain(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _said(program: subprocess.Popen[bytes]) -> Iterator[bytes]:
    assert program.stdout is not None
    yield from _plain(program.stdout)
    if program.wait() != 0:
        raise Refused("a layer is cut off, or cannot be unpacked")


def opened(path: str) -> Iterator[bytes]:
    """A layer, uncompressed. Programs that are needed for it are started now."""
    file: IO[bytes] = open(path, "rb", buffering=0)  # noqa: SIM115
    magic = file.read(4)
    file.seek(0)
    if magic.startswith(_GZIP):
        return _inflated(file)
    if magic == _ZSTD:
        # It goes on where we are in the file: nothing of that may have been read ahead.
        return _said(subprocess.Popen(["zstd", "-dcq"], stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
    return _plain(file)


class Root:
    """Entries of layers on disk. The process is locked into it: paths are absolute, and links may lead anywhere."""

    def __init__(self) -> None:
        self._entries = 0
        self._made: set[str] = set()

    def layer(self, stream: Measured, diff_id: str | None) -> None:
        self._made = set()
        try:
            with tarfile.open(fileobj=stream, mode="r|", errorlevel=2, tarinfo=Member) as archive:  # type: ignore[call-overload]
                for member in members(archive, most=MAX_ENTRIES, most_bytes=_MAX_FILE_BYTES):
                    archive.members.clear()  # it would keep all that it has seen
                    self._entries += 1
                    if self._entries > MAX_ENTRIES:
                        raise Refused(f"the image has more than {MAX_ENTRIES} files")
                    try:
                        self._entry(archive, member)
                    except (ValueError, OverflowError) as error:
                        raise Refused(f"{member.name[:200]!r} cannot be unpacked: {error}") from None
                    except OSError as error:
                        if error.errno in _UNFIT:
                            raise Refused(f"{member.name[:200]!r} cannot be unpacked: {error.strerror}") from None
                        raise
        except InvalidRequest as error:
            raise Refused(f"a layer cannot be taken: {error.message}") from None
        except (tarfile.TarError, EOFError, RecursionError, ValueError) as error:
            raise Refused(f"a layer is cut off or no tar archive: {error}") from None
        while stream.read(_CHUNK_BYTES):
            pass
        found = f"sha256:{stream.hashed.hexdigest()}"
        if diff_id is not None and found != diff_id:
            raise Refused(f"a layer is {found}, and not {diff_id}; the image is cut off or changed")

    def _entry(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = _checked(member.name)
        parent, name = posixpath.split(path)
        if name == OPAQUE:
            self._clear(parent)
        elif name.startswith(WHITEOUT):
            gone = name.removeprefix(WHITEOUT)
            if gone in ("", ".", ".."):
                raise Refused(f"{member.name!r} takes away what is no file")
            _remove(posixpath.join(parent, gone))
        elif path != "/":
            _directory(parent)
            self._make(archive, member, path)
            self._made.add(path)
        else:
            os.chown("/", member.uid, member.gid)
            os.chmod("/", member.mode & 0o7777)

    def _make(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if not (member.isdir() and os.path.isdir(path)):
            _remove(path)
        if member.isdir():
            if not os.path.isdir(path):
                os.mkdir(path)
        elif member.isreg():
            with open(path, "xb") as out:
                content = archive.extractfile(member)
                assert content is not None
                shutil.copyfileobj(content, out, _CHUNK_BYTES)
        elif member.issym():
            os.symlink(member.linkname, path)
        elif member.islnk():
            target = _checked(member.linkname)
            try:
                os.link(target, path, follow_symlinks=False)
            except OSError as error:
                raise Refused(f"{member.name} is a link to {member.linkname}, which is not there: {error}") from None
            return
        elif member.isfifo():
            os.mkfifo(path)
        elif member.ischr() or member.isblk():
            kind = stat.S_IFCHR if member.ischr() else stat.S_IFBLK
            os.mknod(path, kind | 0o600, os.makedev(member.devmajor, member.devminor))
        else:
            raise Refused(f"{member.name} is of a kind that no image has")
        _settle(path, member)

    def _clear(self, directory: str) -> None:
        """What layers below had in it."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(directory):
                path = posixpath.join(directory, name)
                if path not in self._made and not any(made.startswith(f"{path}/") for made in self._made):
                    _remove(path)


def _settle(path: str, member: tarfile.TarInfo) -> None:
    os.chown(path, member.uid, member.gid, follow_symlinks=False)
    if member.issym():
        return
    os.chmod(path, member.mode & 0o7777)  # after the owner: changing that clears the set-user-id bit
    for key, value in member.pax_headers.items():
        name = key.removeprefix("SCHILY.xattr.")
        if name != key and name.startswith(_XATTRS):
            with contextlib.suppress(OSError):
                os.setxattr(path, name, value.encode("utf-8", "surrogateescape"))
    mtime = max(0.0, min(float(member.mtime), 2.0**32))
    os.utime(path, (mtime, mtime))


def _checked(name: str) -> str:
    """Absolute from here on, for here is the root."""
    parts = name.split("/")
    if ".." in parts or name.startswith("/") or "\0" in name:
        raise Refused(f"{name!r} leads out of the image")
    return posixpath.normpath("/" + name)


def _directory(path: str) -> None:
    """With all above it. A link to one that is not there, such as `sbin -> usr/sbin`, leads there from now on."""
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, FileNotFoundError):
        try:
            os.makedirs(os.path.realpath(path), exist_ok=True)
        except RecursionError:
            raise Refused(f"{path[:200]!r} leads through too many links") from None


def _remove(path: str) -> None:
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        raise Refused(f"{path!r} lies below a file") from None


def _finish(files: dict[str, str], links: dict[str, str], defaults: dict[str, str], workdir: str) -> bool:
    """What makes a machine of it. Returns whether systemd is in it."""
    systemd = next((path for path in ("/usr/lib/systemd/systemd", "/lib/systemd/systemd") if _runs(path)), None)
    if systemd is not None:
        files = {**files, "/opt/forkyard/system": systemd + "\n"}
    for name in ("proc", "sys", "dev", "run", "tmp", "etc", "root"):
        if not os.path.isdir(f"/{name}"):
            _remove(f"/{name}")
            os.mkdir(f"/{name}", 0o700 if name == "root" else 0o755)
            if name == "tmp":
                os.chmod("/tmp", 0o1777)
    try:
        _directory(workdir)  # Docker makes it, too
    except OSError as error:
        raise Refused(f"the image's working directory {workdir[:200]!r} cannot be made: {error.strerror}") from None
    for path, content in {
        **files,
        **{path: text for path, text in defaults.items() if not os.path.lexists(path)},
    }.items():
        _directory(posixpath.dirname(path))
        _remove(path)
        with open(path, "x") as out:
            out.write(content)
        os.chmod(path, 0o644)
    for path, target in links.items():
        _directory(posixpath.dirname(path))
        _remove(path)
        os.symlink(target, path)
    return systemd is not None


def _runs(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and bool(status.st_mode & 0o111)


def main() -> None:
    with open(sys.argv[2]) as file:
        task: dict[str, Any] = json.load(file)
    room = Room(int(task["most_bytes"]))
    layers = [(Measured(opened(one["blob"]), room), one["diff_id"]) for one in task["layers"]]
    runtime = Measured(opened(task["runtime"]), room)
    os.umask(0o022)
    os.chroot(sys.argv[1])
    os.chdir("/")
    try:
        root = Root()
        for stream, diff_id in layers:
            root.layer(stream, diff_id)
        root.layer(runtime, None)
        systemd = _finish(task["files"], task["links"], task["defaults"], task["workdir"])
        answer: dict[str, Any] = {"systemd": systemd}
    except Refused as error:
        answer = {"refused": str(error)}
    except OSError as error:
        told = f"{error.strerror}: {error.filename!r}"
        answer = {"refused": f"it makes no machine: {told}"} if error.errno in _UNFIT else {"failed": told}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
