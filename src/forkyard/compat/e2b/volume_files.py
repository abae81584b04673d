"""Files of volumes, reached without a sandbox of one's own: by the volume's token, from a machine that is made for the call.

Writers of one volume wait for each other here, as they do at E2B; a sandbox that has it is not waited for.
"""

from __future__ import annotations

import asyncio
import hmac
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import Any
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from forkyard.compat.e2b import models
from forkyard.compat.e2b.errors import Refused
from forkyard.control.plane import ControlPlane
from forkyard.control.volume_files import ROOT, inside
from forkyard.errors import FileConflict, FileMissing, VolumeNotFound
from forkyard.guest.base import ExecSpec, Exit, Guest, Output
from forkyard.models.volumes import VolumeInfo

MAX_DEPTH = 64
MAX_ID = 2**31 - 1
_LOOK_S = 60.0
_MAX_TOLD_BYTES = 16 * 2**20
_TYPES = {"f": "file", "d": "directory", "l": "symlink"}
#: Name, path below, type, size, mode, owner, group, times of access, write and change, target.
_FORMAT = r"%f\0%P\0%y\0%s\0%m\0%U\0%G\0%A@\0%T@\0%C@\0%l\0"
_FIELDS = 11


class VolumeFiles:
    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._calls: dict[tuple[str, str], Callable[[VolumeInfo, str, Request], Awaitable[Response]]] = {
            ("GET", "path"): self._info,
            ("PATCH", "path"): self._update,
            ("DELETE", "path"): self._remove,
            ("GET", "dir"): self._list,
            ("POST", "dir"): self._make_dir,
            ("GET", "file"): self._read,
            ("PUT", "file"): self._write,
        }

    def token(self, volume_id: str) -> str:
        return self._control.secrets.digest(f"e2b volume {volume_id}")

    async def serve(self, request: Request, volume_id: str, what: str) -> Response:
        call = self._calls.get((request.method, what))
        if call is None:
            known = any(what == name for _, name in self._calls)
            raise Refused(405 if known else 404, f"{request.method} {request.url.path[:200]} is not served here")
        volume = await self._admitted(request, volume_id)
        path = request.query_params.get("path", "")
        if not path or "\0" in path:
            raise Refused(400, "path is missing")
        try:
            return await call(volume, path, request)
        except FileMissing:
            raise Refused(404, f"path '{path[:1024]}' not found") from None

    async def _admitted(self, request: Request, volume_id: str) -> VolumeInfo:
        """Whoever has its token. One that is not there has none, and is told the same."""
        try:
            found = await self._control.volumes.get(volume_id)
        except VolumeNotFound:
            found = None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        wanted = self.token("" if found is None else found.id)
        right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), wanted.encode())
        if found is None or scheme.lower() != "bearer" or not right:
            raise Refused(401, "this is not the token of the volume; `Volume.connect` asks for it")
        return found

    @asynccontextmanager
    async def _writing(self, volume: VolumeInfo) -> AsyncIterator[Guest]:
        turn = self._turns.setdefault(volume.id, asyncio.Lock())
        async with turn, self._control.volume_files.opened(volume.id, write=True) as guest:
            yield guest

    # ── look ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _info(self, volume: VolumeInfo, path: str, _request: Request) -> Response:
        async with self._control.volume_files.opened(volume.id) as guest:
            return JSONResponse(await _entry(guest, await inside(guest, path, follow=False)))

    async def _list(self, volume: VolumeInfo, path: str, request: Request) -> Response:
        depth = models.number(request.query_params.get("depth"), "depth", 0, MAX_DEPTH) or 1
        async with self._control.volume_files.opened(volume.id) as guest:
            where = await inside(guest, path)
            if (await guest.stat(where)).type != "directory":
                raise Refused(400, f"path '{path[:1024]}' is not a directory")
            return JSONResponse(await _entries(guest, where, depth))

    async def _read(self, volume: VolumeInfo, path: str, _request: Request) -> Response:
        async with AsyncExitStack() as stack:
            guest = await stack.enter_async_context(self._control.volume_files.opened(volume.id))
            try:
                chunks = await stack.enter_async_context(guest.read_file(await inside(guest, path)))
            except FileConflict:
                raise Refused(400, f"path '{path[:1024]}' is a directory") from None
            opened = stack.pop_all()

        async def content() -> AsyncIterator[bytes]:
            async with opened:
                async for chunk in chunks:
                    yield chunk

        return StreamingResponse(content(), media_type="application/octet-stream")

    # ── change ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _write(self, volume: VolumeInfo, path: str, request: Request) -> Response:
        wanted = _wanted(request)
        async with self._writing(volume) as guest:
            where = await inside(guest, path)
            try:
                await guest.write_file(where, request.stream(), mode=wanted.mode)
            except FileConflict:
                raise Refused(400, f"path '{path[:1024]}' is a directory") from None
            await _own(guest, where, wanted)
            return JSONResponse(await _entry(guest, where), 201)

    async def _make_dir(self, volume: VolumeInfo, path: str, request: Request) -> Response:
        wanted, force = _wanted(request), request.query_params.get("force", "").lower() == "true"
        async with self._writing(volume) as guest:
            where = await inside(guest, path)
            if await guest.exists(where):
                if not force or (await guest.stat(where)).type != "directory":
                    raise Refused(409, f"path '{path[:1024]}' already exists")
            else:
                await guest.mkdir(where, mode=0o755 if wanted.mode is None else wanted.mode, parents=force)
                await _own(guest, where, wanted)
            return JSONResponse(await _entry(guest, where), 201)

    async def _update(self, volume: VolumeInfo, path: str, request: Request) -> Response:
        wanted = await models.read(request, models.Ownership)
        async with self._writing(volume) as guest:
            where = await inside(guest, path)
            await guest.stat(where)
            if wanted.mode is not None:
                await guest.chmod(where, wanted.mode)
            await _own(guest, where, wanted)
            return JSONResponse(await _entry(guest, where))

    async def _remove(self, volume: VolumeInfo, path: str, _request: Request) -> Response:
        async with self._writing(volume) as guest:
            where = await inside(guest, path, follow=False)
            if where == ROOT:
                raise Refused(400, "the root of a volume is not removed; destroy the volume")
            await guest.remove(where, recursive=True)
        return Response(status_code=204)


