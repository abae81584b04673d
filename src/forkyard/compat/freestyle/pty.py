"""Terminals over WebSockets. A session is an exec with a terminal; it goes on when clients leave, sleeps with its VM, and
is there in forks of it.

Owns: who is attached now, for the size of a terminal is that of the smallest of their windows.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from forkyard.compat.freestyle.calls import USER_HEADER, Call, done
from forkyard.compat.freestyle.errors import Refused
from forkyard.compat.freestyle.notes import Note
from forkyard.compat.freestyle.vms import Vms
from forkyard.control.following import Feed
from forkyard.control.ground import new_id
from forkyard.control.identities import Principal
from forkyard.control.plane import ControlPlane
from forkyard.errors import CommandNotFound, Conflict, ForkyardError
from forkyard.guest.base import ExecSpec, Exit, Output
from forkyard.lifecycle import State
from forkyard.models import ExecInfo

LABEL = "freestyle pty"
MOST_SESSIONS = 64
CLOSE_S = 10.0
SHELL = ["/bin/bash", "-l"]
_MAX_FRAME = 2**20
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_SIGNALS = {"SIGINT": signal.SIGINT, "SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}
_BROKEN, _GONE = 1011, 1000


@dataclass
class _Session:
    """Windows onto one terminal, as (cols, rows)."""

    windows: dict[WebSocket, tuple[int, int]] = field(default_factory=dict)
    fitted: tuple[int, int] | None = None  # what the terminal was told last

    def size(self) -> tuple[int, int]:
        return min(cols for cols, _ in self.windows.values()), min(rows for _, rows in self.windows.values())


class Pty:
    def __init__(self, control: ControlPlane, vms: Vms) -> None:
        self._control = control
        self._vms = vms
        self._sessions: dict[tuple[str, str], _Session] = {}

    # ── over HTTP ────────────────────────────────────────────────────────────────────────────────────────────────

    async def listed(self, call: Call) -> Response:
        vm = (await self._vms.living(call)).id
        return done({"sessions": [self._row(vm, info) for info in await self._all(vm)]})

    async def close(self, call: Call) -> Response:
        vm, session_id = (await self._vms.living(call)).id, call.path["session"]
        async with self._control.sandboxes.use(vm) as guest:
            info = await self._found(vm, session_id, call.request.headers.get(USER_HEADER))
            if info.running:
                await guest.signal(info.id, signal.SIGKILL)
                async with asyncio.timeout(CLOSE_S), guest.attach(info.id) as execution:
                    async for _ in execution:
                        pass
                info = await guest.exec_info(info.id)
        return done({"sessionId": info.id, "exitCode": _exit_code(info)})

    async def _all(self, vm: str) -> list[ExecInfo]:
        async with self._control.sandboxes.use(vm) as guest:
            return [info for info in await guest.execs() if info.label == LABEL]

    async def _found(self, vm: str, session_id: str, user: str | None) -> ExecInfo:
        """`user`: whose it is to be, if somebody said so."""
        _checked(session_id)
        for info in await self._all(vm):
            if info.id == session_id:
                if user is not None and user != info.user:
                    raise Refused(403, "SESSION_USER_MISMATCH", f"session {info.id} is of {info.user!r}")
                return info
        raise Refused(404, "SESSION_NOT_FOUND", f"there is no session {session_id!r}")

    def _row(self, vm: str, info: ExecInfo) -> dict[str, Any]:
        session = self._sessions.get((vm, info.id))
        cols, rows = session.size() if session and session.windows else (80, 24)
        started_ms = info.started_at.timestamp() * 1000
        row = {
            "sessionId": info.id,
            "running": info.running,
            "cols": cols,
            "rows": rows,
            "exec": info.command if isinstance(info.command, str) else None,
            "createdAtMs": int(started_ms),
            "attachedCount": len(session.windows) if session else 0,
            "user": info.user,
            "suspended": False,
        }
        if not info.running:
            row |= {"exitCode": _exit_code(info), "exitedAtMs": int(started_ms + (info.duration_ms or 0))}
        return row

    # ── over a WebSocket ─────────────────────────────────────────────────────────────────────────────────────────

    async def serve(self, socket: WebSocket, _who: Principal, path: dict[str, str]) -> None:
        """Raises before the socket is accepted, and never after."""
        vm = (await self._vms.found(path["vm"])).id
        size = _size(socket.query_params.get("cols"), 80), _size(socket.query_params.get("rows"), 24)
        given = socket.headers.get(USER_HEADER)
        if "session" in path:
            info = await self._found(vm, path["session"], given)
            source = self._control.following.attach(vm, info.id)
        else:
            source = self._control.following.execute(vm, await self._wanted(socket, vm, given or "root", size))
        try:
            async with source as feed:
                try:
                    await socket.accept()
                    await _say(socket, {"type": "sessionInfo", "sessionId": feed.id})
                except (RuntimeError, WebSocketDisconnect):  # it left
                    if "session" not in path:  # nobody knows of it
                        await self._signal(vm, feed.id, signal.SIGKILL)
                    return
                await self._serve(socket, vm, feed, size, "session" not in path)
        except WebSocketDisconnect:
            return
        except ForkyardError as error:
            if socket.application_state is not WebSocketState.CONNECTING:
                await _close(socket, _BROKEN, error.message)
            elif isinstance(error, CommandNotFound):
                raise Refused(404, "USER_NOT_FOUND", error.message) from error
            elif isinstance(error, Conflict):
                raise Refused(409, "SESSION_ALREADY_EXISTS", error.message) from error
            else:
                raise

    async def _wanted(self, socket: WebSocket, vm: str, user: str, size: tuple[int, int]) -> ExecSpec:
        session_id = socket.query_params.get("sessionId") or f"pty-{new_id()}"
        _checked(session_id)
        there = await self._all(vm)
        if any(info.id == session_id for info in there):
            raise Refused(409, "SESSION_ALREADY_EXISTS", f"there is a session {session_id!r}; attach to it")
        if sum(info.running for info in there) >= MOST_SESSIONS:
            raise Refused(429, "SESSION_CAP_REACHED", f"a VM has at most {MOST_SESSIONS} sessions; close one")
        command = socket.query_params.get("exec")
        if command is not None and "\0" in command:
            raise Refused(400, "INVALID_REQUEST", "exec holds a NUL, which no program can be given")
        workdir = Note.of(await self._control.sandboxes.get(vm)).workdir
        return ExecSpec(
            command or SHELL,
            cwd=workdir if user == "root" else None,
            env={"TERM": "xterm-256color"},
            user=user,
            stdin=True,
            pty=True,
            cols=size[0],
            rows=size[1],
            label=LABEL,
            id=session_id,
        )

    async def _serve(self, socket: WebSocket, vm: str, feed: Feed, size: tuple[int, int], opened: bool) -> None:
        session = self._sessions.setdefault((vm, feed.id), _Session())
        session.windows[socket] = size
        tasks: set[asyncio.Task[None]] = set()
        try:
            if not opened:
                with contextlib.suppress(ForkyardError):  # it has ended; what it printed is shown all the same
                    await self._fit(vm, feed.id, session)
            tasks.add(asyncio.create_task(_show(socket, feed)))
            tasks.add(asyncio.create_task(self._type(socket, vm, feed.id, session)))
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in finished:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del session.windows[socket]
            if not session.windows:
                self._sessions.pop((vm, feed.id), None)
            else:
                with contextlib.suppress(ForkyardError):  # it has ended
                    if (await self._control.sandboxes.get(vm)).state is State.RUNNING:  # nobody is woken for it
                        await self._fit(vm, feed.id, session)

    async def _type(self, socket: WebSocket, vm: str, session_id: str, session: _Session) -> None:
        """Every frame is a use of its own: an open terminal keeps no VM awake, and a key wakes it."""
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", _GONE))
            data: bytes | None = message.get("bytes")
            frame = _frame(message.get("text") or "")
            if data:
                async with self._control.sandboxes.use(vm) as guest:
                    for start in range(0, len(data), _MAX_FRAME):
                        await guest.write_stdin(session_id, data[start : start + _MAX_FRAME])
            elif frame.get("type") == "resize":
                session.windows[socket] = _size(frame.get("cols"), 80), _size(frame.get("rows"), 24)
                await self._fit(vm, session_id, session)
            elif frame.get("type") == "signal" and frame.get("signal") in _SIGNALS:
                await self._signal(vm, session_id, _SIGNALS[frame["signal"]])

    async def _fit(self, vm: str, session_id: str, session: _Session) -> None:
        """To the smallest of its windows, if that has changed."""
        async with self._control.sandboxes.use(vm) as guest:
            if session.windows and session.size() != session.fitted:
                session.fitted = cols, rows = session.size()
                await guest.resize(session_id, rows, cols)

    async def _signal(self, vm: str, session_id: str, number: signal.Signals) -> None:
        async with self._control.sandboxes.use(vm) as guest:
            await guest.signal(session_id, number, tree=True)


async def _show(socket: WebSocket, feed: Feed) -> None:
    async for item in feed:
        if isinstance(item, Output):
            await socket.send_bytes(item.data)
        elif isinstance(item, Exit):
            code = item.exit_code if item.exit_code is not None else 128 + (item.signal or 0)
            await _say(socket, {"type": "exited", "exitCode": code})
            await _close(socket, _GONE)
            return


async def _say(socket: WebSocket, content: dict[str, Any]) -> None:
    await socket.send_text(json.dumps(content))


async def _close(socket: WebSocket, code: int, reason: str = "") -> None:
    """Unless it is closed from the other side. A reason has at most 123 bytes."""
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await socket.close(code, reason.encode()[:123].decode("utf-8", "ignore"))


def _frame(text: str) -> dict[str, Any]:
    """What is no frame of theirs is left alone."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and all(not isinstance(v, list | dict) for v in found.values()) else {}


def _size(given: object, default: int) -> int:
    text = str(given)
    return min(max(int(text), 1), 1000) if text.isascii() and text.isdigit() and len(text) < 6 else default


def _checked(session_id: str) -> None:
    if _ID.fullmatch(session_id) is None:
        raise Refused(400, "INVALID_SESSION_ID", "a session id has 1 to 64 of A-Z, a-z, 0-9, dot, dash and underscore")


def _exit_code(info: ExecInfo) -> int | None:
    if info.running:
        return None
    return info.exit_code if info.exit_code is not None else 128 + (info.signal or 0)
