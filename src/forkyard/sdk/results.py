"""What an exec or a fork gives back. Pure: owns the assembly of pieces into results, never reads a stream."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from forkyard.errors import ForkyardError
from forkyard.models import ExecExit

Stream = Literal["stdout", "stderr"]
S = TypeVar("S")

DEFAULT_MAX_OUTPUT_BYTES = 64 * 1024 * 1024


class CommandFailed(ForkyardError):
    """The command did not end with exit code 0. Raised only when asked for, by `check=True` or `.check()`."""

    code = "command_failed"
    status = 400

    def __init__(self, message: str | None = None, *, result: ExecResult | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.result = result


@dataclass(frozen=True)
class OutputChunk:
    """A piece of output. `text` is `data` decoded as UTF-8; a character cut by the chunk's end comes with the next one.

    `lost_bytes` above zero means a gap instead: output produced while nobody was attached, and no longer kept.
    """

    stream: Stream
    data: bytes
    offset: int
    text: str = ""
    lost_bytes: int = 0


@dataclass(frozen=True)
class ExecResult:
    """How a command ended, and what it printed. A non-zero exit code is data, not an error."""

    exec_id: str
    exit_code: int | None
    """None if a signal ended it."""
    signal: int | None
    timed_out: bool
    duration_ms: float
    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    truncated: bool = False
    """Some output is missing: more than `max_output_bytes`, or pushed out before it was read."""
    denied: tuple[str, ...] = ()
    """If it failed: what the network policy refused it, such as `example.com:443`. `sandbox.egress` knows more."""

    @property
    def stdout(self) -> str:
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    def check(self) -> ExecResult:
        """This result, if the command ended with exit code 0; else raises `CommandFailed`."""
        if self.ok:
            return self
        if self.timed_out:
            how = "ran into its timeout and was killed"
        elif self.signal is not None:
            how = f"was ended by signal {self.signal}"
        else:
            how = f"ended with exit code {self.exit_code}"
        tail = (self.stderr_bytes or self.stdout_bytes)[-2000:].decode("utf-8", "replace").strip()
        blocked = f"\nThe network policy refused it: {', '.join(self.denied)}." if self.denied else ""
        raise CommandFailed(
            f"The command {how}" + (f":\n{tail}" if tail else ".") + blocked,
            result=self,
            exec_id=self.exec_id,
            exit_code=self.exit_code,
            signal=self.signal,
            timed_out=self.timed_out,
        )


@dataclass(frozen=True)
class ForkOutcome(Generic[S]):
    """What became of one child of a fork: a `sandbox` that runs, or the `error` because of which there is none."""

    sandbox: S | None
    error: ForkyardError | None
    paused_ms: float
    """How long the parent stood still."""


def unspoiled(outcomes: list[ForkOutcome[S]], ids: list[str]) -> list[S]:
    """The children if all of them are there; else the first error, which says what became of the others."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        left = f"Those that run: {', '.join(ids)}." if ids else "None of them runs."
        raise type(errors[0])(
            f"{len(errors)} of {len(outcomes)} children could not be forked: {errors[0].message} {left}",
            **{**errors[0].details, "children": ids},
        )
    return [outcome.sandbox for outcome in outcomes if outcome.sandbox is not None]


class Offsets:
    """How far each stream was delivered. It drops what a re-attach repeats and reports what is missing."""

    def __init__(self, stdout: int = 0, stderr: int = 0) -> None:
        self._next: dict[Stream, int] = {"stdout": stdout, "stderr": stderr}

    def params(self) -> dict[str, int]:
        return {"stdout_offset": self._next["stdout"], "stderr_offset": self._next["stderr"]}

    def output(self, stream: Stream, offset: int, data: bytes) -> list[OutputChunk]:
        """At most a gap and the new part of `data`."""
        chunks = self.gap(stream, offset)
        fresh = data[max(0, self._next[stream] - offset) :]
        if fresh:
            chunks.append(OutputChunk(stream, fresh, self._next[stream]))
            self._next[stream] += len(fresh)
        return chunks

    def gap(self, stream: Stream, until: int) -> list[OutputChunk]:
        start = self._next[stream]
        if until <= start:
            return []
        self._next[stream] = until
        return [OutputChunk(stream, b"", start, lost_bytes=until - start)]


class Collector:
    """Keeps the head of each stream, up to a limit, and counts on without keeping."""

    def __init__(self, max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES) -> None:
        self._max = max_output_bytes
        self._kept: dict[Stream, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._truncated = False

    def add(self, chunk: OutputChunk) -> None:
        kept = self._kept[chunk.stream]
        room = self._max - len(kept)
        if chunk.lost_bytes or len(chunk.data) > room:
            self._truncated = True
        if room > 0:
            kept += chunk.data[:room]

    def result(self, exec_id: str, end: ExecExit) -> ExecResult:
        return ExecResult(
            exec_id=exec_id,
            exit_code=end.exit_code,
            signal=end.signal,
            timed_out=end.timed_out,
            duration_ms=end.duration_ms,
            stdout_bytes=bytes(self._kept["stdout"]),
            stderr_bytes=bytes(self._kept["stderr"]),
            truncated=self._truncated,
            denied=tuple(end.denied),
        )


class TextDecoder:
    """Fills in `text`, across chunks that cut a character."""

    def __init__(self) -> None:
        new = codecs.getincrementaldecoder("utf-8")
        self._decoders: dict[Stream, codecs.IncrementalDecoder] = {
            "stdout": new("replace"),
            "stderr": new("replace"),
        }

    def __call__(self, chunk: OutputChunk) -> OutputChunk:
        text = self._decoders[chunk.stream].decode(chunk.data)
        return OutputChunk(chunk.stream, chunk.data, chunk.offset, text, chunk.lost_bytes)
