"""The HTTP server that everything comes in by: uvicorn, with bounds on what a client may do before it is heard.

A request's head must be there whole within `HEAD_S` and in `MAX_HEAD_BYTES`; a client that sends it byte by byte, or
never, is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forkyard.gateway.sockets import MAX_MESSAGE_BYTES

HEAD_S = 30.0
MAX_HEAD_BYTES = 128 * 1024
#: Between two requests on one connection.
KEEP_ALIVE_S = 75
BACKLOG = 2048


class Gathering:
    """A transport whose writes in one turn of the event loop go out together: an answer's head with its body, in one
    packet, for which the client is woken once."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces:
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class GuardedHttp(HttpToolsProtocol):
    head_s = HEAD_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Gathering(transport, self.loop)))
        self._head_timer = self.loop.call_later(self.head_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # A part of the head that came together with a body is at most one read long.
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES + len(data):
                self._stop_timer()
                self.send_400_response("The head of the request is too large.")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_s, self.transport.abort)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class Server(uvicorn.Server):
    """`signals=False`: a second server of one process."""

    def __init__(self, config: uvicorn.Config, *, signals: bool = True) -> None:
        super().__init__(config)
        if not signals:
            self.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]


def configured(app: Any, *, grace_s: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=GuardedHttp,
        ws="websockets-sansio",
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
