"""HTTP/1.1 towards a server in a guest: one connection, one exchange at a time, and a pool of idle connections.

The bytes are the guest's: whatever it sends, here it ends in an answer, a `BadAnswer` or a `Hangup`, within bounds. The
parser is llhttp (`httptools`), a new one for each answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import cast

import httptools

from forkyard.errors import BadAnswer, OperationTimeout

Headers = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 256 * 1024
#: So much of an answer waits here for a slow client; then the guest is held back.
WINDOW_BYTES = 256 * 1024
#: Less than the usual five seconds after which servers close idle connections themselves.
IDLE_S = 4.0
IDLE_PER_PORT = 64
#: Of more machines than these, those without a connection are forgotten.
MAX_MACHINES = 256

_NO_CONTENT = frozenset({204, 304})


class Hangup(Exception):
    """The guest closed the connection before it had answered."""


@dataclass(frozen=True)
class Head:
    status: int
    headers: Headers


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._closed = False
        self._expiry: asyncio.TimerHandle | None = None
        self._sent_bytes = 0
        self._received_bytes = 0
        # Of the exchange under way:
        self._head_only = False
        self._head: Head | None = None
        self._headers: Headers = []
        self._head_bytes = 0
        self._framed = False
        self._body = bytearray()
        self._done = False
        self._persistent = False
        self._reading_paused = False
        self._error: Exception | None = None

    # ── an exchange ──────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, request: bytes, *, head_only: bool) -> None:
        """Send the head of a request, maybe with its body. `head_only`: the answer has no body."""
        self._head_only = head_only
        self._head, self._headers, self._head_bytes, self._framed = None, [], 0, False
        self._done = self._persistent = False
        self._parser = httptools.HttpResponseParser(self)
        # Servers of three lines of shell end theirs with a bare LF. It is read here and written anew: nobody else sees it.
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True)
        if self._transport is not None and not self._closed:
            self._sent_bytes += len(request)
            self._transport.write(request)

    async def send(self, data: bytes) -> None:
        if self._transport is None or self._closed:
            raise Hangup
        self._sent_bytes += len(data)
        self._transport.write(data)
        if self._writable is not None:
            await self._writable

    async def head(self, timeout_s: float) -> Head:
        timer = self._loop.call_later(timeout_s, self._late, timeout_s)
        try:
            while self._head is None:
                self._raise()
                await self._wait()
            return self._head
        finally:
            timer.cancel()

    def _late(self, timeout_s: float) -> None:
        self._fail(OperationTimeout(f"the server in the sandbox did not begin its answer in {timeout_s:.0f} s"))

    async def body(self) -> tuple[bytes, bool]:
        """What has come of the body, and whether more follows."""
        while not (self._body or self._done):
            self._raise()
            await self._wait()
        data = bytes(self._body)
        self._body.clear()
        if self._reading_paused and self._transport is not None and not self._closed:
            self._reading_paused = False
            self._transport.resume_reading()
        return data, not self._done

    @property
    def reusable(self) -> bool:
        return self._done and self._persistent and not self._closed and not self._body

    def moved(self) -> tuple[int, int]:
        """Bytes to the guest and from it, since this was last asked."""
        moved = self._sent_bytes, self._received_bytes
        self._sent_bytes = self._received_bytes = 0
        return moved

    def close(self) -> None:
        self._stop_expiry()
        if self._transport is not None:
            self._transport.abort()

    # ── while it is idle ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def closed(self) -> bool:
        return self._closed

    def expire_in(self, seconds: float) -> None:
        self._expiry = self._loop.call_later(seconds, self.close)

    def _stop_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def wake(self) -> None:
        self._stop_expiry()

    # ── asyncio's side ───────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._parser is None or self._done:  # nobody asked
            self.close()
            return
        if self._head is None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES + len(data):
                self._fail(BadAnswer(f"the head of the answer is larger than {MAX_HEAD_BYTES} bytes"))
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(BadAnswer("the server in the sandbox changed the protocol without being asked"))
        except httptools.HttpParserError as error:
            if not self._done:
                self._fail(BadAnswer(f"what the server in the sandbox sent is not HTTP ({error})"))
            self._persistent = False

    def eof_received(self) -> None:
        self._lost()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._lost()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # ── the parser's side ────────────────────────────────────────────────────────────────────────────────────────

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is not None:  # a trailer
            return
        name = name.lower()
        self._headers.append((name, value))
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            return
        if not 200 <= status <= 599:
            self._fail(BadAnswer(f"the server in the sandbox answered with the status {status}"))
            return
        self._head = Head(status, self._headers)
        if self._head_only or status in _NO_CONTENT:
            self._finish()
        self._notify()

    def on_body(self, body: bytes) -> None:
        if self._done:
            return
        self._body += body
        if len(self._body) > WINDOW_BYTES and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()
        self._notify()

    def on_message_complete(self) -> None:
        if self._head is None:  # 1xx: the answer is still to come
            self._headers, self._framed = [], False
        elif not self._done:
            self._finish()
            self._notify()

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self) -> None:
        assert self._parser is not None
        self._done = True
        self._persistent = self._parser.should_keep_alive()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self.close()
        self._notify()

    def _lost(self) -> None:
        self._closed = True
        self._stop_expiry()
        self.resume_writing()
        if self._head is not None and not self._framed and not self._done and self._error is None:
            self._done = True  # without a length, the end of the connection is the end of the body
        self._notify()
        if self._transport is not None:
            self._transport.close()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise Hangup

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Pool:
    """Idle connections to machines. `machine` stands for one that has run without a break: another one has other
    connections, and the old ones are of no use."""

    def __init__(self) -> None:
        self._idle: dict[str, tuple[Hashable, dict[int, deque[Connection]]]] = {}

    def take(self, sandbox_id: str, machine: Hashable, port: int) -> Connection | None:
        connections = self._ports(sandbox_id, machine).get(port)
        while connections:
            connection = connections.pop()
            if not connection.closed:
                connection.wake()
                return connection
        return None

    def give(self, sandbox_id: str, machine: Hashable, port: int, connection: Connection) -> None:
        """For the next one, if it can be used again."""
        known = self._idle.get(sandbox_id)
        if not connection.reusable or known is None or known[0] != machine:
            connection.close()
            return
        connections = known[1].setdefault(port, deque())
        while connections and (len(connections) >= IDLE_PER_PORT or connections[0].closed):
            connections.popleft().close()
        connections.append(connection)
        connection.expire_in(IDLE_S)
        if len(self._idle) > MAX_MACHINES:
            self._sweep()

    def close(self) -> None:
        for sandbox_id in list(self._idle):
            self._drop(sandbox_id)

    def _sweep(self) -> None:
        for sandbox_id, (_, ports) in list(self._idle.items()):
            if all(connection.closed for connections in ports.values() for connection in connections):
                del self._idle[sandbox_id]

    def _ports(self, sandbox_id: str, machine: Hashable) -> dict[int, deque[Connection]]:
        known = self._idle.get(sandbox_id)
        if known is None or known[0] != machine:
            self._drop(sandbox_id)
            known = self._idle[sandbox_id] = (machine, {})
        return known[1]

    def _drop(self, sandbox_id: str) -> None:
        _, ports = self._idle.pop(sandbox_id, (None, {}))
        for connections in ports.values():
            for connection in connections:
                connection.close()
