# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""Following one exec until it ends, whatever happens to the connection.

An exec belongs to the sandbox, not to the connection: when a stream breaks (the daemon was restarted, the network went
away), it is attached again from the bytes that were delivered last, so that nothing is lost and nothing comes twice.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from types import TracebackType
from typing import Any, Self

from forkyard.errors import (
    Conflict,
    DaemonUnreachable,
    ForkyardError,
    GuestFailure,
    InternalError,
    NotFound,
    OperationTimeout,
    SandboxEnded,
    from_problem,
)
from forkyard.models import ExecCreate, ExecExit
from forkyard.sdk import wire
from forkyard.sdk._sync import runtime
from forkyard.sdk._sync.transport import Transport
from forkyard.sdk.results import (
    Collector,
    ExecResult,
    Offsets,
    OutputChunk,
    TextDecoder,
)

#: How long a broken stream is tried again. A daemon that is restarted is back in seconds.
REATTACH_S = 60.0
_STDIN_PIECE_BYTES = 256 * 1024
_SIGKILL = 9


class ExecStream:
    """Output of an exec as it comes. Iterate it once; afterwards `exit_code`, `signal` and `timed_out` are set.

    Leaving the loop early detaches and leaves the process running; `exec_id` is how to find it again.
    """

    def __init__(
        self,
        transport: Transport,
        sandbox_id: str,
        *,
        create: ExecCreate | None = None,
        exec_id: str | None = None,
        stdin: bytes | Iterable[bytes] | None = None,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
        deadline: float | None = None,
    ) -> None:
        self._transport = transport
        self._path = f"/sandboxes/{sandbox_id}"
        self._create = create
        self._stdin = stdin
        self._deadline = deadline
        self._offsets = Offsets(stdout_offset, stderr_offset)
        self._flow: runtime.Flow[OutputChunk] | None = None
        self._failure: ForkyardError | None = None
        self._job: runtime.Job | None = None
        self.exec_id = exec_id
        self.end: ExecExit | None = None

    @property
    def exit_code(self) -> int | None:
        return self.end.exit_code if self.end else None

    @property
    def signal(self) -> int | None:
        return self.end.signal if self.end else None

    @property
    def timed_out(self) -> bool:
        return self.end.timed_out if self.end else False

    def __iter__(self) -> Iterator[OutputChunk]:
        decoded = TextDecoder()
        self._flow = self._follow()
        with closing(self._flow) as pieces:
            for piece in pieces:
                yield decoded(piece)

    def close(self) -> None:
        """Detach. The process goes on."""
        if self._flow is not None:
            self._flow.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def collect(self, max_output_bytes: int) -> ExecResult:
        """Drain it to its end."""
        collector = Collector(max_output_bytes)
        with closing(self._follow()) as pieces:
            for piece in pieces:
                collector.add(piece)
        if self.exec_id is None or self.end is None:
            raise InternalError("The daemon's stream of an exec ended without its exit.")
        return collector.result(self.exec_id, self.end)

    def _follow(self) -> runtime.Flow[OutputChunk]:
        """Every piece exactly once, over as many attachments as it takes."""
        patience = wire.Patience(REATTACH_S)
        try:
            while self.end is None:
                try:
                    with closing(self._attach()) as lines:
                        for line in lines:
                            self._check_deadline()
                            patience.reset()
                            if line is None:
                                continue
                            for piece in self._take(line):
                                yield piece
                            if self.end is not None:
                                break
                        else:
                            raise DaemonUnreachable("The daemon closed the stream of an exec before the exec ended.")
                except ForkyardError as exc:
                    self._check_deadline()
                    if self.exec_id is None or not exc.retryable:
                        raise
                    if self._deadline is not None and isinstance(exc, OperationTimeout):
                        patience.reset()
                    pause_s = patience.next_pause_s()
                    if pause_s is None:
                        raise
                    runtime.sleep(pause_s)
        finally:
            if self._job is not None:
                self._job.finish()
        if self._failure is not None:
            # `_feed` had to kill it: what it made of half its input must not pass for a result.
            raise self._failure

    def _attach(self) -> runtime.Flow[dict[str, Any] | None]:
        silence_s = wire.STREAM_SILENCE_S
        if self._deadline is not None:
            # A read cannot be shortened once it waits, so a deadline means short reads and attaching again.
            silence_s = min(1.0, max(0.01, self._deadline - time.monotonic()))
        if self.exec_id is not None:
            path = f"{self._path}/execs/{wire.segment(self.exec_id)}/output"
            return self._transport.lines("GET", path, params=self._offsets.params(), timeout_s=silence_s)
        body = self._create.model_dump(exclude_defaults=True) if self._create else None
        return self._transport.lines("POST", f"{self._path}/exec", body=body, timeout_s=silence_s)

    def _take(self, line: dict[str, Any]) -> list[OutputChunk]:
        match line.get("type"):
            case "started":
                self.exec_id = str(line["exec_id"])
                if self._stdin is not None and self._job is None:
                    self._job = runtime.Job(self._feed)
            case "output":
                return self._offsets.output(line["stream"], int(line["offset"]), base64.b64decode(line["data"]))
            case "lost":
                return self._offsets.gap(line["stream"], int(line["offset"]) + int(line["bytes"]))
            case "exit":
                self.end = ExecExit.model_validate(line)
            case "error":
                raise from_problem(line["problem"])
        return []

    def _feed(self) -> None:
        """Write all of stdin beside the reading of output: a process may want either before it does the other."""
        path = f"{self._path}/execs/{wire.segment(self.exec_id or '')}"
        written = 0
        try:
            if isinstance(self._stdin, bytes):
                for start in range(0, len(self._stdin) or 1, _STDIN_PIECE_BYTES):
                    piece = self._stdin[start : start + _STDIN_PIECE_BYTES]
                    self._write(path, piece, close=start + len(piece) == len(self._stdin))
                    written += len(piece)
            elif self._stdin is not None:
                for piece in runtime.body(self._stdin):
                    self._write(path, piece, close=False)
                    written += len(piece)
                self._write(path, b"", close=True)
        except (NotFound, Conflict, SandboxEnded):
            return  # it ended, or closed its input: as legal as `head -1`
        except ForkyardError as exc:
            if isinstance(exc, GuestFailure) and not exc.retryable:
                return
            # Nobody knows how much of this piece arrived, and sending it again could double it.
            self._failure = DaemonUnreachable(
                f"The connection broke while stdin was written, after {written} bytes ({exc}). "
                "The exec was killed, because its input cannot be completed. Run it again."
            )
            self._transport.request("POST", f"{path}/signal", body={"signal": _SIGKILL}, again=True)

    def _write(self, path: str, piece: bytes, *, close: bool) -> None:
        # No deadline: a process may take as long as it likes to read its input.
        self._transport.request("POST", f"{path}/stdin", params={"close": close}, content=piece, timeout_s=None)

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise OperationTimeout(f"Exec {self.exec_id} still runs. It was not waited for any longer; it goes on.")
