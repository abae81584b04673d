"""Wire types of reviews: what is to be reviewed and how, what a reviewer is handed, and what it answers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from forkyard.models.base import Answer, Request
from forkyard.models.git import FileDiff, FilePath, Revision, Sha

Command = Annotated[str, StringConstraints(min_length=1, max_length=65536, pattern=r"^[^\x00]+$")]
Argument = Annotated[str, StringConstraints(max_length=65536, pattern=r"^[^\x00]*$")]
Argv = Annotated[list[Argument], Field(min_length=1, max_length=256)]
Directory = Annotated[str, StringConstraints(pattern=r"^/[^\x00]*$", max_length=1024)]
Environment = Annotated[
    dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")], Argument], Field(max_length=64)
]
StoredSecret = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]
Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#@\\]+([/?][\x21-\x7e]*)?$", max_length=2048)]
GitHubName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{0,99}[A-Za-z0-9_-]$")]
Event = Literal["APPROVE", "REQUEST_CHANGES", "COMMENT"]
ReviewState = Literal["running", "waiting", "posting", "done", "failed"]


# ── what is asked for ────────────────────────────────────────────────────────────────────────────────────────────


class HostedTarget(Request):
    """A branch of a repository that is hosted here. The review is kept here."""

    type: Literal["hosted"] = "hosted"
    repo: str = Field(min_length=1, max_length=100, description="Id or name.")
    head: Revision = Field(description="Branch, tag or commit.")
    base: Revision | None = Field(None, description="What it is to be merged into. Default: the default branch.")


class GitHubApp(Request):
    """An installation of a GitHub App; a new token is made whenever one is needed."""

    app_id: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Its id or client id.")
    installation_id: int = Field(ge=1)
    private_key_secret: StoredSecret = Field(description="Stored secret: the private key, base64 of the PEM file.")


class GitHubTarget(Request):
    """A pull request on GitHub. The review is posted there."""

    type: Literal["github"] = "github"
    owner: GitHubName
    repo: GitHubName
    number: int = Field(ge=1, le=2**31 - 1)
    secret: StoredSecret | None = Field(
        None, description="Stored secret with a token that may write reviews. Stays on this host."
    )
    github_app: GitHubApp | None = Field(None, description="Or an installation of a GitHub App that may.")
    clone_url: Url | None = Field(None, description="Where the sandbox fetches from. Default: what GitHub says.")

    @model_validator(mode="after")
    def _one_credential(self) -> Self:
        if (self.secret is None) == (self.github_app is None):
            raise ValueError("give a secret or a github_app, one of them")
        return self


class ReviewStep(Request):
    """One thing to run at the head: lint, tests. A step passes if it ends with exit code 0."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=100)]
    command: Command | Argv = Field(description="A string runs in bash; a list without a shell.")
    cwd: str | None = Field(None, max_length=1024, pattern=r"^[^\x00]+$", description="Below the checkout.")
    env: Environment = Field(default_factory=dict)
    user: str = Field("root", pattern=r"^[a-z_][a-z0-9_.-]{0,31}$")
    timeout_s: float = Field(600.0, gt=0, le=7200)


class CommandReviewer(Request):
    """A program in a sandbox of its own: another copy of the same one, in which nothing of the change has run. It gets
    the dossier as JSON on stdin and prints a verdict as JSON."""

    type: Literal["command"] = "command"
    command: Command | Argv
    env: Environment = Field(default_factory=dict)
    user: str = Field("root", pattern=r"^[a-z_][a-z0-9_.-]{0,31}$")
    timeout_s: float = Field(900.0, gt=0, le=7200)


class HttpReviewer(Request):
    """An endpoint that is POSTed the dossier and answers with a verdict."""

    type: Literal["http"] = "http"
    url: Url
    secret: StoredSecret | None = Field(None, description="Stored secret, sent as `Authorization: Bearer`.")
    timeout_s: float = Field(300.0, gt=0, le=3600)
    allow_private: bool = Field(False, description="The address may be this host, or in a private network.")


class ClientReviewer(Request):
    """Whoever asked: takes the dossier, and gives the verdict by a call of its own."""

    type: Literal["client"] = "client"


Reviewer = Annotated[CommandReviewer | HttpReviewer | ClientReviewer, Field(discriminator="type")]


class ReviewPlan(Request):
    """How to review, whatever it is."""

    sandbox: str | None = Field(None, max_length=32, description="Fork this one: warm, dependencies and all.")
    snapshot: str | None = Field(
        None, max_length=128, description="Or begin with this snapshot. Neither: a new sandbox."
    )
    directory: Directory = Field("/root/review", description="Where it is checked out. An existing clone is updated.")
    steps: list[ReviewStep] = Field(default_factory=list, max_length=32)
    reviewer: Reviewer | None = Field(
        None, description="Null: nobody is asked. APPROVE if every step passed, else REQUEST_CHANGES."
    )
    trusted: bool = Field(
        False,
        description="Steps keep the identity and the secrets of the sandbox. Else the code under review has none.",
    )


class ReviewCreate(ReviewPlan):
    target: Annotated[HostedTarget | GitHubTarget, Field(discriminator="type")]
    key: str = Field(
        "", max_length=100, description="The same target at the same head commit is one review, however often it is asked "
        "for. Give another key to have it reviewed again."
    )  # fmt: skip


# ── what comes of it ─────────────────────────────────────────────────────────────────────────────────────────────


class StepResult(Answer):
    name: str
    command: str | list[str]
    passed: bool
    exit_code: int | None = Field(None, description="Null: a signal ended it, or it could not be started.")
    timed_out: bool = False
    duration_s: float
    output: str = Field(description="The end of stdout and stderr, as they came.")
    truncated: bool = False


class ReviewTarget(Answer):
    """What was found at the target when the review was asked for."""

    type: Literal["hosted", "github"]
    repository: str
    number: int | None = None
    title: str = ""
    body: str = ""
    base: str
    head: str
    base_sha: Sha
    head_sha: Sha


class ReviewDiff(Answer):
    files: list[FileDiff]
    additions: int
    deletions: int
    truncated: bool = False


class Dossier(Answer):
    """What a reviewer is handed."""

    version: Literal[1] = 1
    review_id: str
    target: ReviewTarget
    steps: list[StepResult]
    diff: ReviewDiff


class ReviewComment(Request):
    path: FilePath
    line: int = Field(ge=1, le=2**31 - 1, description="Of the file as it is at the head.")
    body: str = Field(min_length=1, max_length=65536)


class ReviewVerdict(Request):
    """What a reviewer answers."""

    event: Event
    body: str = Field("", max_length=60_000)
    comments: list[ReviewComment] = Field(default_factory=list, max_length=500)


class ReviewInfo(Answer):
    id: str
    state: ReviewState = Field(description="`waiting`: for the verdict of the client that asked.")
    repo_id: str | None = Field(None, description="Of a hosted repository.")
    target: ReviewTarget
    steps: list[StepResult] = Field(default_factory=list)
    verdict: ReviewVerdict | None = None
    posted: dict[str, Any] | None = Field(None, description="What GitHub made of it: `id`, `url`, `event`.")
    error: str | None = Field(None, description="Why it failed. Asking again tries again.")
    created_at: datetime
    ended_at: datetime | None = None
