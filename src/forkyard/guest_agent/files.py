"""Questions about files and small changes to them: each is done at once, or by a helper program if it may take long."""

from __future__ import annotations

import errno
import os
import stat

from . import accounts, frames
from .failures import Failure, from_os_error, from_program
from .loop import Loop
from .programs import Program
from .session import Task, to_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .session import Stream

_LIST_CHUNK = 32_768
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100
_USER = "user."
_MAX_ATTRIBUTES = 64
_MAX_ATTRIBUTE_BYTES = 4096


def record(path: str, status: os.stat_result | None = None) -> dict[str, Any]:
    if status is None:
        status = os.lstat(path)
    target = None
    if stat.S_ISREG(status.st_mode):
        kind = "file"
    elif stat.S_ISDIR(status.st_mode):
        kind = "directory"
    elif stat.S_ISLNK(status.st_mode):
        kind = "symlink"
        target = os.readlink(path)
    else:
        kind = "other"
    return {
        "path": path,
        "type": kind,
        "size": status.st_size,
        "mode": stat.S_IMODE(status.st_mode),
        "owner": accounts.user_name(status.st_uid),
        "group": accounts.group_name(status.st_gid),
        "mtime_ns": status.st_mtime_ns,
        "target": target,
        "attributes": _attributes(path) if kind in ("file", "directory") else {},
    }


def _attributes(path: str) -> dict[str, str]:
    """What users have noted on it. Not every file system can."""
    found: dict[str, str] = {}
    try:
        for name in os.listxattr(path, follow_symlinks=False):
            if name.startswith(_USER) and len(found) < _MAX_ATTRIBUTES:
                value = os.getxattr(path, name, follow_symlinks=False)[:_MAX_ATTRIBUTE_BYTES]
                found[name[len(_USER) :]] = value.decode("utf-8", "replace")
    except OSError:
        return {}
    return found


def set_attributes(descriptor: int, attributes: dict[str, str]) -> None:
    for name, value in attributes.items():
        os.setxattr(descriptor, _USER + name, value.encode("utf-8", "surrogateescape"))


class ListTask(Task):
    """Entries of a directory as JSON lines, read as the host takes them."""

    def __init__(self, stream: Stream, path: str, depth: int) -> None:
        self._stream = stream
        # Opened here, so that what is no directory fails the request and not the stream.
        self._lines = _lines(path, depth)
        self._pending = next(self._lines, b"")

    def pump(self) -> bool:
        room = self._stream.room()
        lines: list[bytes] = []
        size = 0
        while self._pending and size < _LIST_CHUNK and size + len(self._pending) <= room:
            lines.append(self._pending)
            size += len(self._pending)
            self._pending = next(self._lines, b"")
        if lines:
            self._stream.send(frames.LINES, b"".join(lines))
        if self._pending:
            return self._stream.room() >= len(self._pending)
        self._stream.end({})
        return False


def _lines(path: str, depth: int) -> Iterator[bytes]:
    try:
        entries = os.scandir(path)
    except OSError as error:
        raise from_os_error(error, path) from None
    with entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
                yield to_json(record(entry.path, status)) + b"\n"
            except FileNotFoundError:
                continue  # removed while we look
            if depth > 1 and stat.S_ISDIR(status.st_mode):
                try:
                    yield from _lines(entry.path, depth - 1)
                except Failure:
                    continue  # a directory that vanished, or one we may not read, has no entries


def make_directory(path: str, mode: int, *, parents: bool, account: accounts.Account | None) -> None:
    """With `parents`, one that exists already is fine."""
    try:
        if parents:
            make_parents(path, account)
        os.mkdir(path)
    except FileExistsError as error:
        if parents and os.path.isdir(path):
            return
        raise from_os_error(error, path) from None
    except OSError as error:
        raise from_os_error(error, path) from None
    os.chmod(path, mode)
    if account is not None:
        os.chown(path, account.uid, account.gid)


def make_parents(path: str, account: accounts.Account | None) -> None:
    """All directories above `path`; new ones belong to `account`."""
    parent = os.path.dirname(path)
    if os.path.isdir(parent):
        return
    make_parents(parent, account)
    try:
        os.mkdir(parent, 0o755)
    except FileExistsError:
        if not os.path.isdir(parent):
            raise
        return
    if account is not None:
        os.chown(parent, account.uid, account.gid)


def change_mode(path: str, mode: int) -> None:
    try:
        os.chmod(path, mode)
    except OSError as error:
        raise from_os_error(error, path) from None


class ProgramTask(Task):
    """A request that a helper program carries out."""

    def __init__(self, stream: Stream, loop: Loop, argv: list[str]) -> None:
        self._stream = stream
        self._name = argv[0]
        self._program = Program(loop, argv, self._exited)

    def _exited(self, status: int, stderr: str) -> None:
        if status == 0:
            self._stream.end({})
        else:
            self._stream.fail(from_program(self._name, status, stderr))

    def close(self) -> None:
        self._program.stop()


def remove(stream: Stream, loop: Loop, path: str, *, recursive: bool) -> dict[str, Any] | None:
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return {}
        if path == "/":
            raise Failure("invalid_path", "the root directory cannot be removed")
        os.rmdir(path)
    except OSError as error:
        if not recursive or error.errno != errno.ENOTEMPTY:
            raise from_os_error(error, path) from None
        stream.task = ProgramTask(stream, loop, ["rm", "-rf", "--one-file-system", "--", path])
        return None
    return {}


def move(stream: Stream, loop: Loop, source: str, destination: str, *, overwrite: bool) -> dict[str, Any] | None:
    """`destination` is the new path itself, never a directory to move into."""
    try:
        if overwrite:
            os.rename(source, destination)
        else:
            _rename_no_replace(source, destination)
    except OSError as error:
        if error.errno != errno.EXDEV:
            missing_source = error.errno == errno.ENOENT and not os.path.lexists(source)
            raise from_os_error(error, source if missing_source else destination) from None
        if not overwrite and os.path.lexists(destination):
            raise Failure("file_conflict", f"{destination}: exists") from None
        stream.task = ProgramTask(stream, loop, ["mv", "-fT", "--", source, destination])
        return None
    return {}


def _rename_no_replace(source: str, destination: str) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(destination), _RENAME_NOREPLACE)
    if libc.renameat2(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), destination)
