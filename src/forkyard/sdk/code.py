"""What a run of code gives back. Pure: owns the assembly of events into an outcome, never reads a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from forkyard.errors import ForkyardError, from_problem
from forkyard.models.code import (
    CodeEnd,
    CodeEvent,
    CodeException,
    CodeOutput,
    CodeResult,
    CodeStarted,
)

Status = Literal["ok", "exception", "timed_out", "interrupted", "died"]
_EVENT: TypeAdapter[CodeEvent] = TypeAdapter(CodeEvent)


class CodeRaised(ForkyardError):
    """The code did not end well. Raised only when asked for, by `check=True` or `.check()`."""

    code = "code_raised"
    status = 400

    def __init__(self, message: str | None = None, *, outcome: CodeOutcome | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.outcome = outcome


@dataclass(frozen=True)
class CodeOutcome:
    """What code printed, showed and raised. An exception of the code is data, not an error."""

    context_id: str
    execution_count: int
    """Of its context, from 1."""
    results: list[CodeResult]
    """What was displayed, in its order; the value of the last expression is the one with `main`."""
    stdout: str
    stderr: str
    exception: CodeException | None
    """What the code raised: `name`, `value`, `traceback`."""
    status: Status
    state_kept: bool
    """False if its context had to begin anew, knowing nothing."""
    duration_ms: float
    truncated: bool = False
    """It printed more than is told of one run."""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def text(self) -> str | None:
        """The value of the last expression, as text."""
        return next((result.text for result in self.results if result.main), None)

    def check(self) -> CodeOutcome:
        """This, if the code ended well; else raises `CodeRaised`."""
        if self.ok:
            return self
        raised = self.exception
        what = f"{raised.name}: {raised.value}\n{raised.traceback}".rstrip() if raised else "nothing was raised"
        raise CodeRaised(f"The code ended as {self.status}: {what}", outcome=self, status_of_run=self.status)


def event_of(line: dict[str, Any]) -> CodeEvent:
    if line.get("type") == "error":
        raise from_problem(line["problem"])
    return _EVENT.validate_python(line)


class Gathering:
    """Events, put together; whoever wants to hear of them at once does."""

    def __init__(
        self,
        on_stdout: Callable[[str], object] | None,
        on_stderr: Callable[[str], object] | None,
        on_result: Callable[[CodeResult], object] | None,
        on_exception: Callable[[CodeException], object] | None,
    ) -> None:
        self._hear_text = {"stdout": on_stdout, "stderr": on_stderr}
        self._hear_result, self._hear_exception = on_result, on_exception
        self._started: CodeStarted | None = None
        self._results: list[CodeResult] = []
        self._text: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._exception: CodeException | None = None

    def add(self, event: CodeEvent) -> None:
        match event:
            case CodeStarted():
                self._started = event
            case CodeOutput():
                self._text[event.stream].append(event.text)
                if (hear := self._hear_text[event.stream]) is not None:
                    hear(event.text)
            case CodeResult():
                self._results.append(event)
                if self._hear_result is not None:
                    self._hear_result(event)
            case CodeException():
                self._exception = event
                if self._hear_exception is not None:
                    self._hear_exception(event)

    def outcome(self, end: CodeEnd) -> CodeOutcome:
        return CodeOutcome(
            context_id=self._started.context_id if self._started else "",
            execution_count=self._started.execution_count if self._started else 0,
            results=self._results,
            stdout="".join(self._text["stdout"]),
            stderr="".join(self._text["stderr"]),
            exception=self._exception,
            status=end.status,
            state_kept=end.state_kept,
            duration_ms=end.duration_ms,
            truncated=end.untold_chars > 0,
        )
