"""What a build has to say, line by line, on disk: readers come, go, and come back where they were.

Owns: the file of one build and the news that it has grown. A line that was written stays; a build that prints without
end is cut short, not held up.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forkyard.guest.base import Stream
from forkyard.models.builds import BuildEnd, BuildOutput, BuildPhase, BuildState, build_event

MAX_BYTES = 16 * 2**20
_BATCH_BYTES = 256 * 1024


class Journal:
    """Written by one build, read by anybody."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = _count(path)
        self._size = path.stat().st_size if path.exists() else 0
        self._news = asyncio.Event()
        self._decoders: dict[Stream, codecs.IncrementalDecoder] = {}
        self._cut = False
        self.ended = False

    def phase(self, phase: str, layer: int, text: str, *, step: int | None = None, ms: float | None = None) -> None:
        self._write({"type": "phase", "phase": phase, "layer": layer, "step": step, "text": text, "duration_ms": ms})

    def output(self, stream: Stream, data: bytes) -> None:
        decoder = self._decoders.get(stream)
        if decoder is None:
            decoder = self._decoders[stream] = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        if self._size + len(data) > MAX_BYTES:
            if self._cut:
                return
            self._cut, text = True, "\n… more output than is kept; the rest is dropped\n"
        if text:
            self._write({"type": "output", "stream": stream, "text": text})

    def end(self, state: BuildState, message: str | None = None) -> None:
        self._write({"type": "end", "state": state, "message": message})
        self.close()

    def close(self) -> None:
        self.ended = True
        self._wake()

    def _write(self, event: dict[str, Any]) -> None:
        if self.ended:
            return
        self._lines += 1
        line = json.dumps({"n": self._lines, "at": datetime.now(UTC).isoformat(), **event}) + "\n"
        with self._path.open("a", encoding="ascii") as file:  # a few µs; the build waits for its guest, not for this
            file.write(line)
        self._size += len(line)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, news: asyncio.Event) -> None:
        if not self.ended:
            await news.wait()

    @property
    def news(self) -> asyncio.Event:
        return self._news


async def read(
    path: Path, live: Journal | None, *, after: int = 0, follow: bool = False
) -> AsyncIterator[BuildPhase | BuildOutput | BuildEnd]:
    """The lines after number `after`; with `follow`, until the build ends."""
    offset = 0
    while True:
        news = None if live is None else live.news
        last_look = live is None or live.ended
        while lines := await asyncio.to_thread(_whole_lines, path, offset):
            for line in lines:
                offset += len(line)
                with contextlib.suppress(ValueError):  # cut by a crash
                    event = build_event(json.loads(line))
                    if event.n > after:
                        yield event
        if last_look or not follow or live is None or news is None:
            return
        await live.wait(news)


def _whole_lines(path: Path, offset: int) -> list[bytes]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(offset)
        return [line for line in file.readlines(_BATCH_BYTES) if line.endswith(b"\n")]
    return []


def _count(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return sum(1 for _ in file)
    return 0
