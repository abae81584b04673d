"""Carries bytes between two sockets: half-closes, back-pressure, the meter of the door.

One buffer serves all connections, because nothing is kept in it between two turns of the event loop; a connection that
waits costs its two sockets and no more. What a slow reader has not taken is kept, and nothing more is read until it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

from forkyard.net.limits import Meter

_BUFFER = memoryview(bytearray(128 << 10))
_RESET = struct.pack("ii", 1, 0)

Bytes = bytes | memoryview
#: Sees what is read; returns what goes on. May raise to end the connection.
Filter = Callable[[memoryview], Bytes]


class BudgetSpent(Exception):
    """The byte that just came was the last."""


def reset(sock: socket.socket) -> None:
    """Close so that the other end learns at once that it is over."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


class Pipe:
    """One direction. Not started until `resume`."""

    def __init__(
        self,
        source: socket.socket,
        target: socket.socket,
        meter: Meter,
        count: Callable[[int], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._source, self._target = source, target
        self._source_fd, self._target_fd = source.fileno(), target.fileno()
        self._meter, self._count, self._ended = meter, count, ended
        self.filter: Filter | None = None
        self._pending: memoryview | None = None
        self._paused = True
        self._eof = False
        self._timer: asyncio.TimerHandle | None = None
        self.over = False

    def resume(self) -> None:
        if self.over or not self._paused:
            return
        self._paused = False
        if self._pending is None and not self._eof:
            self._loop.add_reader(self._source_fd, self._readable)

    def pause(self) -> None:
        if not self.over and not self._paused:
            self._paused = True
            self._loop.remove_reader(self._source_fd)

    def write(self, data: Bytes) -> None:
        """Send this after what was sent before."""
        if self.over or not data:
            return
        if self._pending is not None:
            self._pending = memoryview(bytes(self._pending) + bytes(data))
            return
        try:
            sent = self._target.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The other end reads no more. What it still has to say travels the other way.
            self.stop()
            self._ended(None)
            return
        if sent < len(data):
            self._pending = memoryview(bytes(data[sent:]))
            self._loop.remove_reader(self._source_fd)
            self._loop.add_writer(self._target_fd, self._writable)

    def stop(self) -> None:
        """Let go of both sockets; they are not closed here."""
        if self.over:
            return
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._source_fd)
        if self._pending is not None:
            self._loop.remove_writer(self._target_fd)
            self._pending = None

    def _readable(self) -> None:
        room = self._meter.room(len(_BUFFER))
        if not room:
            self._loop.remove_reader(self._source_fd)
            self._timer = self._loop.call_later(self._meter.wait_s(), self._go_on)
            return
        try:
            size = self._source.recv_into(_BUFFER[:room])
        except BlockingIOError:
            return
        except OSError as error:
            self.stop()
            self._ended(error)
            return
        if not size:
            self._eof = True
            self._loop.remove_reader(self._source_fd)
            self._finish()
            return
        self._count(size)
        if self.over:
            return  # it was the byte too much
        if self.filter is None:
            self.write(_BUFFER[:size])
            return
        try:
            passed = self.filter(_BUFFER[:size])
        except Exception as error:
            self.stop()
            self._ended(error)
            return
        self.write(passed)

    def _go_on(self) -> None:
        self._timer = None
        if not self.over and not self._paused and self._pending is None:
            self._loop.add_reader(self._source_fd, self._readable)

    def _writable(self) -> None:
        assert self._pending is not None
        try:
            sent = self._target.send(self._pending)
        except BlockingIOError:
            return
        except OSError:
            self.stop()
            self._ended(None)
            return
        if sent < len(self._pending):
            self._pending = self._pending[sent:]
            return
        self._pending = None
        self._loop.remove_writer(self._target_fd)
        if self._eof:
            self._finish()
        elif not self._paused:
            self._loop.add_reader(self._source_fd, self._readable)

    def _finish(self) -> None:
        if self._pending is not None:
            return
        with contextlib.suppress(OSError):
            self._target.shutdown(socket.SHUT_WR)
        self.stop()
        self._ended(None)


class Relay:
    """Both directions. It owns `inner` and `outer`: when it is over both are closed."""

    def __init__(self, inner: socket.socket, outer: socket.socket, meter: Meter) -> None:
        self._loop = asyncio.get_running_loop()
        self.inner, self.outer, self._meter = inner, outer, meter
        self.bytes_out = 0
        self.bytes_in = 0
        self.last_s = self._loop.time()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.up = Pipe(inner, outer, meter, self._count_out, self._one_ended)
        self.down = Pipe(outer, inner, meter, self._count_in, self._one_ended)

    async def run(self) -> None:
        """Until both ends are done. Raises what broke it."""
        self.up.resume()
        self.down.resume()
        await self.over
        self.stop()
        self.inner.close()
        self.outer.close()

    def close(self) -> None:
        """Without courtesies, unless it has run to its end."""
        self.stop()
        reset(self.inner)
        reset(self.outer)
        if self.over.done() and not self.over.cancelled():
            self.over.exception()  # it was seen

    def abort(self, error: BaseException) -> None:
        self.stop()
        if not self.over.done():
            self.over.set_exception(error)

    def stop(self) -> None:
        """Let go of both sockets; they are not closed."""
        self.up.stop()
        self.down.stop()

    def _one_ended(self, error: BaseException | None) -> None:
        if error is not None:
            self.abort(error)
        elif self.up.over and self.down.over and not self.over.done():
            self.over.set_result(None)

    def _count_out(self, size: int) -> None:
        self.bytes_out += size
        self.last_s = self._loop.time()
        self._meter.passed(bytes_out=size)
        if self._meter.spent():
            self.abort(BudgetSpent())

    def _count_in(self, size: int) -> None:
        self.bytes_in += size
        self.last_s = self._loop.time()
        self._meter.passed(bytes_in=size)
        if self._meter.spent():
            self.abort(BudgetSpent())
