"""A scripted daemon for tests of the client: its connections break where the test wants them to."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx

from forkyard import AsyncForkyard, Forkyard

INFO = {
    "id": "sabcdefghijklmnopqrs",
    "state": "running",
    "cause": "ready",
    "incarnation": 1,
    "shape": {"vcpus": 1, "memory_mib": 512, "disk_gib": 8},
    "created_at": "2026-01-01T00:00:00Z",
    "updated_at": "2026-01-01T00:00:00Z",
}
ID = INFO["id"]
BREAK = object()


class Script(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body: documents are NDJSON lines, BREAK is a connection that is reset there."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[bytes]:
        for item in self._items:
            if item is BREAK:
                raise httpx.ReadError("connection reset by peer")
            yield b"\n" if item is None else json.dumps(item).encode() + b"\n"

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece


def out(data: bytes, offset: int = 0, stream: str = "stdout") -> dict[str, Any]:
    return {"type": "output", "stream": stream, "offset": offset, "data": base64.b64encode(data).decode()}


STARTED = {"type": "started", "exec_id": "e1", "pid": 7}
EXIT = {"type": "exit", "exit_code": 0, "signal": None, "timed_out": False, "duration_ms": 12.5}


class Daemon:
    """Answers by route, in order; the last answer is repeated. An exception is raised as the transport would."""

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []
        self._routes: dict[str, list[Any]] = {f"GET /sandboxes/{ID}": [INFO]}

    def on(self, route: str, *answers: Any) -> Daemon:
        self._routes[route] = list(answers)
        return self

    def asked(self, route: str) -> list[httpx.Request]:
        return [request for request in self.requests if route_of(request) == route]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answers = self._routes[route_of(request)]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, list):
            return httpx.Response(200, stream=Script(answer))
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, json=answer)


def route_of(request: httpx.Request) -> str:
    return f"{request.method} {request.url.path.removeprefix('/api/v1')}"


def problem(error: Exception) -> httpx.Response:
    body = error.to_problem()  # type: ignore[attr-defined]
    return httpx.Response(body["status"], json=body)


class Both:
    """Runs the same steps with both clients."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous

    def exec(self, daemon: Daemon, command: str | list[str] = "x", **options: Any) -> Any:
        if not self.asynchronous:
            with Forkyard(transport=httpx.MockTransport(daemon)) as fy:
                return fy.sandboxes.get(ID).exec(command, **options)

        async def run() -> Any:
            async with AsyncForkyard(transport=httpx.MockTransport(daemon)) as fy:
                return await (await fy.sandboxes.get(ID)).exec(command, **options)

        return asyncio.run(run())

    def call(self, daemon: Daemon, sync: Callable[[Forkyard], Any], other: Callable[[AsyncForkyard], Any]) -> Any:
        if not self.asynchronous:
            with Forkyard(transport=httpx.MockTransport(daemon)) as fy:
                return sync(fy)

        async def run() -> Any:
            async with AsyncForkyard(transport=httpx.MockTransport(daemon)) as fy:
                return await other(fy)

        return asyncio.run(run())

    def on_sandbox(self, daemon: Daemon, verb: str, *args: Any, **options: Any) -> Any:
        """A method of the sandbox, by its name."""

        async def other(fy: AsyncForkyard) -> Any:
            return await getattr(await fy.sandboxes.get(ID), verb)(*args, **options)

        return self.call(daemon, lambda fy: getattr(fy.sandboxes.get(ID), verb)(*args, **options), other)

    def create(self, daemon: Daemon, **options: Any) -> Any:
        return self.call(daemon, lambda fy: fy.sandboxes.create(**options), lambda fy: fy.sandboxes.create(**options))
