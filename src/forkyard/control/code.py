"""Code that is run in a sandbox, in contexts that remember: variables, functions and imports live on between runs.

Owns: how a context is driven. A context is an exec in the guest (`guest_code`), so a fork, a snapshot or a sleep takes it
along; nothing of it is on record here. Its events are an attacker's input like all that a guest says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import Any
from weakref import WeakValueDictionary

from pydantic import TypeAdapter, ValidationError

from forkyard.control.following import Following
from forkyard.control.sandboxes import Sandboxes
from forkyard.errors import (
    CommandNotFound,
    ContextEnded,
    ContextNotFound,
    ForkyardError,
    GuestFailure,
    InvalidRequest,
    LanguageMissing,
    NoCapacity,
    OperationTimeout,
)
from forkyard.guest.base import ExecSpec, Exit, Guest, Lost
from forkyard.guest.code import BROUGHT, bundle
from forkyard.models import ExecInfo
from forkyard.models.code import (
    CodeEnd,
    CodeEvent,
    CodeRun,
    CodeStarted,
    ContextCreate,
    ContextInfo,
    ContextLanguage,
    context_language,
)

#: A kernel's first start on an emulated machine that has much else to do.
START_S = 330.0
STOP_S = 10.0
MAX_CONTEXTS = 32
#: The guest's own bound of a result is half of it.
MAX_LINE_BYTES = 16 << 20
_PREFIX = "code-"
_LANGUAGES: tuple[ContextLanguage, ...] = ("python", "javascript", "bash")
_EVENT: TypeAdapter[CodeEvent] = TypeAdapter(CodeEvent)
_KILL = 9


class Code:
    def __init__(self, sandboxes: Sandboxes, following: Following) -> None:
        self._sandboxes = sandboxes
        self._following = following
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    # ── contexts ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(self, sandbox_id: str, request: ContextCreate) -> ContextInfo:
        """Returns when it can run code."""
        async with self._sandboxes.use(sandbox_id) as guest:
            return _context(await start(guest, token_hex(5), request))

    async def list(self, sandbox_id: str) -> list[ContextInfo]:
        """Oldest first."""
        async with self._sandboxes.use(sandbox_id) as guest:
            return [_context(info) for info in await _running(guest)]

    async def get(self, sandbox_id: str, context_id: str) -> ContextInfo:
        async with self._sandboxes.use(sandbox_id) as guest:
            return _context(await _found(guest, context_id))

    async def restart(self, sandbox_id: str, context_id: str) -> ContextInfo:
        """It forgets everything; what runs in it is interrupted."""
        async with self._sandboxes.use(sandbox_id) as guest:
            info = await _found(guest, context_id)
            async with self._asked(sandbox_id, guest, info, {"op": "restart"}) as events:
                await _ready(events)
            return _context(info)

    async def interrupt(self, sandbox_id: str, context_id: str) -> None:
        """What runs in it, and what waits to run, is ended; it remembers all it knew."""
        async with self._sandboxes.use(sandbox_id) as guest:
            await self._send(sandbox_id, guest, (await _found(guest, context_id)).id, {"op": "interrupt", "id": None})

    async def delete(self, sandbox_id: str, context_id: str) -> None:
        async with self._sandboxes.use(sandbox_id) as guest:
            info = await _found(guest, context_id)
            with contextlib.suppress(ForkyardError, TimeoutError):
                await guest.write_stdin(info.id, b"", close=True)  # it tidies up
                async with asyncio.timeout(STOP_S), guest.attach(info.id, **_offsets(info)) as execution:
                    async for item in execution:
                        if isinstance(item, Exit):
                            break
            with contextlib.suppress(ForkyardError):  # gone
                await guest.signal(info.id, _KILL)

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def run(
        self, sandbox_id: str, request: CodeRun, *, first: ContextCreate | None = None
    ) -> AsyncIterator[AsyncIterator[CodeEvent]]:
        """Run code and follow it: `started`, then what it prints and shows, then `end`. Leaving the block before that
        interrupts it. Runs in one context wait for each other. The sandbox stays awake meanwhile. `first`: how the
        context of a language is made, if there is none yet."""
        async with self._sandboxes.use(sandbox_id) as guest:
            info = await self._wanted(sandbox_id, guest, request, first)
            context = _context(info)
            language = request.language or context.language
            if context_language(language) != context.language:
                raise InvalidRequest(
                    f"context {context.id} runs {context.language}, not {language}; name another, or none",
                    field="language",
                )
            wanted: dict[str, Any] = {"op": "run", "code": request.code, "language": language}
            wanted |= {"env": request.env, "timeout_s": request.timeout_s}
            async with self._asked(sandbox_id, guest, info, wanted) as events:
                ended = False

                async def told() -> AsyncIterator[CodeEvent]:
                    nonlocal ended
                    async for event in events:
                        said = _checked(event)
                        ended = isinstance(said, CodeEnd)
                        yield (
                            said.model_copy(update={"context_id": context.id})
                            if isinstance(said, CodeStarted)
                            else said
                        )
                        if ended:
                            return

                try:
                    yield told()
                finally:
                    if not ended:
                        await asyncio.shield(self._give_up(sandbox_id, guest, info.id, wanted["id"]))

    async def _wanted(self, sandbox_id: str, guest: Guest, request: CodeRun, first: ContextCreate | None) -> ExecInfo:
        if request.context is not None and request.context not in _LANGUAGES:
            return await _found(guest, request.context)
        language = context_language(request.language or "python") if request.context is None else request.context
        async with self._lock(sandbox_id, language):
            for info in await _running(guest):
                if _context(info).id == language:
                    return info
            made = first or ContextCreate.model_validate({"language": language})
            return await start(guest, language, made)

    async def _give_up(self, sandbox_id: str, guest: Guest, exec_id: str, run_id: str) -> None:
        with contextlib.suppress(ForkyardError, TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._send(sandbox_id, guest, exec_id, {"op": "interrupt", "id": run_id})

    # ── the process in the guest ─────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def _asked(
        self, sandbox_id: str, guest: Guest, info: ExecInfo, request: dict[str, Any]
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Send a request, which gets its id here; what follows are the events with that id."""
        request["id"] = token_hex(8)
        now = await guest.exec_info(info.id)
        async with self._following.attach(sandbox_id, info.id, **_offsets(now)) as feed:
            await self._send(sandbox_id, guest, info.id, request)
            yield _lines(feed, request["id"])

    async def _send(self, sandbox_id: str, guest: Guest, exec_id: str, request: dict[str, Any]) -> None:
        line = json.dumps(request, separators=(",", ":")).encode("ascii") + b"\n"
        async with self._lock(sandbox_id, exec_id):  # a line must not be cut by another
            await guest.write_stdin(exec_id, line)

    def _lock(self, *what: str) -> asyncio.Lock:
        sandbox_id, name = what
        return self._locks.setdefault((sandbox_id, name), asyncio.Lock())


