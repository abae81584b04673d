"""One epoch with a host: its streams, their credit, and whose turn it is to send.

Owns: opening a stream for each request, answering it exactly once, flow control in both directions. What a request
means is in `operations.py`. When the epoch ends, all streams are closed; processes are not streams and go on.
"""

from __future__ import annotations

import json
import struct
from collections import deque

from . import VERSION, frames
from .failures import Failure, from_os_error
from .loop import log, log_exception

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .channel import Channel

    Handler = Callable[["Stream", dict[str, Any]], dict[str, Any] | None]

VERSION_SPOKEN = 1
FEATURES: tuple[str, ...] = ()
WINDOW_BYTES = 512 << 10
_MAX_STREAMS = 1024
_MAX_REQUEST_BYTES = 1 << 20

_to_json = json.JSONEncoder(separators=(",", ":")).encode
_CREDIT = struct.Struct(">I")


def to_json(value: object) -> bytes:
    return _to_json(value).encode()


#: Made beforehand: a greeting is the first thing a restored machine does, when every line of code is slow.
_ABOUT = to_json({"version": VERSION_SPOKEN, "agent": VERSION, "window": WINDOW_BYTES, "features": FEATURES})


class Task:
    """What a stream does after its request. All methods are called by the stream; none may block."""

    def pump(self) -> bool:
        """Send at most one frame. True if there is more to send and credit for it."""
        return False

    def receive(self, data: bytes) -> None:
        """Data from the host. `Stream.grant` gives the credit back when it is dealt with."""

    def finish(self) -> None:
        """The host has sent all."""

    def close(self) -> None:
        """The stream is over, however it came to be. Called once."""


class Stream:
    __slots__ = ("_granted", "_open", "_received", "_scheduled", "_session", "answered", "credit", "id", "task")

    def __init__(self, session: Session, stream_id: int, credit: int) -> None:
        self._session = session
        self.id = stream_id
        self.credit = credit
        self.task: Task | None = None
        self.answered = False
        self._open = True
        self._scheduled = False
        self._granted = WINDOW_BYTES  # what the host may still send
        self._received = 0  # consumed, not yet given back

    def room(self) -> int:
        """How large a body may be sent now."""
        return min(self.credit - frames.OVERHEAD, frames.CHUNK)

    def answer(self, result: dict[str, Any]) -> None:
        if self._open and not self.answered:
            self.answered = True
            self._session.send(frames.RESPONSE, 0, self.id, to_json({"ok": result}))

    def send(self, kind: int, data: bytes | bytearray | memoryview) -> None:
        self.credit -= len(data) + frames.OVERHEAD
        self._session.send(frames.DATA, kind, self.id, data)

    def end(self, result: dict[str, Any]) -> None:
        """The last word on a stream: END after its RESPONSE, or that RESPONSE itself."""
        if self._open:
            if self.answered:
                self._session.send(frames.END, 0, self.id, to_json(result))
            else:
                self.answer(result)
            self.close()

    def fail(self, failure: Failure) -> None:
        if self._open:
            error = {"code": failure.code, "message": failure.message}
            if self.answered:
                self._session.send(frames.ERROR, 0, self.id, to_json(error))
            else:
                self._session.send(frames.RESPONSE, 0, self.id, to_json({"error": error}))
            self.close()

    def grant(self, count: int) -> None:
        """`count` bytes that `Task.receive` got are dealt with."""
        self._received += count
        if self._open and self._received >= WINDOW_BYTES // 4:
            self._session.send(frames.WINDOW, 0, self.id, _CREDIT.pack(self._received))
            self._granted += self._received
            self._received = 0

    def schedule(self) -> None:
        """Ask for a turn to send."""
        if self._open and not self._scheduled:
            self._scheduled = True
            self._session.ready.append(self)

    def take_turn(self) -> None:
        self._scheduled = False
        if self._open and self.task is not None:
            try:
                more = self.task.pump()
            except OSError as error:
                self.fail(from_os_error(error, "reading"))
            except Failure as failure:
                self.fail(failure)
            else:
                if more:
                    self.schedule()

    def receive(self, data: bytes) -> None:
        self._granted -= len(data) + frames.OVERHEAD
        if self._granted < 0:
            self.fail(Failure("invalid_request", "more data than the window allows"))
            return
        self.grant(frames.OVERHEAD)
        if self.task is not None:
            self.task.receive(data)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._session.forget(self)
            if self.task is not None:
                self.task.close()


