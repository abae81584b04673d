"""Frames: bytes of the channel to frames and back. Pure; the host has its own copy, and a test holds the two together.

Owns: the layout of a frame, and how a parser that lost the thread finds it again (PROTOCOL.md, 1).
Never does: I/O, or looking into a body other than a HELLO's.
"""

from __future__ import annotations

import struct

HELLO, HELLO_ACK, REQUEST, RESPONSE, DATA, WINDOW, END, ERROR, CANCEL, NEED_HELLO = range(1, 11)

BYTES, STDERR, LINES = range(3)  # kinds of DATA, in its flags
MORE = 1  # flag of REQUEST

MAX_BODY = 65_536
OVERHEAD = 16  # header and trailer; also what a DATA frame costs beyond its body
#: A frame of this body is exactly two of the 32 KiB pieces in which the kernel's virtio-serial driver takes a write.
CHUNK = MAX_BODY - OVERHEAD

_HEADER = struct.Struct(">2sBBII")
_EPOCH = struct.Struct(">I")
_HELLO_HEADER = b"FY\x01\x00\x00\x00\x00\x00"
_HELLO_PREFIX = 20  # epoch and nonce
_MAX_HELLO = 1024

Frame = tuple[int, int, int, bytes]  # type, flags, stream, body


def encode(kind: int, flags: int, stream: int, body: bytes | bytearray | memoryview, epoch: int) -> bytes:
    return b"".join((_HEADER.pack(b"FY", kind, flags, stream, len(body)), body, _EPOCH.pack(epoch)))


class Parser:
    """The agent's ear. Starts lost; a HELLO gives it its epoch."""

    def __init__(self) -> None:
        self.epoch = 0
        self.lost = True
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """All frames that are complete now. Nothing ever raises: what is not a frame is dropped."""
        self._buffer += data
        frames: list[Frame] = []
        position = 0
        while True:
            step = self._seek_hello(position, frames) if self.lost else self._next(position, frames)
            if step is None:
                break
            position = step
        return frames

    def _keep_from(self, position: int) -> None:
        del self._buffer[:position]

    def _next(self, position: int, frames: list[Frame]) -> int | None:
        """The frame at `position`; where the next begins, or None if more bytes are needed."""
        buffer = self._buffer
        available = len(buffer) - position
        if available and buffer[position] == 0:
            padding = available - len(buffer[position:].lstrip(b"\0"))
            return position + padding
        if available < 12:
            if available and not b"FY".startswith(buffer[position : position + 2]):
                self.lost = True
                return position + 1
            self._keep_from(position)
            return None
        magic: bytes
        kind: int
        length: int
        magic, kind, flags, stream, length = _HEADER.unpack_from(buffer, position)
        if magic != b"FY" or length > MAX_BODY:
            self.lost = True
            return position + 1
        if available < length + OVERHEAD:
            self._keep_from(position)
            return None
        if kind == HELLO:
            self.lost = True
            return position
        end = position + 12 + length
        if _EPOCH.unpack_from(buffer, end)[0] != self.epoch:
            self.lost = True
            return position + 1
        with memoryview(buffer) as view:
            frames.append((kind, flags, stream, bytes(view[position + 12 : end])))
        return end + 4

    def _seek_hello(self, position: int, frames: list[Frame]) -> int | None:
        buffer = self._buffer
        position = buffer.find(_HELLO_HEADER, position)
        if position < 0:
            # The end of the buffer may be the beginning of a HELLO.
            self._keep_from(max(0, len(buffer) - len(_HELLO_HEADER) + 1))
            return None
        if len(buffer) - position < 12:
            self._keep_from(position)
            return None
        length: int = _HEADER.unpack_from(buffer, position)[4]
        if not _HELLO_PREFIX <= length <= _MAX_HELLO:
            return position + 1
        if len(buffer) - position < length + OVERHEAD:
            self._keep_from(position)
            return None
        body = bytes(buffer[position + 12 : position + 12 + length])
        epoch = _EPOCH.unpack_from(buffer, position + 12 + length)[0]
        if epoch == 0 or epoch != _EPOCH.unpack_from(body)[0]:
            return position + 1
        self.epoch = epoch
        self.lost = False
        frames.append((HELLO, 0, 0, body))
        return position + OVERHEAD + length
