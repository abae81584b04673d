"""Answers that go on: NDJSON of events, bytes of files.

Owns: what happens while an answer is under way. The source is opened *before* the response begins, so a failure to
open it is an ordinary error answer; a later one is a last line (`NdjsonStream`) or a cut connection (`ByteStream`). A
client that goes away is noticed at once, and whatever was opened for it is closed.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import Any, TypeVar

import structlog
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from forkyard.api.problem import known
from forkyard.errors import GuestUnreachable
from forkyard.guest.base import Execution, Exit, Lost, Output

log = structlog.get_logger(__name__)

KEEP_ALIVE_S = 15.0
T = TypeVar("T")


class _Stream(StreamingResponse):
    keep_alive = b""

    def __init__(self, opened: AsyncExitStack, chunks: AsyncGenerator[bytes, None], status_code: int = 200) -> None:
        super().__init__(chunks, status_code, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._opened = opened
        self._chunks = chunks
        self._sending = asyncio.Lock()
        self._idle = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async with self._opened:
            # The connection is all these tasks share: whichever ends first, the others have nothing left to do.
            tasks = [asyncio.create_task(self._pump(send)), asyncio.create_task(_until_gone(receive))]
            if self.keep_alive:
                tasks.append(asyncio.create_task(self._keep_alive(send)))
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    await self._send(send, chunk)
        except ClientDisconnect:
            return
        except Exception as raised:
            last = self.last_words(raised)
            if last is None:
                return
            await self._send(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._idle = True
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._idle:
                await self._send(send, self.keep_alive)

    async def _send(self, send: Send, chunk: bytes) -> None:
        async with self._sending:
            self._idle = False
            try:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except OSError:
                raise ClientDisconnect from None

    def last_words(self, raised: Exception) -> bytes | None:
        """What a broken stream ends with; None cuts the connection."""
        raise NotImplementedError


class NdjsonStream(_Stream):
    media_type = "application/x-ndjson"
    keep_alive = b"\n"

    def last_words(self, raised: Exception) -> bytes:
        return line({"type": "error", "problem": known(raised).to_problem()})


class ByteStream(_Stream):
    """Half a file must not look like a whole one, and there is no other way to say so than not to end the answer."""

    media_type = "application/octet-stream"

    def last_words(self, raised: Exception) -> None:
        log.warning("download broken off", error=known(raised).message)


class TarStream(ByteStream):
    media_type = "application/x-tar"


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def opened(source: AbstractAsyncContextManager[T]) -> tuple[AsyncExitStack, T]:
    """Enter `source` now; the stream it is given to leaves it."""
    stack = AsyncExitStack()
    return stack, await stack.enter_async_context(source)


def line(item: BaseModel | Mapping[str, Any]) -> bytes:
    content = item.model_dump(mode="json") if isinstance(item, BaseModel) else item
    return json.dumps(content, separators=(",", ":"), default=str).encode("ascii") + b"\n"


async def lines(items: AsyncIterator[BaseModel], first: Mapping[str, Any] | None = None) -> AsyncGenerator[bytes, None]:
    if first is not None:
        yield line(first)
    async for item in items:
        yield line(item)


async def exec_lines(execution: Execution, denials: Callable[[str], list[str]]) -> AsyncGenerator[bytes, None]:
    """`denials`: what the network refused an exec; told with an exit that is a failure."""
    yield line({"type": "started", "exec_id": execution.id, "pid": execution.pid})
    async for item in execution:
        event = exec_event(item)
        if isinstance(item, Exit):
            yield line({**event, "denied": denials(execution.id) if item.exit_code != 0 else []})
            return
        yield line(event)
    raise GuestUnreachable(f"the channel to exec {execution.id} broke; attach to it again to go on")


def exec_event(item: Output | Lost | Exit) -> dict[str, Any]:
    """The wire form of `models.ExecEvent`; by hand, for it is made for every piece of output."""
    match item:
        case Output(stream, offset, data):
            return {"type": "output", "stream": stream, "offset": offset, "data": b64encode(data).decode("ascii")}
        case Lost(stream, offset, count):
            return {"type": "lost", "stream": stream, "offset": offset, "bytes": count}
        case Exit(exit_code, signal, timed_out, duration_ms):
            return {
                "type": "exit",
                "exit_code": exit_code,
                "signal": signal,
                "timed_out": timed_out,
                "duration_ms": duration_ms,
            }


async def non_empty(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for chunk in chunks:
        if chunk:
            yield chunk
