"""Watching a path with inotify. Owns the kernel's watches of one stream and turns its events into ours."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections import deque

from . import frames
from .failures import Failure, from_os_error
from .loop import IN, Loop, Timer
from .session import Task, to_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .session import Stream

_MODIFY, _ATTRIB, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF, _UNMOUNT, _OVERFLOW, _IGNORED = 0x400, 0x800, 0x2000, 0x4000, 0x8000
_ONLYDIR, _DONT_FOLLOW, _IS_DIRECTORY = 0x1000000, 0x2000000, 0x40000000
_MASK = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF | _MOVE_SELF
_EVENT = struct.Struct("iIII")

_MAX_WAITING = 4096
_MAX_DIRECTORIES = 32_768
#: Both halves of a rename are queued together, but a read may end between them.
_RENAME_GAP_S = 0.02

_libc = ctypes.CDLL(None, use_errno=True)


class WatchTask(Task):
    def __init__(self, stream: Stream, loop: Loop, path: str, *, recursive: bool) -> None:
        self._stream = stream
        self._loop = loop
        self._root = path
        self._recursive = recursive
        self._paths: dict[int, str] = {}  # kernel's watch -> path
        self._waiting: deque[tuple[str, str, str | None]] = deque()
        self._moved: tuple[int, str, bool] | None = None  # first half of a rename: cookie, path, is a directory
        self._moved_timer: Timer | None = None
        self._over = False
        self._fd = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise from_os_error(_last_error(), "inotify")
        try:
            self._add(path)
            if recursive and os.path.isdir(path):
                self._add_below(path, announce=False)
        except BaseException:
            os.close(self._fd)
            raise
        loop.watch(self._fd, IN, self._readable)

    # ── the kernel's watches ─────────────────────────────────────────────────────────────────────────────────────

    def _add(self, path: str, flags: int = 0) -> None:
        if len(self._paths) >= _MAX_DIRECTORIES:
            raise Failure("no_capacity", f"more than {_MAX_DIRECTORIES} directories to watch")
        watch = _libc.inotify_add_watch(self._fd, os.fsencode(path), ctypes.c_uint32(_MASK | flags))
        if watch < 0:
            error = _last_error()
            if error.errno == errno.ENOSPC:
                raise Failure("no_capacity", f"{path}: the sandbox's limit of inotify watches is reached")
            raise from_os_error(error, path)
        self._paths[watch] = path

    def _add_below(self, directory: str, *, announce: bool) -> None:
        """Watch all directories below; `announce` what is in them, for it appeared before it was watched."""
        try:
            entries = list(os.scandir(directory))
        except OSError:
            return  # gone already
        for entry in entries:
            if announce:
                self._emit("created", entry.path)
            if entry.is_dir(follow_symlinks=False):
                self._add_tree(entry.path, announce=announce)

    def _add_tree(self, directory: str, *, announce: bool) -> None:
        try:
            self._add(directory, _ONLYDIR | _DONT_FOLLOW)
        except Failure as failure:
            if failure.code == "no_capacity":
                raise
            return
        self._add_below(directory, announce=announce)

    def _renamed_below(self, old: str, new: str | None) -> None:
        """A directory moved: its watches go with it, or, moved out of sight (None), are removed."""
        for watch, path in list(self._paths.items()):
            if path == old or path.startswith(f"{old}/"):
                if new is None:
                    del self._paths[watch]
                    _libc.inotify_rm_watch(self._fd, watch)
                else:
                    self._paths[watch] = new + path[len(old) :]

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _readable(self, _events: int) -> None:
        try:
            data = os.read(self._fd, 65_536)
        except BlockingIOError:
            return
        position = 0
        while position < len(data) and not self._over:
            watch, mask, cookie, length = _EVENT.unpack_from(data, position)
            position += _EVENT.size
            name = os.fsdecode(data[position : position + length].rstrip(b"\0"))
            position += length
            try:
                self._event(watch, mask, cookie, name)
            except Failure as failure:
                self._stream.fail(failure)
                return
        self._stream.schedule()

    def _event(self, watch: int, mask: int, cookie: int, name: str) -> None:
        if mask & _OVERFLOW:
            self._emit("overflow", self._root)
            return
        directory = self._paths.get(watch)
        if directory is None:
            return
        if mask & _IGNORED:
            del self._paths[watch]
            return
        if mask & (_DELETE_SELF | _MOVE_SELF | _UNMOUNT):
            if directory == self._root:
                self._emit("deleted", directory)
                self._over = True
            return  # others are told by their parent
        path = f"{directory.rstrip('/')}/{name}" if name else directory
        is_directory = bool(mask & _IS_DIRECTORY)
        if mask & _MOVED_TO and self._moved is not None and self._moved[0] == cookie:
            source = self._moved[1]
            self._moved = None
            self._emit("moved", source, path)
            if is_directory:
                self._renamed_below(source, path)
            return
        self._settle_move()
        if mask & _MOVED_FROM:
            self._moved = cookie, path, is_directory
            self._moved_timer = self._loop.later(_RENAME_GAP_S, self._settle_move)
        elif mask & (_CREATE | _MOVED_TO):
            self._emit("created", path)
            if is_directory and self._recursive:
                self._add_tree(path, announce=True)
        elif mask & _DELETE:
            self._emit("deleted", path)
        elif mask & _MODIFY:
            self._emit("modified", path)
        elif mask & _ATTRIB and (not is_directory or name or directory == self._root):
            self._emit("attributes", path)

    def _settle_move(self) -> None:
        """The other half did not come: it went somewhere nobody watches."""
        if self._moved_timer is not None:
            self._moved_timer.cancel()
            self._moved_timer = None
        if self._moved is not None:
            _, path, is_directory = self._moved
            self._moved = None
            self._emit("deleted", path)
            if is_directory:
                self._renamed_below(path, None)
            self._stream.schedule()

    def _emit(self, kind: str, path: str, to: str | None = None) -> None:
        event = (kind, path, to)
        waiting = self._waiting
        if waiting and waiting[-1] == event:
            return  # a file that is written to all the time is one that was modified
        if len(waiting) >= _MAX_WAITING:
            if waiting[-1][0] != "overflow":
                waiting.append(("overflow", self._root, None))
            return
        waiting.append(event)

    def pump(self) -> bool:
        lines: list[bytes] = []
        size = 0
        while self._waiting:
            kind, path, to = self._waiting[0]
            line = to_json({"type": kind, "path": path, "to": to}) + b"\n"
            if size + len(line) > self._stream.room():
                break
            self._waiting.popleft()
            lines.append(line)
            size += len(line)
        if lines:
            self._stream.send(frames.LINES, b"".join(lines))
        elif self._over and not self._waiting:
            self._stream.end({})
            return False
        return bool(lines) and (bool(self._waiting) or self._over)

    def close(self) -> None:
        if self._moved_timer is not None:
            self._moved_timer.cancel()
        self._loop.unwatch(self._fd)
        os.close(self._fd)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