def _wanted(request: Request) -> models.Ownership:
    query = request.query_params
    return models.Ownership(
        uid=models.number(query.get("uid"), "uid", 0, MAX_ID),
        gid=models.number(query.get("gid"), "gid", 0, MAX_ID),
        mode=models.number(query.get("mode"), "mode", 0, 0o7777),
    )


async def _own(guest: Guest, where: str, wanted: models.Ownership) -> None:
    if wanted.uid is None and wanted.gid is None:
        return
    who = f"{'' if wanted.uid is None else wanted.uid}:{'' if wanted.gid is None else wanted.gid}"
    await _said(guest, ["chown", "-h", who, "--", where])


async def _entry(guest: Guest, where: str) -> dict[str, Any]:
    await guest.stat(where)
    found = await _found(guest, where, "-maxdepth", "0")
    if not found:
        raise FileMissing(f"{where} is gone")
    return found[0]


async def _entries(guest: Guest, where: str, depth: int) -> list[dict[str, Any]]:
    found = await _found(guest, where, "-mindepth", "1", "-maxdepth", str(depth))
    return sorted(found, key=lambda one: str(one["path"]).split("/"))


async def _found(guest: Guest, where: str, *depth: str) -> list[dict[str, Any]]:
    told = await _said(guest, ["find", where, *depth, "-printf", _FORMAT])
    try:
        return entries(told, where.removeprefix(ROOT))
    except (ValueError, OverflowError):  # what is in a volume was written by anybody
        raise Refused(400, "what is in the volume cannot be told") from None


async def _said(guest: Guest, command: list[str]) -> bytes:
    out = bytearray()
    async with guest.execute(ExecSpec(command, timeout_s=_LOOK_S)) as execution:
        async for item in execution:
            if isinstance(item, Output) and item.stream == "stdout":
                out += item.data
                if len(out) > _MAX_TOLD_BYTES:
                    raise Refused(400, "there is too much below this path to tell; list what is below it")
            elif isinstance(item, Exit) and item.exit_code != 0:
                raise Refused(400, f"{command[0]} failed in the volume")
    return bytes(out)


def entries(told: bytes, root: str) -> list[dict[str, Any]]:
    """What `find` said, as a client knows it. `root`: the path it looked below, without a slash at its end."""
    words = told.decode("utf-8", "replace").split("\0")
    found = []
    for start in range(0, len(words) - _FIELDS + 1, _FIELDS):
        name, below, kind, size, mode, uid, gid, read_at, written_at, changed_at, target = words[
            start : start + _FIELDS
        ]
        path = f"{root}/{below}" if below else root or "/"
        found.append(
            {
                "name": name if path != "/" else "/",
                "type": _TYPES.get(kind, "unknown"),
                "path": path,
                "size": int(size),
                "mode": stat.S_IMODE(int(mode, 8)),
                "uid": int(uid),
                "gid": int(gid),
                "atime": _time(read_at),
                "mtime": _time(written_at),
                "ctime": _time(changed_at),
                **({"target": target} if kind == "l" else {}),
            }
        )
    return found


def _time(seconds: str) -> str:
    return datetime.fromtimestamp(float(seconds), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
