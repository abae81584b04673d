"""One SSH channel as bytes to read and a place to write, with a bound on what waits in between.

Owns: backpressure both ways. A client that sends faster than the guest takes is not read; a guest that prints faster
than the client takes is not read either. Never does: what the bytes mean (`ssh_sessions`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, TypeAlias

from asyncssh.channel import SSHChannel

#: More than this waits for the guest: the client has to wait too.
HIGH_BYTES = 512 * 1024
#: Of what came in many pieces, so much is handed on at once.
PIECE_BYTES = 64 * 1024


class Resized:
    """The window of the client."""

    def __init__(self, rows: int, cols: int) -> None:
        self.rows = min(max(rows, 1), 1000)
        self.cols = min(max(cols, 1), 1000)


class Signalled:
    def __init__(self, name: str) -> None:
        self.name = name


Input: TypeAlias = bytes | Resized | Signalled | None


class ClientGone(Exception):
    """Nobody is at the other end any more."""


class Flow:
    """Mixed into sessions of asyncssh: the methods below are its callbacks, but for `read` and `write`."""

    _chan: SSHChannel[bytes]

    def __init__(self) -> None:
        self._inputs: deque[Input] = deque()
        self._waiting_bytes = 0
        self._held = False
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self.gone = asyncio.Event()

    async def read(self) -> Input:
        """What came next; None: that was all."""
        while not self._inputs:
            if self.gone.is_set():
                raise ClientGone
            self._news.clear()
            await self._news.wait()
        item = self._inputs.popleft()
        if isinstance(item, bytes):
            pieces, size = [item], len(item)
            while self._inputs and isinstance(more := self._inputs[0], bytes) and size + len(more) <= PIECE_BYTES:
                self._inputs.popleft()
                pieces.append(more)
                size += len(more)
            self._waiting_bytes -= size
            if self._held and self._waiting_bytes < HIGH_BYTES // 2:
                self._held = False
                self._chan.resume_reading()
            return b"".join(pieces)
        return item

    async def write(self, data: bytes, datatype: int | None = None) -> None:
        await self._writable.wait()
        if self.gone.is_set():
            raise ClientGone
        self._chan.write(data, datatype)

    # ── callbacks ────────────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, chan: Any) -> None:
        self._chan = chan

    def data_received(self, data: bytes, datatype: int | None) -> None:  # noqa: ARG002
        self._waiting_bytes += len(data)
        self._put(data)
        if self._waiting_bytes > HIGH_BYTES and not self._held:
            self._held = True
            self._chan.pause_reading()

    def eof_received(self) -> bool:
        self._put(None)
        return True  # we may still have something to say

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:  # noqa: ARG002
        # A window that is dragged changes many times; only where it ends matters.
        if self._inputs and isinstance(self._inputs[-1], Resized):
            self._inputs.pop()
        self._put(Resized(height, width))

    def signal_received(self, signal: str) -> None:
        if sum(isinstance(item, Signalled) for item in self._inputs) < 16:
            self._put(Signalled(signal))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.gone.set()
        self._news.set()
        self._writable.set()

    def _put(self, item: Input) -> None:
        self._inputs.append(item)
        self._news.set()
