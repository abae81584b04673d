"""The code interpreter (port 49999): contexts, and code that runs in them, a line of JSON for each thing that happens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from forkyard.compat.e2b import models, users
from forkyard.compat.e2b.connect import known, until_gone
from forkyard.compat.e2b.errors import Refused
from forkyard.compat.e2b.traffic import HEADER, Traffic
from forkyard.control.plane import ControlPlane
from forkyard.errors import ContextNotFound
from forkyard.models import SandboxInfo
from forkyard.models.code import (
    CodeEnd,
    CodeEvent,
    CodeException,
    CodeOutput,
    CodeResult,
    CodeRun,
    CodeStarted,
    ContextCreate,
    ContextInfo,
)

PORT = 49999
MAX_CODE_BYTES = 2**24
LANGUAGES = frozenset({"python", "javascript", "typescript", "bash"})
_SHORT = {"js": "javascript", "ts": "typescript"}
#: Contexts that every sandbox has: named after their language, and made when they are first used.
_DEFAULTS = ("python", "javascript")
_ENDS = {
    "died": ("ContextDied", "the process that ran the code ended; its variables are lost"),
    "interrupted": ("Interrupted", "the code was interrupted"),
    "timed_out": ("TimedOut", "the code was interrupted when its time was up"),
}


class CodeInterpreter:
    def __init__(self, control: ControlPlane, traffic: Traffic) -> None:
        self._traffic = traffic
        self._code = control.code
        self._sandboxes = control.sandboxes

    def is_open(self, info: SandboxInfo, request: Request) -> bool:
        """Clients send envd's token with code alone. What they do to contexts is open to whoever knows the sandbox, as its
        other ports are; if those are not, to whoever has their token."""
        if request.url.path == "/execute":
            return False
        given = request.headers.get(HEADER, "")
        return info.network.ingress.access != "token" or self._traffic.opens(info.id, given)

    async def serve(self, sandbox_id: str, request: Request) -> Response:
        match request.method, request.url.path.strip("/").split("/"):
            case "GET", ["health"]:
                return PlainTextResponse("OK")
            case "POST", ["execute"]:
                return await self._execute(sandbox_id, request)
            case "POST", ["contexts"]:
                return await self._create(sandbox_id, request)
            case "GET", ["contexts"]:
                return await self._listed(sandbox_id, request)
            case "POST", ["contexts", context_id, "restart"]:
                return await self._changed(context_id, self._code.restart(sandbox_id, context_id))
            case "DELETE", ["contexts", context_id]:
                return await self._changed(context_id, self._code.delete(sandbox_id, context_id))
        raise Refused(404, f"{request.method} {request.url.path[:200]} is not served here")

    async def _create(self, sandbox_id: str, request: Request) -> Response:
        body = await models.read(request, models.NewContext)
        wanted = _wanted(users.of(request), _language(body.language), body.cwd)
        if body.cwd:
            async with self._sandboxes.use(sandbox_id) as guest:
                if not await guest.exists(wanted.cwd or ""):
                    await guest.mkdir(wanted.cwd or "", user=wanted.user)
        return JSONResponse(_context(await self._code.create(sandbox_id, wanted)))

    async def _listed(self, sandbox_id: str, request: Request) -> Response:
        found = [_context(one) for one in await self._code.list(sandbox_id)]
        known = {one["id"] for one in found}
        home = _wanted(users.of(request), "python", None).cwd
        waiting = [{"id": name, "language": name, "cwd": home} for name in _DEFAULTS if name not in known]
        return JSONResponse([*waiting, *found])

    async def _changed(self, context_id: str, change: Awaitable[object]) -> Response:
        try:
            await change
        except ContextNotFound:
            if context_id not in _DEFAULTS:  # those have nothing yet that could change
                return _no_context(context_id)
        return Response(status_code=200)

    async def _execute(self, sandbox_id: str, request: Request) -> Response:
        body = await models.read(request, models.Execution, MAX_CODE_BYTES)
        language = None if body.language is None else _language(body.language)
        try:
            wanted = CodeRun.model_validate(
                {"code": body.code, "language": language, "context": body.context_id, "env": body.env or {}}
            )
        except ValidationError as error:
            if any(one["loc"][:1] == ("context",) for one in error.errors()):
                return _no_context(str(body.context_id))
            raise Refused(400, f"the code cannot be run: {error.errors()[0]['msg']}"[:500]) from None
        first = _wanted(users.of(request), language or "python", None)
        opened = AsyncExitStack()
        try:
            events = await opened.enter_async_context(self._code.run(sandbox_id, wanted, first=first))
        except ContextNotFound:
            return _no_context(str(body.context_id))
        return Lines(opened, _lines(events))


def _wanted(user: users.User, language: str, cwd: str | None) -> ContextCreate:
    where = user.path(cwd, "cwd") if cwd else user.workdir or user.home
    return ContextCreate.model_validate({"language": language, "user": user.name, "cwd": where})


def _language(given: str | None) -> str:
    language = (given or "python").lower()
    language = _SHORT.get(language, language)
    if language not in LANGUAGES:
        raise Refused(400, f"language {language[:40]!r} is not served here; {', '.join(sorted(LANGUAGES))} are")
    return language


def _no_context(context_id: str) -> Response:
    return PlainTextResponse(f"Context {context_id[:64]} not found", 404)


def _context(info: ContextInfo) -> dict[str, Any]:
    return {"id": info.id, "language": info.language, "cwd": info.cwd or ""}


async def _lines(events: AsyncIterator[CodeEvent]) -> AsyncIterator[dict[str, Any]]:
    async for event in events:
        if isinstance(event, CodeStarted):
            yield {"type": "number_of_executions", "execution_count": event.execution_count}
        elif isinstance(event, CodeOutput):
            yield {"type": event.stream, "text": event.text, "timestamp": time.time_ns()}
        elif isinstance(event, CodeResult):
            yield _result(event)
        elif isinstance(event, CodeException):
            yield {"type": "error", "name": event.name, "value": event.value, "traceback": event.traceback}
        elif isinstance(event, CodeEnd):
            if event.status in _ENDS:
                name, value = _ENDS[event.status]
                yield {"type": "error", "name": name, "value": value, "traceback": ""}
            yield {"type": "end_of_execution"}


def _result(result: CodeResult) -> dict[str, Any]:
    names = ("text", "html", "markdown", "svg", "png", "jpeg", "pdf", "latex", "javascript", "chart")
    found = {name: value for name in names if (value := getattr(result, name)) is not None}
    if (
        result.text is not None
        and len(result.text) > 1
        and result.text[0] == result.text[-1]
        and result.text[0] in "'\""
    ):
        found["text"] = result.text[1:-1]  # what a string says, not how it is written
    if result.json_value is not None:
        found["json"] = result.json_value
    if result.data is not None:
        found["data"] = _columns(result.data)
    if result.extra:
        found["extra"] = result.extra
    return {"type": "result", **found, "is_main_result": result.main}


def _columns(table: dict[str, Any]) -> dict[str, list[Any]]:
    """Theirs is by column."""
    columns, rows = table.get("columns"), table.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list):
        return {}
    return {
        str(name): [row[place] if isinstance(row, list) and place < len(row) else None for row in rows]
        for place, name in enumerate(columns)
    }


class Lines(Response):
    """A line for each message. Whoever goes away ends what runs: leaving `opened` interrupts it."""

    media_type = "application/x-ndjson"

    def __init__(self, opened: AsyncExitStack, messages: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._opened = opened
        self._messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async with self._opened:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            tasks = [asyncio.create_task(self._pump(send)), asyncio.create_task(until_gone(receive))]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, send: Send) -> None:
        try:
            async for message in self._messages:
                await _send(send, message)
        except OSError:
            return
        except Exception as raised:
            error = known(raised)
            await _send(send, {"type": "error", "name": error.code, "value": error.message, "traceback": ""})
            await _send(send, {"type": "end_of_execution"})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, message: dict[str, Any]) -> None:
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    await send({"type": "http.response.body", "body": line, "more_body": True})
