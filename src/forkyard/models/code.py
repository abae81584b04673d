"""Wire types of code that is run in a sandbox, in contexts that remember."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from forkyard.models import EnvName
from forkyard.models.base import Answer, Request
from forkyard.models.specs import Language as Language

#: What a context runs. TypeScript is JavaScript once its types are taken off, and shares a context with it.
ContextLanguage = Literal["python", "javascript", "bash"]
MAX_CODE_CHARS = 4 * 2**20
ContextId = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


def context_language(language: Language) -> ContextLanguage:
    return "javascript" if language == "typescript" else language


class ContextCreate(Request):
    language: Language = "python"
    cwd: str | None = Field(None, max_length=4096, description="Where it starts. Default: that of a command.")
    user: str | None = Field(None, pattern=r"^[a-z_][a-z0-9_.-]{0,31}$", description="Default: that of a command.")
    env: dict[EnvName, str] = Field(default_factory=dict, max_length=256, description="Of all that runs in it.")


class ContextInfo(Answer):
    """Variables, functions and imports that live on from run to run. A fork of the sandbox has it too, as it was."""

    id: str = Field(description="The first run of a language without a context makes one named after the language.")
    language: ContextLanguage
    cwd: str | None = Field(None, description="Where it started.")
    user: str
    created_at: datetime


class CodeRun(Request):
    code: str = Field(max_length=MAX_CODE_CHARS)
    language: Language | None = Field(None, description="Default: that of the context, else Python.")
    context: ContextId | None = Field(None, description="Id of a context. Default: the one of the language.")
    env: dict[EnvName, str] = Field(default_factory=dict, max_length=256, description="Of this run alone.")
    timeout_s: float | None = Field(
        None, gt=0, le=86400 * 7, description="After it the code is interrupted; the context goes on."
    )


class CodeStarted(Answer):
    type: Literal["started"] = "started"
    context_id: str = ""
    execution_count: int = Field(description="Of this context, from 1.")


class CodeOutput(Answer):
    type: Literal["output"] = "output"
    stream: Literal["stdout", "stderr"]
    text: str


class CodeResult(Answer):
    """Something shown: the value of the last expression (`main`), or what the code displayed, in as many ways as it has."""

    type: Literal["result"] = "result"
    main: bool = False
    text: str | None = None
    html: str | None = None
    markdown: str | None = None
    latex: str | None = None
    svg: str | None = None
    png: str | None = Field(None, description="Base64.")
    jpeg: str | None = Field(None, description="Base64.")
    pdf: str | None = Field(None, description="Base64.")
    javascript: str | None = None
    json_value: Any = Field(None, description="`application/json`.")
    data: dict[str, Any] | None = Field(
        None, description="Of a table: `columns`, `rows`, and `row_count` of all of them."
    )
    chart: dict[str, Any] | None = Field(None, description="What a chart shows: its type, titles, axes and values.")
    extra: dict[str, Any] = Field(default_factory=dict, description="Other representations, by MIME type.")
    omitted: dict[str, int] = Field(
        default_factory=dict, description="Representations that are too large to be told, with their size."
    )

    def formats(self) -> list[str]:
        """The names of the representations it has."""
        names = ("text", "html", "markdown", "latex", "svg", "png", "jpeg", "pdf", "javascript", "data", "chart")
        found = [name for name in names if getattr(self, name) is not None]
        return [*found, *(["json"] if self.json_value is not None else []), *self.extra]


class CodeException(Answer):
    """What the code raised and did not catch. Of bash: `ExitStatus`, if the last command failed."""

    type: Literal["exception"] = "exception"
    name: str
    value: str
    traceback: str = ""


class CodeEnd(Answer):
    type: Literal["end"] = "end"
    status: Literal["ok", "exception", "timed_out", "interrupted", "died"] = Field(
        description="`died`: its process ended in the middle."
    )
    state_kept: bool = Field(description="False if the context had to begin anew, knowing nothing.")
    untold_chars: int = Field(0, ge=0, description="What it printed beyond the limit of one run.")
    duration_ms: float = Field(ge=0)


class CodeFailed(Answer):
    """The stream broke before the code ended; `problem` is the same body an error answer has."""

    type: Literal["error"] = "error"
    problem: dict[str, Any]


CodeEvent = Annotated[CodeStarted | CodeOutput | CodeResult | CodeException | CodeEnd, Field(discriminator="type")]
