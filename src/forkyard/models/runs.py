"""Wire types of scripts that are run in a machine of their own, now or by a schedule."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from forkyard.models.base import Answer, Request

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
NpmName = Annotated[
    str, StringConstraints(pattern=r"^(@[a-z0-9~-][a-z0-9._~-]*/)?[a-z0-9~-][a-z0-9._~-]*$", max_length=214)
]
NpmVersion = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9^~<>=*|. +-]{1,64}$")]
RunState = Literal["queued", "running", "succeeded", "failed", "retry"]
CronText = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class RunCreate(Request):
    script: str = Field(
        max_length=2**20, description="A module for Node.js: what its default export returns is the result."
    )
    env: dict[EnvName, str] = Field(default_factory=dict, max_length=256)
    node_modules: dict[NpmName, NpmVersion] = Field(
        default_factory=dict,
        max_length=100,
        description="Packages of npm, installed once for all runs that want the same.",
    )
    timeout_s: float = Field(60.0, gt=0, le=3600)
    payload: Any = Field(None, description="What the default export is called with.")


class RunLog(Answer):
    type: Literal["log", "error"]
    message: str


class RunOutcome(Answer):
    """How a script ended."""

    ok: bool
    result: Any = None
    logs: list[RunLog] = Field(default_factory=list)
    error: str | None = None
    kind: Literal["syntax", "runtime", "timeout", "host"] | None = None
    stack: str | None = None


class RunInfo(Answer):
    id: str
    schedule_id: str | None = None
    state: RunState
    attempts: int = 0
    max_attempts: int = 1
    run_at: datetime
    next_at: datetime | None = Field(None, description="When it is tried again.")
    started_at: datetime | None = None
    finished_at: datetime | None = None
    outcome: RunOutcome | None = None


class ScheduleCreate(Request):
    name: str | None = Field(None, max_length=128)
    cron: CronText
    timezone: str = Field("UTC", max_length=64)
    retries: int = Field(0, ge=0, le=10)
    run: RunCreate


class ScheduleUpdate(Request):
    """Absent fields stay as they are."""

    name: str | None = Field(None, max_length=128)
    cron: CronText | None = None
    timezone: str | None = Field(None, max_length=64)
    retries: int | None = Field(None, ge=0, le=10)
    run: RunCreate | None = None
    active: bool | None = None


class ScheduleInfo(Answer):
    id: str
    name: str | None = None
    cron: str
    timezone: str
    retries: int
    run: RunCreate
    active: bool
    next_at: datetime | None = None
    created_at: datetime
    updated_at: datetime
