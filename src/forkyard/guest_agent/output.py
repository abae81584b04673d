"""Recent output of one exec, in the order it came, with the offset of every byte in its stream. Pure.

Owns: what is kept and what is dropped. Who reads, and when to hold the process back, is for `execs.py`.
"""

from __future__ import annotations

from collections import deque

_SMALL = 4096  # a piece below this size is grown by what follows on the same stream
_PIECE_COST = 128  # what a piece costs beside its bytes: alternating one-byte writes must not eat the memory


class _Piece:
    __slots__ = ("data", "offset", "position", "stream")

    def __init__(self, stream: int, offset: int, position: int, data: bytes) -> None:
        self.stream = stream
        self.offset = offset
        self.position = position  # of its first byte, counted over both streams
        self.data: bytes | bytearray = bytearray(data) if len(data) < _SMALL else data


class Cursor:
    """Where one reader is. `position` counts the bytes of both streams."""

    __slots__ = ("index", "offsets", "position")

    def __init__(self, index: int, position: int, offsets: tuple[int, int]) -> None:
        self.index = index  # of the piece it is in, counted from the first ever
        self.position = position
        self.offsets = offsets  # bytes before these were not asked for


class Output:
    def __init__(self) -> None:
        self.size = 0  # memory in use
        self.position = 0  # bytes ever added
        self.totals = [0, 0]  # bytes ever added, per stream
        self._kept_from = [0, 0]
        self._pieces: deque[_Piece] = deque()
        self._first = 0  # index of _pieces[0]

    def add(self, stream: int, data: bytes) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.stream == stream and len(last.data) < _SMALL:
            last.data += data  # a bytearray, for it is small or was
        else:
            self._pieces.append(_Piece(stream, self.totals[stream], self.position, data))
            self.size += _PIECE_COST
        self.size += len(data)
        self.totals[stream] += len(data)
        self.position += len(data)

    def trim(self, limit: int, needed_from: int) -> None:
        """Drop the oldest until `limit` holds, but nothing at or after position `needed_from`."""
        pieces = self._pieces
        while self.size > limit and pieces and pieces[0].position + len(pieces[0].data) <= needed_from:
            piece = pieces.popleft()
            self._first += 1
            self.size -= len(piece.data) + _PIECE_COST
            self._kept_from[piece.stream] = piece.offset + len(piece.data)

    def cursor(self, stdout_offset: int, stderr_offset: int) -> tuple[Cursor, list[tuple[int, int, int]]]:
        """A reader from these offsets on, and what it can no longer have: (stream, offset, count)."""
        position = self._pieces[0].position if self._pieces else self.position
        wanted = (stdout_offset, stderr_offset)
        lost = [
            (stream, offset, kept - offset)
            for stream, (offset, kept) in enumerate(zip(wanted, self._kept_from, strict=True))
            if offset < kept
        ]
        return Cursor(self._first, position, wanted), lost

    def read(self, cursor: Cursor, limit: int) -> tuple[int, bytes | memoryview] | None:
        """The next (stream, data) of this reader; None if it has all there is."""
        while cursor.position < self.position:
            piece = self._pieces[cursor.index - self._first]
            start = cursor.position - piece.position
            if start >= len(piece.data):
                cursor.index += 1
                continue
            not_wanted = cursor.offsets[piece.stream] - piece.offset
            if not_wanted > start:
                cursor.position = piece.position + min(not_wanted, len(piece.data))
                continue
            data = memoryview(piece.data)[start : start + limit]
            cursor.position += len(data)
            # One that may still grow must not be pinned by a view.
            return piece.stream, data if isinstance(piece.data, bytes) else bytes(data)
        return None
