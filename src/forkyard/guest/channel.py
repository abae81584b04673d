"""The host's end of the channel: one connection to one agent, and the streams multiplexed on it.

Owns: the handshake, flow control in both directions, and the limits a hostile guest meets: it can fill no more than
the windows we gave it, and one step outside the protocol ends the connection.
Never does: reconnecting; whoever holds the connection sees `closed` and makes a new one. What requests mean is in
`client.py`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from forkyard.errors import BY_CODE, ForkyardError, GuestFailure, GuestUnreachable
from forkyard.guest import frames, records
from forkyard.guest.frames import Frame, Kind, Violation

VERSIONS = (1, 1)
WINDOW_BYTES = 512 << 10
_MAX_WINDOW_BYTES = 16 << 20
_STRAY_BYTES = 64 << 10
_RETRY_S = (0.3, 0.6, 1.2, 2.5, 5.0)
#: A machine just restored is slow at first, slower on a busy host, and to answer twice takes it twice as long.
_FRESH_RETRY_S = 1.0
_KEEPALIVE_S = 15.0
_KEEPALIVE_ANSWER_S = 30.0

to_json = json.JSONEncoder(separators=(",", ":")).encode


class Stream:
    """One request and what follows it. Used by one task; `close` always, however it ends."""

    def __init__(self, channel: Channel, stream_id: int, *, streaming: bool) -> None:
        self._channel = channel
        self._id = stream_id
        self._credit = channel.agent_window
        self._window = WINDOW_BYTES  # what the agent may still send
        self._consumed = 0  # taken by our reader, not yet given back
        self._queue: deque[tuple[int, bytes]] = deque()
        self._answer: dict[str, Any] | None = None
        self._result: dict[str, Any] | None = None
        self._failure: ForkyardError | None = None
        self._news = asyncio.Event()
        self._streaming = streaming  # data follows the agent's answer
        self._over = False  # nothing more comes from the agent

    # ── our side ─────────────────────────────────────────────────────────────────────────────────────────────────

    def request(self, op: str, **arguments: Any) -> None:
        body = to_json({"op": op, **arguments}).encode()
        pieces = [body[at : at + frames.MAX_BODY] for at in range(0, len(body), frames.MAX_BODY)]
        for piece in pieces[:-1]:
            self._channel.send(Kind.REQUEST, frames.MORE, self._id, piece)
        self._channel.send(Kind.REQUEST, 0, self._id, pieces[-1])

    async def answer(self, timeout_s: float) -> dict[str, Any]:
        """The agent's RESPONSE."""
        while self._answer is None:
            await self._wait(timeout_s)
        return self._answer

    async def read(self, timeout_s: float | None) -> tuple[int, bytes] | None:
        """The next data; None at the end, when `result` has what the agent said last."""
        while not self._queue:
            if self._result is not None:
                return None
            await self._wait(timeout_s)
        kind, data = self._queue.popleft()
        self._consumed += len(data) + frames.OVERHEAD
        if self._consumed >= WINDOW_BYTES // 4 and not self._over:
            self._channel.send(Kind.WINDOW, 0, self._id, frames.encode_credit(self._consumed))
            self._window += self._consumed
            self._consumed = 0
        return kind, data

    @property
    def result(self) -> dict[str, Any]:
        return self._result or {}

    async def send(self, data: bytes, timeout_s: float) -> bool:
        """All of `data`, as the agent takes it. False if it has answered already and wants no more."""
        view = memoryview(data)
        while view:
            while self._answer is None and (self._credit <= frames.OVERHEAD or not self._channel.writable.is_set()):
                if self._credit > frames.OVERHEAD:
                    await self._channel.wait_writable(timeout_s)
                    self._check()
                else:
                    await self._wait(timeout_s)
            self._check()
            if self._answer is not None:
                return False
            piece = view[: min(frames.CHUNK, self._credit - frames.OVERHEAD)]
            self._credit -= len(piece) + frames.OVERHEAD
            self._channel.send(Kind.DATA, frames.BYTES, self._id, piece)
            view = view[len(piece) :]
        return True

    def end(self) -> None:
        if not self._over:
            self._channel.send(Kind.END, 0, self._id, b"")

    def close(self) -> None:
        self._channel.forget(self._id, self._window if not self._over else 0)
        if not self._over:
            self._over = True
            self._channel.send(Kind.CANCEL, 0, self._id, b"")
        self._queue.clear()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _wait(self, timeout_s: float | None) -> None:
        """Until something changed. Data that arrived before a failure is still there to be read."""
        self._check()
        self._news.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            raise GuestUnreachable(
                f"The agent inside the sandbox did not answer within {timeout_s:g} s. It may be overloaded; try again."
            ) from None
        if not self._queue:
            self._check()

    # ── the agent's side: called by the channel, never waits ─────────────────────────────────────────────────────

    def take(self, frame: Frame) -> None:
        if self._over:
            raise Violation("a frame after the end of its stream")
        if frame.kind == Kind.DATA:
            self._window -= len(frame.body) + frames.OVERHEAD
            if self._window < 0 or self._answer is None:
                raise Violation("data beyond what was allowed")
            self._queue.append((frame.flags, frame.body))
        elif frame.kind == Kind.WINDOW:
            credit = frames.decode_credit(frame.body)
            self._credit += credit
            if not credit or self._credit > self._channel.agent_window:
                raise Violation("more credit than there was data")
        elif frame.kind == Kind.RESPONSE and self._answer is None:
            self._take_response(records.parse(frame.body))
        elif frame.kind == Kind.END and self._answer is not None:
            self._over = True
            self._result = records.parse(frame.body)
        elif frame.kind == Kind.ERROR and self._answer is not None:
            self._over = True
            self._failure = _failure(records.parse(frame.body))
        else:
            raise Violation(f"a frame of type {frame.kind} out of turn")
        self._news.set()

    def _take_response(self, response: dict[str, Any]) -> None:
        if isinstance(response.get("error"), dict):
            self._over = True
            self._failure = _failure(response["error"])
        elif isinstance(response.get("ok"), dict):
            self._answer = response["ok"]
            self._over = not self._streaming
        else:
            raise Violation("a response with neither `ok` nor `error`")

    def break_off(self, failure: ForkyardError) -> None:
        if not self._over:
            self._over = True
            self._failure = failure
        self._news.set()


