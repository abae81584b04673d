"""HTTP/1.1 towards a server in a guest: one connection, one exchange at a time, and a pool of idle connections.

The bytes are the guest's: whatever it sends, here it ends in an answer, a `BadAnswer` or a `Hangup`, within bounds. The
parser is llhttp (`httptools`), a new one for each answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
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
        self._deadline = 0.0
        self._too_late: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sent_bytes = 0
        self._received_bytes = 0
        self._timeout_s = 0.0
        # Of the exchange under way:
        self._heard: Callable[[], None] | None = None
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

    def start(
        self, request: bytes, *, head_only: bool, timeout_s: float, heard: Callable[[], None] | None = None
    ) -> None:
        """Send the head of a request, maybe with its body. `head_only`: the answer has no body. `heard` is called once:
        when the head of the answer is there, with what came along of its body, or it is clear that none will come."""
        self._head_only, self._heard = head_only, heard
        self._head, self._headers, self._head_bytes, self._framed = None, [], 0, False
        self._done = self._persistent = False
        self._parser = httptools.HttpResponseParser(self)
        # Servers of three lines of shell end theirs with a bare LF. It is read here and written anew: nobody else sees it.
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True)
        if self._transport is not None and not self._closed:
            self._sent_bytes += len(request)
            self._transport.write(request)
        self._timeout_s = timeout_s
        self._within(timeout_s, self._late)

    async def send(self, data: bytes) -> None:
        if self._transport is None or self._closed:
            raise Hangup
        self._sent_bytes += len(data)
        self._transport.write(data)
        if self._writable is not None:
            await self._writable

    async def head(self) -> Head:
        while self._head is None:
            self._raise()
            await self._wait()
        return self._head

    def whole(self) -> tuple[Head, bytes] | None:
        """The answer and its body, if it is there to its end. It stays there until it is `taken`."""
        if self._head is None or not self._done or self._error is not None:
            return None
        return self._head, bytes(self._body)

    async def body(self) -> tuple[bytes, bool]:
        """What has come of the body, and whether more follows."""
        while not (self._body or self._done):
            self._raise()
            await self._wait()
        data = bytes(self._body)
        self.taken()
        return data, not self._done

    def taken(self) -> None:
        """What has come of the body is somebody else's now."""
        self._body.clear()
        if self._reading_paused and self._transport is not None and not self._closed:
            self._reading_paused = False
            self._transport.resume_reading()

    @property
    def reusable(self) -> bool:
        return self._done and self._persistent and not self._closed and not self._body

    def forget(self) -> None:
        """Nobody waits for the answer any more."""
        self._heard = None

    def moved(self) -> tuple[int, int]:
        """Bytes to the guest and from it, since this was last asked."""
        moved = self._sent_bytes, self._received_bytes
        self._sent_bytes = self._received_bytes = 0
        return moved

    def close(self) -> None:
        self._at_leisure()
        if self._transport is not None:
            self._transport.abort()

    # ── while it is idle ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def closed(self) -> bool:
        return self._closed

    def expire_in(self, seconds: float) -> None:
        self._within(seconds, self.close)

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
        if self._head is not None:
            self._tell()

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
        self._too_late = None
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

    # ── deadlines ────────────────────────────────────────────────────────────────────────────────────────────────

    def _within(self, seconds: float, too_late: Callable[[], None]) -> None:
        """One at a time, and hardly any is ever reached: a timer that is set is kept for the next, and looks at the clock
        when it goes off."""
        self._deadline, self._too_late = self._loop.time() + seconds, too_late
        if self._timer is not None and self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(seconds, self._rang)

    def _rang(self) -> None:
        self._timer = None
        left_s = self._deadline - self._loop.time()
        if self._too_late is None:
            return
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._rang)
        else:
            self._too_late()

    def _at_leisure(self) -> None:
        self._too_late = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._fail(OperationTimeout(f"the server in the sandbox did not begin its answer in {self._timeout_s:.0f} s"))

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self) -> None:
        assert self._parser is not None
        self._done = True
        self._persistent = self._parser.should_keep_alive()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self.close()
        self._notify()
        self._tell()

    def _lost(self) -> None:
        self._closed = True
        self._at_leisure()
        self.resume_writing()
        if self._head is not None and not self._framed and not self._done and self._error is None:
            self._done = True  # without a length, the end of the connection is the end of the body
        self._notify()
        self._tell()
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

    def _tell(self) -> None:
        heard, self._heard = self._heard, None
        if heard is not None:
            heard()

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
