"""What is done inside a VM: commands, files, watches, measurements."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import posixpath
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from starlette.responses import Response, StreamingResponse

from forkyard.compat.freestyle import models
from forkyard.compat.freestyle.calls import Call, done
from forkyard.compat.freestyle.errors import Refused
from forkyard.compat.freestyle.measuring import measured
from forkyard.compat.freestyle.notes import Note
from forkyard.compat.freestyle.vms import Vms
from forkyard.control.following import Feed
from forkyard.control.plane import ControlPlane
from forkyard.errors import CommandNotFound, FileConflict, FileMissing, ForkyardError
from forkyard.guest.base import ExecSpec, Exit, Guest, Output
from forkyard.models import WatchEvent

#: Of each stream the end is kept: an answer is one piece of JSON.
MAX_OUTPUT_BYTES = 16 * 2**20
MAX_FILE_BYTES = 64 * 2**20
FILES_BAD = "FILES_BAD_REQUEST"
TERMINAL = "freestyle terminal "
_TEMPORARY = re.compile(r"(^|/)\.forkyard-[0-9a-f]{12}\.tmp$")
_WATCH = {"created": "create", "modified": "modify", "deleted": "remove", "attributes": "modify"}


class Inside:
    def __init__(self, control: ControlPlane, vms: Vms) -> None:
        self._control = control
        self._vms = vms

    async def _place(self, call: Call) -> tuple[str, str | None]:
        """The VM, and its working directory if it has one."""
        info = await self._vms.living(call)
        return info.id, Note.of(info).workdir

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def exec(self, call: Call) -> Response:
        body = await call.body(models.Exec)
        vm, workdir = await self._place(call)
        if "\0" in body.command:
            raise Refused(400, "INVALID_REQUEST", "command holds a NUL, which no program can be given")
        spec = ExecSpec(
            body.command,
            cwd=workdir if call.user == "root" else None,
            user=call.user,
            timeout_s=None if body.timeout_ms is None else body.timeout_ms / 1000,
            label=None if body.terminal is None else TERMINAL + body.terminal,
        )
        out: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        try:
            async with self._control.following.execute(vm, spec, hold=True) as feed:
                end = await _collected(feed, out)
        except CommandNotFound as error:
            if call.user != "root":
                raise Refused(404, "USER_NOT_FOUND", f"there is no user {call.user!r} in this VM") from error
            raise
        said = {stream: bytes(data).decode("utf-8", "replace") for stream, data in out.items()}
        if end.timed_out:
            message = f"the command did not end within {body.timeout_ms} ms and was killed"
            raise Refused(408, "EXEC_TIMED_OUT", message, timeoutMs=body.timeout_ms, **said)
        return done({**said, "statusCode": end.exit_code if end.exit_code is not None else 128 + (end.signal or 0)})

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def read(self, call: Call) -> Response:
        """A file with its content, or a directory with what is in it."""
        vm, workdir = await self._place(call)
        path = _path(call, workdir)
        async with self._control.sandboxes.use(vm) as guest:
            try:
                content = await _content(guest, path)
            except FileConflict:
                found = await guest.list_dir(path)
                files = [
                    {"name": one.name, "kind": "directory" if one.type == "directory" else "file"} for one in found
                ]
                return done({"files": sorted(files, key=lambda one: one["name"])})
            except FileMissing:
                raise Refused(404, "FILE_NOT_FOUND", f"there is no file {path}") from None
        try:
            return done({"content": content.decode(), "encoding": "utf8"})
        except UnicodeDecodeError:
            return done({"content": base64.b64encode(content).decode(), "encoding": "base64"})

    async def write(self, call: Call) -> Response:
        body = await call.body(models.WriteFile, FILES_BAD)
        vm, workdir = await self._place(call)
        try:
            content = base64.b64decode(body.content) if body.encoding == "base64" else body.content.encode()
        except (binascii.Error, ValueError):
            raise Refused(400, FILES_BAD, f"the content is not {body.encoding}") from None
        async with self._control.sandboxes.use(vm) as guest:
            await guest.write_file(_path(call, workdir), _once(content), user=call.user)
        return done()

    async def watch(self, call: Call) -> Response:
        """Below the working directory, or the user's home: a line of JSON for each change, until the client leaves."""
        vm, workdir = await self._place(call)
        root = workdir or home(call.user)
        opened = AsyncExitStack()
        events = await opened.enter_async_context(self._control.following.watch(vm, root, recursive=True))

        async def lines() -> AsyncIterator[bytes]:
            async with opened:
                async for event in _until_the_end(events):
                    if event.type == "moved" and event.to is not None:
                        told = [("rename", event.path), ("create", event.to)]
                        told = told[1:] if _TEMPORARY.search(event.path) else told
                    else:
                        told = [(_WATCH.get(event.type, "rescan"), event.path)]
                    for kind, path in told:
                        if _TEMPORARY.search(path) is None:
                            yield _line({"eventType": kind, "filename": path})

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def stats(self, call: Call) -> Response:
        """As the guest says: not to be relied on for anything that counts."""
        vm = (await self._vms.living(call)).id
        every_s = min(max(call.number("interval_ms", 1000), 100), 10_000) / 1000
        info = await self._control.sandboxes.get(vm)

        async def lines() -> AsyncIterator[bytes]:
            while True:
                began = time.monotonic()
                try:
                    yield _line(await measured(self._control, info))
                except ForkyardError:
                    return
                await asyncio.sleep(max(every_s - (time.monotonic() - began), 0))

        return StreamingResponse(lines(), media_type="application/x-ndjson")


async def _until_the_end(events: AsyncIterator[WatchEvent]) -> AsyncIterator[WatchEvent]:
    """A VM that is gone is the end of the stream, and no error of it."""
    with contextlib.suppress(ForkyardError):
        async for event in events:
            yield event


def home(user: str) -> str:
    return "/root" if user == "root" else f"/home/{user}"


def _path(call: Call, workdir: str | None) -> str:
    given = call.path["path"]
    if "\0" in given:
        raise Refused(400, FILES_BAD, "the path holds a NUL")
    if not given:
        raise Refused(400, FILES_BAD, "the path is empty")
    return posixpath.join(workdir or home(call.user), given)


async def _content(guest: Guest, path: str) -> bytes:
    content = bytearray()
    async with guest.read_file(path) as chunks:
        async for chunk in chunks:
            content += chunk
            if len(content) > MAX_FILE_BYTES:
                raise Refused(400, FILES_BAD, f"{path} has more than {MAX_FILE_BYTES} bytes; read it in pieces")
    return bytes(content)


async def _collected(feed: Feed, out: dict[str, bytearray]) -> Exit:
    async for item in feed:
        if isinstance(item, Output):
            kept = out[item.stream]
            kept += item.data
            del kept[:-MAX_OUTPUT_BYTES]
        elif isinstance(item, Exit):
            return item
    raise Refused(503, "SERVICE_UNAVAILABLE", "the VM went away in the middle of the command")


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


def _line(content: object) -> bytes:
    return json.dumps(content).encode() + b"\n"