def _failure(error: dict[str, Any]) -> ForkyardError:
    """The agent's word as one of our errors. A guest may speak only of itself: other codes are a `GuestFailure`."""
    message = records.text(error, "message")[:4096]
    code = error.get("code")
    cls = BY_CODE.get(code, GuestFailure) if isinstance(code, str) and code in _GUEST_CODES else GuestFailure
    return cls(message)


_GUEST_CODES = frozenset(
    {
        *("invalid_request", "invalid_path", "exec_not_found", "file_missing", "conflict", "file_conflict"),
        *("guest_failure", "guest_permission_denied", "guest_disk_full", "command_not_found", "no_capacity"),
    }
)


class Channel(asyncio.Protocol):
    def __init__(self) -> None:
        self._epoch = secrets.randbelow(0xFFFFFFFF) + 1
        self._nonce = secrets.token_bytes(frames.NONCE_BYTES)
        self._parser = frames.Parser(self._epoch, self._nonce)
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, Stream] = {}
        self._last_id = 0
        self._stray_allowance = _STRAY_BYTES
        self._received_bytes = 0
        self._news = asyncio.Event()  # during the handshake
        self._keeper: asyncio.Task[None] | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self.closed = asyncio.Event()
        self.agent_version = ""
        self.agent_window = 0

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def handshake(self, *, fresh: bool, along: Callable[[], object] | None = None) -> bool:
        """Until the agent has answered our HELLO, or the connection is lost. The caller has the deadline. `along` sends
        what can go with the first HELLO. Returns whether that one was answered: then what went along arrived too."""
        wishes = to_json({"versions": VERSIONS, "window": WINDOW_BYTES}).encode()
        hello = frames.encode_hello(self._epoch, self._nonce, wishes)
        transport = self._transport
        assert transport is not None
        attempt = 0
        while not self._parser.connected:
            if self.closed.is_set():
                raise GuestUnreachable("The machine closed the agent's channel.")
            # What waits unsent has not reached the machine yet, and another copy would not either.
            if transport.get_write_buffer_size() == 0:
                # An agent that says it is lost needs no preamble: it looks for nothing but a HELLO.
                bare = self._parser.hello_needed or (fresh and attempt == 0)
                self._parser.hello_needed = False
                transport.write(hello if bare else frames.PREAMBLE + hello)
                if along is not None:
                    along()
                    along = None
            self._news.clear()
            try:
                retry_s = _FRESH_RETRY_S if fresh and attempt == 0 else _RETRY_S[min(attempt, len(_RETRY_S) - 1)]
                async with asyncio.timeout(retry_s):
                    await self._news.wait()
                if self._parser.hello_needed:
                    await asyncio.sleep(0.02)  # a guest that repeats itself must not make us do the same
            except TimeoutError:
                attempt += 1
        if not self.agent_window:
            raise GuestUnreachable(f"The agent speaks no protocol version we know ({VERSIONS[0]} to {VERSIONS[1]}).")
        self._keeper = asyncio.create_task(self._keep_alive(), name="guest keep-alive")
        return attempt == 0

    async def close(self) -> None:
        self._break("The channel to the agent was closed.")
        await self.closed.wait()

    def _break(self, reason: str) -> None:
        failure = GuestUnreachable(reason)
        for stream in self._streams.values():
            stream.break_off(failure)
        if self._transport is not None:
            self._transport.abort()
        else:
            self.closed.set()

    async def _keep_alive(self) -> None:
        """An agent may die without a word while somebody waits for output that will never come."""
        while not self.closed.is_set():
            before = self._received_bytes
            await asyncio.sleep(_KEEPALIVE_S)
            if not self._streams or self._received_bytes != before:
                continue
            try:
                stream = self.open()
                try:
                    stream.request("ping")
                    await stream.answer(_KEEPALIVE_ANSWER_S)
                finally:
                    stream.close()
            except GuestUnreachable:
                self._break("The agent inside the sandbox stopped answering.")

    # ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, *, streaming: bool = False) -> Stream:
        if self.closed.is_set() or self._transport is None or self._transport.is_closing():
            raise GuestUnreachable("The channel to the agent is closed.")
        self._last_id += 1
        if self._last_id > 0xFFFFFFFF:
            self._break("The channel to the agent has used up its streams.")
            raise GuestUnreachable("The channel to the agent is closed.")
        stream = self._streams[self._last_id] = Stream(self, self._last_id, streaming=streaming)
        return stream

    def forget(self, stream_id: int, under_way_bytes: int) -> None:
        """What the agent sent before it hears of this may still arrive, and is dropped."""
        if self._streams.pop(stream_id, None) is not None and under_way_bytes:
            self._stray_allowance += under_way_bytes + _STRAY_BYTES

    def send(self, kind: Kind, flags: int, stream_id: int, body: bytes | memoryview) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.encode(kind, flags, stream_id, body, self._epoch))

    async def wait_writable(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.writable.wait()
        except TimeoutError:
            raise GuestUnreachable(f"The machine took no data for {timeout_s:g} s.") from None

    # ── asyncio.Protocol ─────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=256 << 10)

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        try:
            for frame in self._parser.feed(data):
                self._take(frame)
        except Violation as violation:
            self._break(f"The agent inside the sandbox broke the protocol: {violation}.")
        if not self._parser.connected and self._parser.hello_needed:
            self._news.set()

    def _take(self, frame: Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream is not None:
            stream.take(frame)
        elif frame.kind == Kind.HELLO_ACK:
            if not self.agent_window:
                self._take_ack(records.parse(frame.body))
        elif frame.kind == Kind.NEED_HELLO:
            self._break("The agent inside the sandbox was restarted.")
        else:
            self._stray_allowance -= len(frame.body) + frames.OVERHEAD
            if self._stray_allowance < 0:
                raise Violation("too many frames nobody asked for")

    def _take_ack(self, ack: dict[str, Any]) -> None:
        version = records.integer(ack, "version")
        if VERSIONS[0] <= version <= VERSIONS[1]:
            self.agent_version = records.text(ack, "agent")[:64]
            self.agent_window = records.integer(ack, "window", least=frames.MAX_BODY, most=_MAX_WINDOW_BYTES)
        self._news.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        if self._keeper is not None:
            self._keeper.cancel()
        self._break("The machine closed the agent's channel.")
        self.writable.set()
        self._news.set()
