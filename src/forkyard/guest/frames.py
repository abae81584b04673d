"""Frames of the channel, as the host reads them. Pure; `guest_agent/PROTOCOL.md` is the contract.

Owns: the layout of a frame, and finding the agent's HELLO_ACK in whatever an earlier connection left in the pipe. The
agent cannot import this, so it has a copy of its own; a test holds the two together.
Never does: I/O. A guest is not trusted: the parser keeps at most one frame, and anything else is a `Violation`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    HELLO = 1
    HELLO_ACK = 2
    REQUEST = 3
    RESPONSE = 4
    DATA = 5
    WINDOW = 6
    END = 7
    ERROR = 8
    CANCEL = 9
    NEED_HELLO = 10


MORE = 1  # flag of REQUEST
BYTES, STDERR, LINES = range(3)  # kinds of DATA, in its flags

MAX_BODY = 65_536
OVERHEAD = 16  # header and trailer; also what a DATA frame costs beyond its body
CHUNK = MAX_BODY - OVERHEAD
NONCE_BYTES = 16
#: Completes any frame an agent may be in the middle of.
PREAMBLE = bytes(MAX_BODY + OVERHEAD)

_HEADER = struct.Struct(">2sBBII")
_EPOCH = struct.Struct(">I")
_CREDIT = struct.Struct(">I")
_ACK_HEADER = b"FY\x02\x00\x00\x00\x00\x00"
_MAX_HELLO = 1024


class Violation(Exception):
    """The guest sent something that is not in the protocol."""


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    body: bytes


def encode(kind: int, flags: int, stream: int, body: bytes | memoryview, epoch: int) -> bytes:
    return b"".join((_HEADER.pack(b"FY", kind, flags, stream, len(body)), body, _EPOCH.pack(epoch)))


def encode_hello(epoch: int, nonce: bytes, wishes: bytes) -> bytes:
    return encode(Kind.HELLO, 0, 0, _EPOCH.pack(epoch) + nonce + wishes, epoch)


def encode_credit(count: int) -> bytes:
    return _CREDIT.pack(count)


def decode_credit(body: bytes) -> int:
    if len(body) != _CREDIT.size:
        raise Violation(f"a WINDOW of {len(body)} bytes")
    credit: int = _CREDIT.unpack(body)[0]
    return credit


#: What an agent says that does not know our epoch.
NEED_HELLO = encode(Kind.NEED_HELLO, 0, 0, b"", 0)


class Parser:
    """Bytes in, frames out. Until the HELLO_ACK with our nonce all else is dropped; after it nothing may be wrong."""

    def __init__(self, epoch: int, nonce: bytes) -> None:
        self._epoch = epoch
        self._nonce = nonce
        self._buffer = bytearray()
        self.connected = False
        self.hello_needed = False  # seen before the HELLO_ACK: whoever is there waits for a HELLO

    def feed(self, data: bytes) -> list[Frame]:
        """All frames that are complete now; the first ever is the HELLO_ACK, its body without the nonce."""
        self._buffer += data
        frames: list[Frame] = []
        position = 0
        while True:
            step = self._next(position, frames) if self.connected else self._seek_ack(position, frames)
            if step is None:
                return frames
            position = step

    def _next(self, position: int, frames: list[Frame]) -> int | None:
        buffer = self._buffer
        available = len(buffer) - position
        if available < OVERHEAD:
            del buffer[:position]
            return None
        magic: bytes
        length: int
        magic, kind, flags, stream, length = _HEADER.unpack_from(buffer, position)
        if magic != b"FY" or length > MAX_BODY:
            raise Violation("bytes that are no frame")
        if available < length + OVERHEAD:
            del buffer[:position]
            return None
        end = position + 12 + length
        epoch = _EPOCH.unpack_from(buffer, end)[0]
        if epoch != self._epoch and not (kind == Kind.NEED_HELLO and epoch == 0):
            raise Violation("a frame of another epoch")
        with memoryview(buffer) as view:
            frames.append(Frame(kind, flags, stream, bytes(view[position + 12 : end])))
        return end + 4

    def _seek_ack(self, position: int, frames: list[Frame]) -> int | None:
        buffer = self._buffer
        if buffer.find(NEED_HELLO, position) >= 0:
            self.hello_needed = True
        found = buffer.find(_ACK_HEADER, position)
        if found < 0:
            # The end of the buffer may be the beginning of an ACK or of a NEED_HELLO.
            del buffer[: max(position, len(buffer) - len(NEED_HELLO) + 1)]
            return None
        if len(buffer) - found < 12:
            del buffer[:found]
            return None
        length: int = _HEADER.unpack_from(buffer, found)[4]
        if not NONCE_BYTES <= length <= _MAX_HELLO:
            return found + 1
        if len(buffer) - found < length + OVERHEAD:
            del buffer[:found]
            return None
        body = bytes(buffer[found + 12 : found + 12 + length])
        epoch = _EPOCH.unpack_from(buffer, found + 12 + length)[0]
        if epoch != self._epoch or body[:NONCE_BYTES] != self._nonce:
            return found + 1
        self.connected = True
        frames.append(Frame(Kind.HELLO_ACK, 0, 0, body[NONCE_BYTES:]))
        return found + OVERHEAD + length
