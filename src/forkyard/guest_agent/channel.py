"""The channel: the file descriptor to the host. Owns reading, writing, the epoch, and finding the thread again.

Never does: looking into a request; `session.py` does, and lives exactly as long as one epoch.
"""

from __future__ import annotations

import os
import stat
from collections import deque

from . import frames
from .loop import EDGE, HUP, IN, OUT, Loop, log
from .session import acknowledgement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .session import Session

#: While more than this waits to be sent, no stream is asked for more.
_SEND_AHEAD = 4 * frames.MAX_BODY
#: While more than this waits to be sent, the host is not listened to: it asks faster than it reads.
_SEND_LIMIT = 4 << 20
_READS_PER_TURN = 8
_KERNEL_WRITE = 32 << 10  # what the virtio-serial driver takes at once
_PAGE = 4096


class Channel:
    def __init__(
        self,
        loop: Loop,
        open_port: Callable[[], int],
        new_session: Callable[[Channel, bytes], Session],
        *,
        on_open: Callable[[], object],
        behind_front: bool = False,
    ) -> None:
        self._loop = loop
        self._open_port = open_port
        self._new_session = new_session
        self._behind_front = behind_front
        self._on_open: Callable[[], object] | None = on_open  # the first time
        self._open_failures = 0
        self._fd = -1
        self._parser = frames.Parser()
        self._session: Session | None = None
        self._outgoing: deque[bytes | memoryview] = deque()
        self._outgoing_bytes = 0
        self._blocked = False  # the port takes no more at present
        self._asked_for_hello_at = -1.0
        # The driver hands out one page per read; a list of pages lets one system call take several.
        self._incoming = memoryview(bytearray(frames.MAX_BODY))
        self._pages = [self._incoming[at : at + _PAGE] for at in range(0, frames.MAX_BODY, _PAGE)]
        loop.after_turn = self.flush

    def open(self) -> None:
        """Open the port, and again later if it is not there (yet, or any more)."""
        try:
            self._fd = self._open_port()
        except OSError as error:
            self._open_failures += 1
            if self._open_failures in (1, 100):
                log(f"cannot open the channel, trying again: {error}")
            self._loop.later(0.1, self.open)
            return
        self._open_failures = 0
        self._blocked = False
        self._parser = frames.Parser()
        # Edge-triggered: a port whose host end is closed is always "ready" and would keep the loop spinning.
        self._loop.watch(self._fd, IN | OUT | EDGE, self._on_event)
        if self._behind_front:
            # What it is to answer a HELLO with. That it was started it knows.
            self._queue(frames.encode(frames.HELLO_ACK, 0, 0, acknowledgement(bytes(20)), 0))
        else:
            self._ask_for_hello()
        self._loop.soon(self._read)
        if self._on_open is not None:
            self._loop.soon(self._on_open)
            self._on_open = None

    def _on_event(self, events: int) -> None:
        if events & OUT:
            self._blocked = False
        if events & (IN | HUP):
            self._read()

    def _read(self) -> None:
        for _ in range(_READS_PER_TURN):
            if self._fd < 0:
                return
            if self._outgoing_bytes > _SEND_LIMIT:
                self._loop.later(0.01, self._read)
                return
            try:
                count = os.readv(self._fd, self._pages)
            except BlockingIOError:
                return
            except OSError as error:
                log(f"channel: {error}")
                self._close()
                return
            if count == 0:
                self._host_left()
                return
            for frame in self._parser.feed(self._incoming[:count]):
                self._take(frame)
            if self._parser.lost:
                self._lose(self._incoming[:count])
        self._loop.soon(self._read)

    def _take(self, frame: frames.Frame) -> None:
        if frame[0] == frames.HELLO:
            body = frame[3]
            known = self._session is not None and self._session.hello == body
            if not known:
                self._end_session()
            self.send(frames.HELLO_ACK, 0, 0, acknowledgement(body))
            self._write()  # at once: somebody waits for this machine to wake up
            if not known:
                self._session = self._new_session(self, body)
        elif self._session is not None:
            self._session.take(frame)

    def _lose(self, data: memoryview) -> None:
        """Between a lost thread and the next HELLO nothing that was agreed holds any more."""
        self._end_session()
        if bytes(data).strip(b"\0"):
            self._ask_for_hello()

    def _ask_for_hello(self) -> None:
        now = self._loop.now()
        if now - self._asked_for_hello_at >= 1:
            self._asked_for_hello_at = now
            self._queue(frames.encode(frames.NEED_HELLO, 0, 0, b"", 0))

    def _host_left(self) -> None:
        self._end_session()
        self._parser = frames.Parser()
        if not stat.S_ISCHR(os.fstat(self._fd).st_mode):
            self._close()
        # Else the port stays open, and the next event tells when a host is back.

    def _close(self) -> None:
        self._end_session()
        self._loop.unwatch(self._fd)
        os.close(self._fd)
        self._fd = -1
        self._loop.later(0.05, self.open)

    def _end_session(self) -> None:
        session, self._session = self._session, None
        begun = self._begun()
        self._outgoing.clear()
        self._outgoing.extend(begun)
        self._outgoing_bytes = sum(map(len, begun))
        if session is not None:
            session.close()

    def _begun(self) -> list[bytes | memoryview]:
        """The rest of what the front has in part: it knows whole frames only, and would take the next for that rest. A host
        finds the thread again by itself."""
        begun = self._behind_front and self._outgoing and isinstance(self._outgoing[0], memoryview)
        return [self._outgoing[0]] if begun else []

    def send(self, kind: int, flags: int, stream: int, body: bytes | bytearray | memoryview) -> None:
        self._queue(frames.encode(kind, flags, stream, body, self._parser.epoch))

    def _queue(self, frame: bytes) -> None:
        self._outgoing.append(frame)
        self._outgoing_bytes += len(frame)

    def flush(self) -> None:
        """Write what waits, and let the streams fill up again, until the port or the streams have no more."""
        while self._fd >= 0:
            if self._session is not None and self._outgoing_bytes < _SEND_AHEAD:
                self._session.pump(_SEND_AHEAD - self._outgoing_bytes)
            if not self._outgoing or self._blocked:
                return
            self._write()

    def _write(self) -> None:
        piece = self._next_piece()
        try:
            written = os.write(self._fd, piece[:_KERNEL_WRITE])
        except BlockingIOError:
            written = 0
            self._blocked = True
        except OSError as error:
            log(f"channel: {error}")
            self._close()
            return
        self._outgoing_bytes -= written
        if written < len(piece):
            self._outgoing.appendleft(memoryview(piece)[written:])

    def _next_piece(self) -> bytes | memoryview:
        """The next frame, or several small ones joined: each write is a trip out of the virtual machine."""
        piece = self._outgoing.popleft()
        if not self._outgoing or len(piece) + len(self._outgoing[0]) > _KERNEL_WRITE:
            return piece
        pieces = [piece]
        size = len(piece)
        while self._outgoing and size + len(self._outgoing[0]) <= _KERNEL_WRITE:
            piece = self._outgoing.popleft()
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)
