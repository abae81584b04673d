"""The writing end of a pipe or PTY, fed by streams of the host: what the process does not take yet waits here."""

from __future__ import annotations

import os
from collections import deque

from .failures import Failure
from .loop import ERR, OUT, Loop
from .session import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .execs import Exec
    from .session import Stream

#: A write is answered when no more than this still waits, so that a process slow to read does not hold up its writer.
_ANSWER_BELOW_BYTES = 65_536


class Feeder(Task):
    """A stream whose data goes into an `Inlet`."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def written(self, count: int) -> None:
        self.stream.grant(count)

    def broken(self) -> None:
        """Nobody reads any more."""


class Inlet:
    def __init__(self, loop: Loop, fd: int) -> None:
        self._loop = loop
        self._fd = fd
        self._queue: deque[tuple[memoryview, Feeder | None]] = deque()
        self._watched = False
        self._finishing = False
        self.waiting_bytes = 0

    @property
    def closed(self) -> bool:
        return self._fd < 0 or self._finishing

    def write(self, data: bytes, feeder: Feeder | None) -> None:
        self._queue.append((memoryview(data), feeder))
        self.waiting_bytes += len(data)
        if not self._watched:
            self._flush()

    def finish(self) -> None:
        """Close when all is written."""
        self._finishing = True
        if not self._queue:
            self.close()

    def close(self) -> None:
        if self._fd < 0:
            return
        if self._watched:
            self._loop.unwatch(self._fd)
        os.close(self._fd)
        self._fd = -1
        self.waiting_bytes = 0
        feeders = {feeder for _, feeder in self._queue if feeder is not None}
        self._queue.clear()
        for feeder in feeders:
            feeder.broken()

    def _flush(self, events: int = 0) -> None:
        if events & ERR:
            self.close()
            return
        while self._queue:
            data, feeder = self._queue[0]
            try:
                count = os.write(self._fd, data)
            except BlockingIOError:
                if not self._watched:
                    self._watched = True
                    self._loop.watch(self._fd, OUT, self._flush)
                return
            except OSError:
                self.close()
                return
            self.waiting_bytes -= count
            if count < len(data):
                self._queue[0] = (data[count:], feeder)
            else:
                self._queue.popleft()
            if feeder is not None:
                feeder.written(count)
        if self._watched:
            self._watched = False
            self._loop.unwatch(self._fd)
        if self._finishing:
            self.close()


class StdinTask(Feeder):
    """Data for the standard input of an exec; answered when the process has taken (nearly) all."""

    def __init__(self, stream: Stream, target: Exec, *, close: bool) -> None:
        super().__init__(stream)
        if target.inlet is None:
            raise Failure("conflict", f"exec {target.id} was started without stdin")
        if target.inlet.closed:
            raise Failure("conflict", f"the standard input of exec {target.id} is closed")
        self._exec = target
        self._inlet = target.inlet
        self._close = close
        self._finished = False

    def receive(self, data: bytes) -> None:
        if self._inlet.closed:
            self.broken()
        else:
            self._inlet.write(data, self)

    def finish(self) -> None:
        self._finished = True
        if self._close:
            self._exec.close_stdin()
        self._answer_if_done()

    def written(self, count: int) -> None:
        self.stream.grant(count)
        self._answer_if_done()

    def broken(self) -> None:
        self.stream.fail(Failure("conflict", f"exec {self._exec.id} does not read its standard input any more"))

    def _answer_if_done(self) -> None:
        if self._finished and self._inlet.waiting_bytes <= _ANSWER_BELOW_BYTES:
            self.stream.end({})