def acknowledgement(hello: bytes) -> bytes:
    """The body of a HELLO_ACK: the host's nonce, and what this agent is. There is one version so far; a host that does
    not speak it leaves."""
    return hello[4:20] + _ABOUT


class Session:
    def __init__(self, channel: Channel, hello: bytes, handlers: dict[str, Handler]) -> None:
        self.hello = hello
        self._channel = channel
        self._handlers = handlers
        self._streams: dict[int, Stream] = {}
        self._partial: dict[int, bytearray] = {}
        self.ready: deque[Stream] = deque()
        self.send = channel.send
        try:
            self._window = int(json.loads(hello[20:])["window"])
        except (ValueError, TypeError, KeyError):
            log("HELLO without a window")
            self._window = 0

    def take(self, frame: frames.Frame) -> None:
        kind, flags, stream_id, body = frame
        if kind == frames.REQUEST:
            self._request(stream_id, body, more=bool(flags & frames.MORE))
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            return  # under way when the stream ended
        try:
            if kind == frames.DATA:
                stream.receive(body)
            elif kind == frames.WINDOW and len(body) == _CREDIT.size:
                stream.credit += _CREDIT.unpack(body)[0]
                stream.schedule()
            elif kind == frames.END:
                if stream.task is not None:
                    stream.task.finish()
            elif kind == frames.CANCEL:
                stream.close()
        except OSError as error:
            stream.fail(from_os_error(error, "writing"))
        except Failure as failure:
            stream.fail(failure)
        except Exception as error:
            log_exception("stream", error)
            stream.fail(Failure("guest_failure", f"the agent failed: {error}"))

    def _request(self, stream_id: int, body: bytes, *, more: bool) -> None:
        if more or stream_id in self._partial:
            whole = self._partial.setdefault(stream_id, bytearray())
            if len(whole) <= _MAX_REQUEST_BYTES:
                whole += body
            if more:
                return
            body = bytes(self._partial.pop(stream_id))
        if stream_id in self._streams:
            return
        stream = Stream(self, stream_id, self._window)
        self._streams[stream_id] = stream
        try:
            if len(self._streams) > _MAX_STREAMS:
                raise Failure("no_capacity", f"more than {_MAX_STREAMS} streams at once")
            if len(body) > _MAX_REQUEST_BYTES:
                raise Failure("invalid_request", f"the request is larger than {_MAX_REQUEST_BYTES} bytes")
            result = self._handle(stream, body)
        except OSError as error:
            stream.fail(from_os_error(error, "request"))
        except Failure as failure:
            stream.fail(failure)
        except Exception as error:
            log_exception("request", error)
            stream.fail(Failure("guest_failure", f"the agent failed: {type(error).__name__}: {error}"))
        else:
            if result is not None:
                stream.end(result)

    def _handle(self, stream: Stream, body: bytes) -> dict[str, Any] | None:
        try:
            request = json.loads(body)
            op = request["op"]
        except (ValueError, RecursionError, KeyError, TypeError):
            raise Failure("invalid_request", "a request is a JSON object with an `op`") from None
        handler = self._handlers.get(op) if isinstance(op, str) else None
        if handler is None:
            raise Failure("unsupported", f"this agent ({VERSION}) has no operation {op!r}")
        return handler(stream, request)

    def pump(self, budget: int) -> None:
        """Let ready streams send in turn, about `budget` bytes."""
        ready = self.ready
        while ready and budget > 0:
            stream = ready.popleft()
            before = stream.credit
            stream.take_turn()
            budget -= max(before - stream.credit, frames.OVERHEAD)

    def forget(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)

    def close(self) -> None:
        for stream in list(self._streams.values()):
            stream.close()
        self.ready.clear()
