"""What is told of a run. Owns the bounds: whatever the code prints or shows, a run says a limited amount."""

from __future__ import annotations

import json
import os
import queue
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Of stdout and stderr together, in one run. What comes after it is counted, not told.
TEXT_CHARS = 8 << 20
PIECE_CHARS = 32 << 10
#: Of one result with all its representations; and of all results of a run. As JSON.
RESULT_BYTES = 8 << 20
RESULTS_BYTES = 32 << 20
_ERROR_CHARS = 64 << 10
_EXTRAS = 16

FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "text/latex": "latex",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "application/json": "json_value",
    "application/javascript": "javascript",
    "application/vnd.forkyard.data+json": "data",
    "application/vnd.forkyard.chart+json": "chart",
}


class Wire:
    """Lines to the host, written by a thread of its own: a slow reader does not hold up a kernel."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def send(self, event: dict[str, Any]) -> None:
        # Half a surrogate pair, which code can print, is no text for anybody else.
        text = json.dumps(event, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        self._lines.put(text.encode("utf-8", "replace") + b"\n")

    def close(self) -> None:
        """Returns when all is written."""
        self._lines.put(None)
        self._writer.join()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]


class Run:
    """One run: what was asked, why it is to stop, and what is told of it."""

    def __init__(self, wire: Wire, request: dict[str, Any]) -> None:
        self._wire = wire
        self.id = str(request["id"])
        self.code = str(request["code"])
        self.language = str(request.get("language") or "")
        self.env: dict[str, str] = {str(name): str(value) for name, value in (request.get("env") or {}).items()}
        self._timeout_s: float | None = request.get("timeout_s")
        self._began = time.monotonic()
        self._stop: str | None = None
        self._failed = False
        self._told_chars = 0
        self._shown_bytes = 0
        self._untold_chars = 0

    # ── stopping ─────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        self._began = time.monotonic()

    def interrupt(self) -> None:
        self._stop = self._stop or "interrupted"

    def stopped(self) -> str | None:
        """Why it should not go on."""
        if self._stop is None and self._timeout_s is not None and time.monotonic() - self._began >= self._timeout_s:
            self._stop = "timed_out"
        return self._stop

    # ── telling ──────────────────────────────────────────────────────────────────────────────────────────────────

    def started(self, execution_count: int) -> None:
        self._send("started", execution_count=execution_count)

    def text(self, stream: str, text: str) -> None:
        room = TEXT_CHARS - self._told_chars
        self._untold_chars += max(0, len(text) - room)
        text = text[:room]
        self._told_chars += len(text)
        for start in range(0, len(text), PIECE_CHARS):
            self._send("output", stream=stream, text=text[start : start + PIECE_CHARS])

    def result(self, bundle: dict[str, Any], *, main: bool) -> None:
        """`bundle`: representations by their MIME type."""
        known: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        omitted: dict[str, int] = {}
        room = min(RESULT_BYTES, RESULTS_BYTES - self._shown_bytes)
        for mime, value in bundle.items():
            try:
                size = len(json.dumps(value, allow_nan=False))
            except (TypeError, ValueError):
                continue  # no JSON, so it is no representation
            if size > room:
                omitted[mime[:128]] = size
                continue
            room -= size
            self._shown_bytes += size
            if mime in FIELDS:
                known[FIELDS[mime]] = value
            elif len(extra) < _EXTRAS:
                extra[mime[:128]] = value
        self._send("result", main=main, extra=extra, omitted=omitted, **known)

    def exception(self, name: str, value: str, traceback: str) -> None:
        self._failed = True
        # The end of a traceback says most.
        self._send("exception", name=name[:1024], value=value[:_ERROR_CHARS], traceback=traceback[-_ERROR_CHARS:])

    def end(self, *, died: bool = False) -> None:
        """`died`: the kernel is a new one now, and what it knew is gone."""
        status = self._stop or ("died" if died else "exception" if self._failed else "ok")
        self._send(
            "end",
            status=status,
            state_kept=not died,
            untold_chars=self._untold_chars,
            duration_ms=(time.monotonic() - self._began) * 1000,
        )

    def _send(self, kind: str, **fields: Any) -> None:
        self._wire.send({"type": kind, "id": self.id, **fields})
