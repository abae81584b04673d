"""Requests that go on after their answer: a client that asked for it is told an id after some seconds, and comes again.

Owns: those under way, and what became of them, for some minutes. What they make is on record elsewhere; a daemon that
starts anew knows nothing of them, and says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from forkyard.compat.freestyle.calls import Call, done
from forkyard.compat.freestyle.errors import Refused
from forkyard.control.ground import new_id

AFTER_HEADER = "x-freestyle-background-after-secs"
ID_HEADER = "x-freestyle-background-request-id"
KEPT_S = 900.0
MOST = 1000


@dataclass
class Progress:
    """What is known of a request meanwhile: the build it waits for."""

    build_id: str | None = None

    def begun(self, build_id: str) -> None:
        self.build_id = build_id


Work = Callable[[Progress], Awaitable[dict[str, Any]]]


@dataclass
class _Request:
    task: asyncio.Task[dict[str, Any]]
    key_id: str
    progress: Progress
    ended_at: float | None = None


@dataclass
class Background:
    _requests: dict[str, _Request] = field(default_factory=dict)

    async def aclose(self) -> None:
        for one in self._requests.values():
            one.task.cancel()
        await asyncio.gather(*(one.task for one in self._requests.values()), return_exceptions=True)

    async def answer(self, call: Call, work: Work) -> Response:
        """What `work` returns; or 202 if it takes longer than the client wants to wait."""
        given = call.request.headers.get(AFTER_HEADER)
        if given is None or not given.isascii() or not given.isdigit() or len(given) > 4:
            return done(await work(Progress()))
        self._sweep()
        if len(self._requests) >= MOST:
            raise Refused(503, "SERVICE_UNAVAILABLE", f"{MOST} requests are under way in the background; try later")
        request_id, progress = f"ri-{new_id()}", Progress()
        task = asyncio.ensure_future(work(progress))
        one = self._requests[request_id] = _Request(task, call.who.id, progress)
        task.add_done_callback(lambda _: setattr(one, "ended_at", time.monotonic()))
        finished, _ = await asyncio.wait([task], timeout=int(given))
        if finished:
            del self._requests[request_id]
            return done(task.result())
        response = done({"requestId": request_id}, 202)
        response.headers[ID_HEADER] = request_id
        return response

    async def look(self, call: Call) -> Response:
        one = self._find(call)
        if not one.task.done():
            return done({"requestId": call.path["id"]}, 202)
        return done(one.task.result())

    def progress(self, request_id: str, key_id: str) -> Progress | None:
        one = self._requests.get(request_id)
        return None if one is None or one.key_id != key_id else one.progress

    def _find(self, call: Call) -> _Request:
        one = self._requests.get(call.path["id"])
        if one is None or one.key_id != call.who.id:
            raise Refused(404, "NOT_FOUND", f"there is no request {call.path['id'][:64]!r} in the background")
        return one

    def _sweep(self) -> None:
        now = time.monotonic()
        for request_id, one in list(self._requests.items()):
            if one.ended_at is not None and now - one.ended_at > KEPT_S:
                del self._requests[request_id]
