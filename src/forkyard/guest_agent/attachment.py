"""One reader of an exec's output: from the kept output to a stream, at the pace of its credit."""

from __future__ import annotations

from . import frames
from .session import Task, to_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .execs import Exec
    from .session import Stream

STREAM_NAMES = ("stdout", "stderr")


class Attachment(Task):
    def __init__(self, stream: Stream, source: Exec, *, stdout_offset: int = 0, stderr_offset: int = 0) -> None:
        self._stream = stream
        self._exec = source
        self._cursor, lost = source.output.cursor(stdout_offset, stderr_offset)
        self._lost = [
            to_json({"lost": STREAM_NAMES[stream], "offset": offset, "count": count}) + b"\n"
            for stream, offset, count in lost
        ]
        source.attachments.append(self)
        stream.task = self

    @property
    def position(self) -> int:
        """Up to where this reader has taken the output; what follows must be kept for it."""
        return self._cursor.position

    def wake(self) -> None:
        self._stream.schedule()

    def pump(self) -> bool:
        room = self._stream.room()
        if self._lost:
            if room < len(self._lost[0]):
                return False
            self._stream.send(frames.LINES, self._lost.pop(0))
            return True
        if room <= 0:
            return False
        piece = self._exec.output.read(self._cursor, room)
        if piece is not None:
            self._stream.send(*piece)
            self._exec.reader_moved()
            return True
        if not self._exec.running:
            self._stream.end(self._exec.outcome())
        return False

    def close(self) -> None:
        self._exec.attachments.remove(self)
        self._exec.reader_moved()
