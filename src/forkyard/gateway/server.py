"""The HTTP server that everything comes in by: uvicorn, with bounds on what a client may do before it is heard.

A request's head must be there whole within `HEAD_S` and in `MAX_HEAD_BYTES`; a client that sends it byte by byte, or
never, is dropped. So is one that takes nothing of its answer for `STALL_S`. What WebSockets hold is bounded over all of them
(`holding`).

An app may have a shortcut: a request that it can pass on at once, without waiting for anything of its own, is passed on in
the call that read it and answered in the call that read the answer, without a task. What cannot go on like that goes on as
a task.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import resource
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from forkyard.gateway.holding import TRY_LATER, WHY, Hold, Room
from forkyard.gateway.shortcut import Shortcut
from forkyard.gateway.sockets import HOLD, MAX_MESSAGE_BYTES
from forkyard.gateway.upstream import Headers

HEAD_S = 30.0
MAX_HEAD_BYTES = 128 * 1024
#: Between two requests on one connection.
KEEP_ALIVE_S = 75
#: A client that takes nothing of what waits for it.
STALL_S = 300.0
BACKLOG = 2048


class Gathering:
    """A transport whose writes in one turn of the event loop go out together: an answer's head with its body, in one
    packet, for which the client is woken once. While it is watched, a client that takes nothing is dropped."""

    stall_s = STALL_S

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []
        self._left = 0
        self._lost = False
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def write_now(self, data: bytes) -> None:
        self._flush()
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        left = 0 if self._lost else self._transport.get_write_buffer_size()
        self._transport.close()
        if left:  # it closes when that is gone
            self.watch()

    def watch(self) -> None:
        """From when writing has to wait; until `unwatch`."""
        if self._timer is None and not self._lost:
            self._left = self._transport.get_write_buffer_size()
            self._timer = self._loop.call_later(self.stall_s, self._look)

    def unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def lost(self) -> None:
        self._lost = True  # and its size is not to be asked for any more
        self.unwatch()

    def _look(self) -> None:
        self._timer = None
        if self._transport.get_write_buffer_size() < self._left:
            self.watch()
        else:
            self._transport.abort()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces:
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Waiting:
    """A `Client` of uvicorn."""

    __slots__ = ("_cycle", "_http", "gone")

    def __init__(self, http: GuardedHttp, cycle: RequestResponseCycle) -> None:
        self._http = http
        self._cycle = cycle
        self.gone: Callable[[], None] | None = None

    def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        cycle, transport = self._cycle, self._http.transport
        if cycle.flow.write_paused or transport.is_closing():
            return False
        lines, framed = [STATUS_LINE[status]], status in (204, 304) or cycle.scope["method"] == "HEAD"
        for name, value in headers:
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"content-length" and not framed:
                framed = value == b"%d" % len(body)
                if not framed:
                    return False
        if not framed:
            lines.append(b"transfer-encoding: chunked\r\n")
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        if _HEAD.fullmatch(head) is None:
            return False
        cast(Gathering, transport).write_now(head + body)
        self.gone = None
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            transport.close()
        cycle.on_response()
        return True

    def go_on(self, app: ASGIApp) -> None:
        self.gone = None
        self._http.start_task(self._cycle, app)


_HEAD = re.compile(rb"HTTP/1\.1 [^\r\n]*\r\n(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [\t\x20-\x7e\x80-\xff]*\r\n)*\r\n")


class GuardedHttp(HttpToolsProtocol):
    head_s = HEAD_S

    def __init__(self, *args: Any, shortcut: Shortcut | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._shortcut = shortcut
        self._waiting: Waiting | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Gathering(transport, self.loop)))
        self._head_timer = self.loop.call_later(self.head_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        cast(Gathering, self.transport).lost()
        super().connection_lost(exc)
        if self._waiting is not None and self._waiting.gone is not None:
            self._waiting.gone()

    def data_received(self, data: bytes) -> None:
        # A part of the head that came together with a body is at most one read long.
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES + len(data):
                self._stop_timer()
                self.send_400_response("The head of the request is too large.")
                return
        super().data_received(data)
        if self._in_head and self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self.head_s, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        cast(Gathering, self.transport).watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        cast(Gathering, self.transport).unwatch()

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._shortcut is not None and cycle.scope["http_version"] == "1.1":
            self._waiting = Waiting(self, cycle)
            if self._shortcut(cast(Scope, cycle.scope), self._waiting):
                return
        self.start_task(cycle, app)

    def start_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, app)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class GuardedSocket(WebSocketsSansIOProtocol):
    """The app finds what it holds in the scope, to say whose it is."""

    def __init__(self, *args: Any, room: Room, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._room = room
        self._hold = Hold(room, "")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._hold.belongs_to(self.client[0] if self.client else "")

    def connection_lost(self, exc: Exception | None) -> None:
        cast(Gathering, self.transport).lost()
        super().connection_lost(exc)
        self._hold.close()

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            cast(dict[str, Any], self.scope["extensions"])[HOLD] = self._hold

    def data_received(self, data: bytes) -> None:
        if self._hold.came(len(data)):
            super().data_received(data)
        elif not self.transport.is_closing():
            self.conn.fail(TRY_LATER, WHY)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.close_sent = True
            self.transport.close()

    async def receive(self) -> Any:
        self._hold.passed()
        message = await super().receive()
        self._hold.taken()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        await self.writable.wait()  # until then it is still in the hands of whoever sends it

    def pause_writing(self) -> None:
        super().pause_writing()
        cast(Gathering, self.transport).watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        cast(Gathering, self.transport).unwatch()


class Server(uvicorn.Server):
    """`signals=False`: a second server of one process."""

    def __init__(self, config: uvicorn.Config, *, signals: bool = True) -> None:
        super().__init__(config)
        if not signals:
            self.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]


_ROOM = Room()  # of all servers of this process: its memory is one


def configured(app: Any, *, grace_s: int, shortcut: Shortcut | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast(Any, functools.partial(GuardedHttp, shortcut=shortcut)),
        ws=cast(Any, functools.partial(GuardedSocket, room=_ROOM)),
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # its state is most of what an idle socket would cost
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,  # answers of guests have their own
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
        backlog=BACKLOG,
        proxy_headers=False,  # whoever we are behind, what a client says of itself is not believed
    )


def raise_file_limit() -> None:
    """Every preview is two descriptors, and the usual limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