async def start(guest: Guest, context_id: str, request: ContextCreate) -> ExecInfo:
    """A context in a guest; it can run code when this returns."""
    if len(await _running(guest)) >= MAX_CONTEXTS:
        raise NoCapacity(f"the sandbox has {MAX_CONTEXTS} contexts; delete one")
    language = context_language(request.language)
    program = await _put(guest)
    spec = ExecSpec(
        [*await _interpreter(guest, language), program, language],
        cwd=request.cwd,
        env=request.env,
        user=request.user,
        stdin=True,
        label=f"code {language}",
        id=f"{_PREFIX}{context_id}-{token_hex(4)}",
    )
    try:
        info = await guest.start(spec)
    except CommandNotFound as error:
        if "python3" not in error.message:
            raise  # no such user or directory
        raise LanguageMissing("code is run with the machine's python3, and it has none; install it") from None
    try:
        async with guest.attach(info.id) as execution:
            await _ready(_lines(execution, ""))
    except BaseException:
        with contextlib.suppress(ForkyardError):
            await asyncio.shield(guest.signal(info.id, _KILL))
        raise
    return info


async def _put(guest: Guest) -> str:
    """The program that runs code, in the guest. It is named after its content, so one that is there is this one."""
    path, content = bundle()

    async def once() -> AsyncIterator[bytes]:
        yield content

    if not await guest.exists(path):
        await guest.write_file(path, once(), mode=0o755)
    return path


async def _interpreter(guest: Guest, language: ContextLanguage) -> Sequence[str]:
    """What Python code finds to import is the machine's. The other languages are only driven by a Python."""
    if language != "python" and await guest.exists(BROUGHT[0]):
        return BROUGHT
    return ("python3",)


async def _running(guest: Guest) -> list[ExecInfo]:
    found = [info for info in await guest.execs() if info.running and _is_context(info)]
    return sorted(found, key=lambda info: info.started_at)


async def _found(guest: Guest, context_id: str) -> ExecInfo:
    for info in await _running(guest):
        if _context(info).id == context_id:
            return info
    raise ContextNotFound(f"there is no context {context_id!r}; contexts end with a restart of the machine")


def _is_context(info: ExecInfo) -> bool:
    return info.id.startswith(_PREFIX) and info.label in {f"code {language}" for language in _LANGUAGES}


def _context(info: ExecInfo) -> ContextInfo:
    language = (info.label or "").removeprefix("code ")
    return ContextInfo.model_validate(
        {
            "id": info.id.removeprefix(_PREFIX).rpartition("-")[0],
            "language": language,
            "cwd": info.cwd,
            "user": info.user,
            "created_at": info.started_at,
        }
    )


def _offsets(info: ExecInfo) -> dict[str, int]:
    return {"stdout_offset": info.stdout_bytes, "stderr_offset": info.stderr_bytes}


async def _lines(execution: Any, request_id: str) -> AsyncIterator[dict[str, Any]]:
    """The events of one request. Others, and what is no event, are passed over."""
    line = bytearray()
    async for item in execution:
        if isinstance(item, Exit):
            raise ContextEnded("the process of the context ended; what it knew is gone, and a new run makes a new one")
        if isinstance(item, Lost):
            raise ContextEnded("events of the run were lost while nobody could read them")
        if item.stream != "stdout":
            continue
        *whole, rest = item.data.split(b"\n")
        for part in whole:
            line += part
            event = _parsed(line)
            line.clear()
            if event is not None and event.get("id") == request_id:
                yield event
        line += rest
        if len(line) > MAX_LINE_BYTES:
            raise GuestFailure("the context said more at once than it may")
    raise ContextEnded("the channel to the context broke")


def _parsed(line: bytearray) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None  # the rest of a line whose beginning was for somebody else
    return event if isinstance(event, dict) else None


def _checked(event: dict[str, Any]) -> CodeEvent:
    try:
        return _EVENT.validate_python(event)
    except (ValidationError, RecursionError):
        raise GuestFailure("the context said something that is no event") from None


async def _ready(events: AsyncIterator[dict[str, Any]]) -> None:
    try:
        async with asyncio.timeout(START_S):
            async for event in events:
                if event.get("type") == "ready":
                    return
                if event.get("type") == "failed":
                    raise LanguageMissing(str(event.get("message"))[:2000])
    except TimeoutError:
        raise OperationTimeout(f"the context was not ready within {START_S:.0f} s") from None
