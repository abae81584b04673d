"""`filesystem.Filesystem` of envd."""

from __future__ import annotations

import contextlib
import posixpath
import stat
from datetime import UTC

from starlette.requests import Request

from forkyard.compat.e2b import connect, metadata, users
from forkyard.compat.e2b.connect import Message
from forkyard.compat.e2b.errors import Failed, about
from forkyard.control.plane import ControlPlane
from forkyard.errors import CommandNotFound, FileConflict, FileMissing, ForkyardError, NotFound
from forkyard.guest.base import Guest
from forkyard.models import FileInfo

_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY"}
_MAX_HOPS = 8
_MAX_DEPTH = 64


class Files:
    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def stat(self, sandbox_id: str, request: Request, message: Message) -> Message:
        path = self._path(request, message)
        async with self._control.sandboxes.use(sandbox_id) as guest:
            return {"entry": await entry(guest, await _stat(guest, path))}

    async def list_dir(self, sandbox_id: str, request: Request, message: Message) -> Message:
        path, depth = self._path(request, message), connect.whole(message.get("depth") or 1)
        if depth is None or depth < 0:
            raise Failed("invalid_argument", "depth is a number, 0 or more")
        async with self._control.sandboxes.use(sandbox_id) as guest:
            try:
                found = await guest.list_dir(path, depth=min(depth or 1, _MAX_DEPTH))
            except FileConflict:
                raise Failed("invalid_argument", f"path is not a directory: {path}") from None
            found.sort(key=lambda one: one.path.split("/"))
            return {"entries": [await entry(guest, one) for one in found]}

    async def make_dir(self, sandbox_id: str, request: Request, message: Message) -> Message:
        user, path = self._user(request), self._path(request, message)
        async with self._control.sandboxes.use(sandbox_id) as guest:
            found = await _look(guest, path)
            if found is not None:
                if found["type"] == "FILE_TYPE_DIRECTORY":
                    raise Failed("already_exists", f"directory already exists: {path}")
                raise Failed("invalid_argument", f"path already exists but it is not a directory: {path}")
            await _make_dir(guest, path, user)
            return {"entry": await entry(guest, await _stat(guest, path))}

    async def move(self, sandbox_id: str, request: Request, message: Message) -> Message:
        user = self._user(request)
        source = user.path(message.get("source"), "source")
        destination = user.path(message.get("destination"), "destination")
        async with self._control.sandboxes.use(sandbox_id) as guest:
            await _stat(guest, source)
            parent = posixpath.dirname(destination.rstrip("/"))
            if not await guest.exists(parent):
                await _make_dir(guest, parent, user)
            with about(source):
                await guest.move(source, destination)
            return {"entry": await entry(guest, await _stat(guest, destination))}

    async def remove(self, sandbox_id: str, request: Request, message: Message) -> Message:
        path = self._path(request, message)
        if not message.get("path"):  # the home of a user is not removed by an oversight
            raise Failed("invalid_argument", "path is empty")
        async with self._control.sandboxes.use(sandbox_id) as guest:
            with contextlib.suppress(FileMissing), about(path):  # as it was wanted
                await guest.remove(path, recursive=True)
        return {}

    def _user(self, request: Request) -> users.User:
        return users.of(request)

    def _path(self, request: Request, message: Message) -> str:
        return self._user(request).path(message.get("path"))


async def _make_dir(guest: Guest, path: str, user: users.User) -> None:
    try:
        with about(path):
            await guest.mkdir(path, user=user.name)
    except CommandNotFound:
        raise users.unknown(user.name) from None


async def _stat(guest: Guest, path: str) -> FileInfo:
    with about(path):
        return await guest.stat(path)


async def _look(guest: Guest, path: str) -> Message | None:
    try:
        return await entry(guest, await _stat(guest, path))
    except NotFound:
        return None


async def entry(guest: Guest, info: FileInfo) -> Message:
    """A symlink has the type of what it leads to."""
    kind, target = _TYPES.get(info.type, "FILE_TYPE_UNSPECIFIED"), None
    if info.type == "symlink":
        target, kind = await _followed(guest, info)
    made = {
        "name": info.name,
        "type": kind,
        "path": info.path,
        "size": info.size,
        "mode": info.mode,
        "permissions": stat.filemode(_FORMAT.get(info.type, 0) | info.mode),
        "owner": info.owner,
        "group": info.group,
        "modifiedTime": info.modified_at.astimezone(UTC).isoformat().replace("+00:00", "Z"),
        **metadata.told(info),
    }
    return made if target is None else {**made, "symlinkTarget": target, "isSymlink": True}


_FORMAT = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "symlink": stat.S_IFLNK}


async def _followed(guest: Guest, link: FileInfo) -> tuple[str, str]:
    """Where a symlink leads, and what is there."""
    path, info = link.path, link
    for _ in range(_MAX_HOPS):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), info.target or ""))
        try:
            info = await guest.stat(path)
        except ForkyardError:
            break
        if info.type != "symlink":
            return path, _TYPES.get(info.type, "FILE_TYPE_UNSPECIFIED")
    return path, "FILE_TYPE_SYMLINK"
