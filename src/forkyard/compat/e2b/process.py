"""`process.Process` of envd: processes by their pid, or a tag.

A pid is the guest's own; which exec it belongs to is asked of the guest each time, so nothing is kept here.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import signal
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from forkyard.compat.e2b import connect, users
from forkyard.compat.e2b.connect import Message
from forkyard.compat.e2b.errors import Failed
from forkyard.control.following import Feed
from forkyard.control.network import intercepts
from forkyard.control.plane import ControlPlane
from forkyard.control.trust import environment
from forkyard.errors import CommandNotFound
from forkyard.guest.base import ExecSpec, Exit, Guest, Output
from forkyard.models import ExecInfo

KEEP_ALIVE: Message = {"event": {"keepalive": {}}}
#: What was killed is given this long to be gone when the call returns.
GONE_S = 5.0
_PIECE_BYTES = 32_768
_PTY_BYTES = 16_384
_MAX_REMEMBERED = 10_000
_SIGNALS = {"SIGNAL_SIGKILL": 9, "SIGNAL_SIGTERM": 15, 9: 9, 15: 15}
_MAX_WORDS = 4096


class Processes:
    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        #: The variables that execs were started with: a guest does not tell.
        self._envs: OrderedDict[str, dict[str, str]] = OrderedDict()

    # ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, sandbox_id: str, request: Request) -> Response:
        codec = connect.codec_of(request, stream=True)
        message = await connect.only_frame(request, codec)
        user = users.of(request)
        timeout_s = connect.timeout_s(request)
        spec = _spec(message, user, timeout_s)
        envs = dict(spec.env)
        # Of one whose door has come to look into TLS since it was made, programs were not told whom to trust.
        if intercepts(await self._control.previews.record(sandbox_id)):
            spec = replace(spec, env={**environment(), **spec.env})
        opened = AsyncExitStack()
        try:
            feed = await opened.enter_async_context(self._control.following.execute(sandbox_id, spec, hold=True))
        except CommandNotFound as error:
            raise _not_started(error, user, spec) from error
        self._envs[feed.id] = envs
        while len(self._envs) > _MAX_REMEMBERED:
            self._envs.popitem(last=False)
        return connect.Stream(request, codec, opened, _events(feed, spec.pty), KEEP_ALIVE)

    async def connect(self, sandbox_id: str, request: Request) -> Response:
        codec = connect.codec_of(request, stream=True)
        message = await connect.only_frame(request, codec)
        async with self._control.sandboxes.use(sandbox_id) as guest:
            found = await _find(guest, message.get("process"), ended=True)
        attach = self._control.following.attach(
            sandbox_id, found.id, stdout_offset=found.stdout_bytes, stderr_offset=found.stderr_bytes
        )
        opened = AsyncExitStack()
        feed = await opened.enter_async_context(attach)
        return connect.Stream(request, codec, opened, _events(feed, found.pty, found.pid), KEEP_ALIVE)

    async def stream_input(self, sandbox_id: str, request: Request) -> Response:
        codec = connect.codec_of(request, stream=True)
        found: ExecInfo | None = None
        async with contextlib.aclosing(connect.frames(request, codec)) as messages:  # type: ignore[type-var]
            async for message in messages:
                if "start" in message:
                    async with self._control.sandboxes.use(sandbox_id) as guest:
                        found = await _find(guest, _dict(message["start"], "start").get("process"))
                elif "data" in message:
                    if found is None:
                        raise Failed("invalid_argument", "the first message of the stream is `start`")
                    async with self._control.sandboxes.use(sandbox_id) as guest:
                        await _write(guest, found, _dict(message["data"], "data").get("input"))
        return connect.Stream(request, codec, AsyncExitStack(), _nothing(), {})

    # ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def listed(self, sandbox_id: str, _request: Request, _message: Message) -> Message:
        async with self._control.sandboxes.use(sandbox_id) as guest:
            running = [one for one in await guest.execs() if one.running]
            return {"processes": [_info(one, self._envs.get(one.id, {})) for one in running]}

    async def send_input(self, sandbox_id: str, _request: Request, message: Message) -> Message:
        async with self._control.sandboxes.use(sandbox_id) as guest:
            await _write(guest, await _find(guest, message.get("process")), message.get("input"))
        return {}

    async def close_stdin(self, sandbox_id: str, _request: Request, message: Message) -> Message:
        async with self._control.sandboxes.use(sandbox_id) as guest:
            found = await _find(guest, message.get("process"))
            if found.pty:
                raise Failed("failed_precondition", "a terminal has no stdin to close; send it ^D")
            await guest.write_stdin(found.id, b"", close=True)
        return {}

    async def send_signal(self, sandbox_id: str, _request: Request, message: Message) -> Message:
        given = message.get("signal")
        number = _SIGNALS.get(given) if isinstance(given, str | int) else None
        if number is None:
            raise Failed("unimplemented", f"signal {given!r:.40} cannot be sent; SIGNAL_SIGKILL and SIGNAL_SIGTERM can")
        async with self._control.sandboxes.use(sandbox_id) as guest:
            found = await _find(guest, message.get("process"))
            await guest.signal(found.id, number)
            if number == signal.SIGKILL:
                await _gone(guest, found)
        return {}

    async def update(self, sandbox_id: str, _request: Request, message: Message) -> Message:
        async with self._control.sandboxes.use(sandbox_id) as guest:
            found = await _find(guest, message.get("process"))
            pty = message.get("pty")
            if pty is not None:
                if not found.pty:
                    raise Failed("failed_precondition", "the process has no terminal")
                rows, cols = _size(pty)
                await guest.resize(found.id, rows, cols)
        return {}


# ── a start ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _spec(message: Message, user: users.User, timeout_s: float | None) -> ExecSpec:
    config = _dict(message.get("process"), "process")
    cmd, args = config.get("cmd"), config.get("args") or []
    if not isinstance(cmd, str) or not cmd or not isinstance(args, list) or len(args) > _MAX_WORDS:
        raise Failed("invalid_argument", "process.cmd is a string, and process.args a list of them")
    words = [cmd, *args]
    if not all(isinstance(word, str) and "\0" not in word for word in words):
        raise Failed("invalid_argument", "process.args are strings without NUL bytes")
    envs = _dict(config.get("envs") or {}, "process.envs")
    for name, value in envs.items():
        if not name or "=" in name or "\0" in name or not isinstance(value, str) or "\0" in value:
            raise Failed("invalid_argument", f"{name!r:.80} cannot be an environment variable with that value")
    tag, pty, stdin = message.get("tag"), message.get("pty"), message.get("stdin")
    if tag is not None and (not isinstance(tag, str) or len(tag) > 256):
        raise Failed("invalid_argument", "tag is a string of up to 256 characters")
    rows, cols = (24, 80) if pty is None else _size(pty)
    cwd = config.get("cwd")
    return ExecSpec(
        words,
        cwd=user.path(cwd, "process.cwd") if cwd else user.workdir,
        env=envs,
        user=user.name,
        timeout_s=timeout_s,
        stdin=stdin is not False and pty is None,  # clients older than the field expect one
        pty=pty is not None,
        rows=rows,
        cols=cols,
        label=tag or None,
    )


def _not_started(error: CommandNotFound, user: users.User, spec: ExecSpec) -> Failed:
    if error.message.startswith("there is no user"):
        return users.unknown(user.name)
    if error.message.startswith("working directory"):
        return Failed("invalid_argument", f"cwd '{spec.cwd or user.home}' does not exist")
    return Failed("invalid_argument", error.message)


def _size(pty: object) -> tuple[int, int]:
    size = _dict(_dict(pty, "pty").get("size", {}), "pty.size")
    rows, cols = connect.whole(size.get("rows", 24)), connect.whole(size.get("cols", 80))
    if rows is None or cols is None or not 1 <= rows <= 1000 or not 1 <= cols <= 1000:
        raise Failed("invalid_argument", "pty.size has rows and cols from 1 to 1000")
    return rows, cols


# ── what a client sees of it ─────────────────────────────────────────────────────────────────────────────────────


async def _events(feed: Feed, pty: bool, pid: int | None = None) -> AsyncGenerator[Message, None]:
    yield {"event": {"start": {"pid": feed.pid or pid or 0}}}
    async for item in feed:
        if isinstance(item, Output):
            name, most = ("pty", _PTY_BYTES) if pty else (item.stream, _PIECE_BYTES)
            for at in range(0, len(item.data), most):
                piece = base64.b64encode(item.data[at : at + most]).decode("ascii")
                yield {"event": {"data": {name: piece}}}
        elif isinstance(item, Exit):
            if item.timed_out:
                raise Failed("deadline_exceeded", "the process was killed: its time was up")
            yield {"event": {"end": _end(item)}}


def _end(item: Exit) -> Message:
    if item.signal is not None:
        with contextlib.suppress(ValueError):
            name = signal.strsignal(item.signal) or ""
            status = f"signal: {name.lower()}"
            return {"exitCode": -1, "exited": False, "status": status, "error": status}
        return {"exitCode": -1, "exited": False, "status": f"signal {item.signal}", "error": f"signal {item.signal}"}
    code = item.exit_code or 0
    end: Message = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
    return end if code == 0 else {**end, "error": f"exit status {code}"}


def _info(info: ExecInfo, envs: dict[str, str]) -> Message:
    words = info.command if isinstance(info.command, list) else ["/bin/bash", "-c", info.command]
    config: Message = {"cmd": words[0] if words else "", "args": words[1:], "envs": envs}
    if info.cwd is not None:
        config["cwd"] = info.cwd
    found: Message = {"config": config, "pid": info.pid or 0}
    return found if info.label is None else {**found, "tag": info.label}


# ── which one ────────────────────────────────────────────────────────────────────────────────────────────────────


async def _find(guest: Guest, given: object, *, ended: bool = False) -> ExecInfo:
    selector = _dict(given, "process")
    pid, tag = connect.whole(selector.get("pid")), selector.get("tag")
    if pid is None and not isinstance(tag, str):
        raise Failed("invalid_argument", "process names a pid or a tag")
    matching = [one for one in await guest.execs() if (one.pid == pid if pid is not None else one.label == tag)]
    matching.sort(key=lambda one: (one.running, one.started_at))
    if not matching or not (matching[-1].running or ended):
        raise Failed("not_found", f"process with {f'pid {pid}' if pid is not None else f'tag {tag}'} not found")
    return matching[-1]


async def _write(guest: Guest, found: ExecInfo, given: object) -> None:
    content = _dict(given, "input")
    text = content.get("pty" if found.pty else "stdin")
    if not isinstance(text, str):
        raise Failed("invalid_argument", f"this process takes input.{'pty' if found.pty else 'stdin'}")
    try:
        data = base64.b64decode(text)
    except (ValueError, binascii.Error):
        raise Failed("invalid_argument", "input is not base64") from None
    for at in range(0, len(data), _PIECE_BYTES):
        await guest.write_stdin(found.id, data[at : at + _PIECE_BYTES])


async def _gone(guest: Guest, found: ExecInfo) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GONE_S), guest.attach(found.id, stdout_offset=found.stdout_bytes) as execution:
            async for item in execution:
                if isinstance(item, Exit):
                    return


async def _nothing() -> AsyncGenerator[Message, None]:
    yield {}


def _dict(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Failed("invalid_argument", f"{name} is not an object")
    return value
