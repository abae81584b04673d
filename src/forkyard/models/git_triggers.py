"""Wire types of what a repository does by itself: triggers with their deliveries, and remotes it is kept in step with."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from forkyard.models import EnvName, SandboxCreate, SandboxId
from forkyard.models.base import Answer, Request
from forkyard.models.git import Revision
from forkyard.models.network import NetworkPolicy
from forkyard.models.reviews import GitHubApp as GitHubApp
from forkyard.models.reviews import ReviewPlan
from forkyard.models.specs import Spec

EventKind = Literal["push", "branch.created", "branch.deleted", "tag.created", "tag.deleted"]
Glob = Annotated[str, StringConstraints(min_length=1, max_length=256)]
HeaderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}$")]
HeaderValue = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$", max_length=4096)]
HttpUrl = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/?#@\\]+([/?][\x21-\x7e]*)?$", max_length=2048)]
SecretName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]
RemoteName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")]
Direction = Literal["both", "in", "out"]
DeliveryStatus = Literal["pending", "delivered", "failed"]


# ── triggers ─────────────────────────────────────────────────────────────────────────────────────────────────────


class WebhookAction(Request):
    """POST the event there, signed."""

    type: Literal["webhook"] = "webhook"
    url: HttpUrl
    headers: dict[HeaderName, HeaderValue] = Field(default_factory=dict, max_length=32, description="Kept encrypted.")
    secret: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Also sign with it: HMAC, in X-Hub-Signature-256. Kept encrypted.",
    )
    allow_private: bool = Field(False, description="The address may be this host, or in a private network.")


class SandboxAction(Request):
    """Create a sandbox. It finds FORKYARD_REPO, FORKYARD_REF and FORKYARD_SHA in its environment."""

    type: Literal["sandbox"] = "sandbox"
    sandbox: SandboxCreate = Field(default_factory=SandboxCreate)


class ExecAction(Request):
    """Run a command in a sandbox, which is woken for it. With the same variables."""

    type: Literal["exec"] = "exec"
    sandbox_id: SandboxId
    command: str = Field(min_length=1, max_length=65536, description="Runs in `bash -c`.")
    cwd: str | None = Field(None, min_length=1, max_length=4096, description="Default: the user's home.")
    user: str = Field("root", pattern=r"^[a-z_][a-z0-9_.-]{0,31}$")
    env: dict[EnvName, str] = Field(default_factory=dict, max_length=64)
    timeout_s: float = Field(600.0, gt=0, le=3600)


class SpecAction(Request):
    """Build a spec. Steps that clone this repository and name no `rev` clone the commit that was pushed."""

    type: Literal["spec"] = "spec"
    spec: Spec
    network: NetworkPolicy = Field(default_factory=NetworkPolicy, description="What the build may reach.")
    identity: str | None = Field(None, max_length=128, description="Whose repositories its commands may use.")


class DevServerAction(Request):
    """Reload a dev server: it is brought to the head of its branch. Dev servers of hosted repositories make it."""

    type: Literal["dev_server"] = "dev_server"
    dev_server_id: str = Field(max_length=64)


class ReviewAction(Request):
    """Review the branch that was pushed. The same head is reviewed once, however often it is told of."""

    type: Literal["review"] = "review"
    base: Revision | None = Field(None, description="What it is to be merged into. Default: the default branch.")
    plan: ReviewPlan = Field(default_factory=lambda: ReviewPlan())


Action = Annotated[
    WebhookAction | SandboxAction | SpecAction | ExecAction | DevServerAction | ReviewAction,
    Field(discriminator="type"),
]


class TriggerCreate(Request):
    events: list[EventKind] = Field(
        ["push"],
        min_length=1,
        max_length=5,
        description="`push`: a branch got commits, also a new one. A change is told once, by the first of its names: a "
        "new branch is `branch.created` to who wants both.",
    )
    branches: list[Glob] = Field(default_factory=list, max_length=64, description="Only these branches. Empty: all.")
    tags: list[Glob] = Field(default_factory=list, max_length=64, description="Only these tags. Empty: all.")
    paths: list[Glob] = Field(
        default_factory=list, max_length=64, description="Only if one of these files changed (`docs/**`). Empty: any."
    )
    action: Action
    enabled: bool = True


class TriggerUpdate(Request):
    """Absent fields stay as they are."""

    events: list[EventKind] | None = Field(None, min_length=1, max_length=5)
    branches: list[Glob] | None = Field(None, max_length=64)
    tags: list[Glob] | None = Field(None, max_length=64)
    paths: list[Glob] | None = Field(None, max_length=64)
    action: Action | None = None
    enabled: bool | None = None


class TriggerInfo(Answer):
    id: str
    repo_id: str
    events: list[EventKind]
    branches: list[str]
    tags: list[str]
    paths: list[str]
    action: dict[str, Any] = Field(description="As it was given, with `***` in place of what is secret.")
    enabled: bool
    created_at: datetime
    updated_at: datetime


class Attempt(Answer):
    at: datetime
    status: int | None = Field(None, description="Of the HTTP answer, or the exit code; null: there was none.")
    duration_ms: float
    error: str | None = None
    response: str | None = Field(None, description="The beginning of what it answered.")


class DeliveryInfo(Answer):
    id: str = Field(description="Stays the same through retries and redeliveries: who has seen it can ignore it.")
    trigger_id: str
    event: str
    ref: str
    before: str
    after: str
    status: DeliveryStatus
    attempts: list[Attempt] = Field(description="The last ones, oldest first.")
    created_at: datetime
    next_at: datetime | None = Field(None, description="When it is tried (again), if it is pending.")
    finished_at: datetime | None = None


class Delivery(DeliveryInfo):
    """With what is sent."""

    payload: dict[str, Any]


# ── remotes ──────────────────────────────────────────────────────────────────────────────────────────────────────


class RemoteCreate(Request):
    name: RemoteName = "origin"
    url: str = Field(min_length=1, max_length=2048, description="http, https, git or ssh, without credentials.")
    direction: Direction = Field("both", description="`in`: only what happens there is done here. `out`: the reverse.")
    branches: list[Glob] = Field(default_factory=list, max_length=64, description="Only these. Empty: all.")
    tags: bool = True
    username: str = Field("git", pattern=r"^[\x21-\x39\x3b-\x7e]{1,128}$", description="Sent with the secret.")
    secret: SecretName | None = Field(None, description="Stored secret with a password or token; http and https only.")
    github_app: GitHubApp | None = None
    poll_s: float | None = Field(300.0, ge=1, le=86400, description="How often to look there. Null: only when told.")
    hook_secret: str | None = Field(
        None, min_length=8, max_length=256, description="With what that host signs its webhook. Default: a random one."
    )
    review: ReviewPlan | None = Field(
        None,
        description="Of a repository on GitHub: its pull requests are reviewed so, and the reviews posted there, when its "
        "webhook tells of them (events `push` and `pull_request`).",
    )


class RemoteUpdate(Request):
    """Absent fields stay as they are."""

    name: RemoteName | None = Field(None, description="A new one.")
    url: str | None = Field(None, min_length=1, max_length=2048, description="Of another place: it is compared anew.")
    direction: Direction | None = None
    branches: list[Glob] | None = Field(None, max_length=64)
    tags: bool | None = None
    username: str | None = Field(None, pattern=r"^[\x21-\x39\x3b-\x7e]{1,128}$")
    secret: SecretName | None = Field(None, description="Null = none, if given.")
    github_app: GitHubApp | None = Field(None, description="Null = none, if given.")
    poll_s: float | None = Field(None, ge=1, le=86400, description="Null = only when told, if given.")
    hook_secret: str | None = Field(None, min_length=8, max_length=256)
    review: ReviewPlan | None = Field(None, description="Null = none, if given.")


class RefState(Answer):
    ref: str
    state: Literal["in_step", "ahead", "behind", "diverged"] = Field(
        description="As seen from here: `ahead` has what the remote lacks. What has diverged is left as it is."
    )
    local_sha: str | None = Field(None, description="Null: not there.")
    remote_sha: str | None = None
    detail: str | None = None


class RemoteInfo(Answer):
    name: str
    repo_id: str
    url: str
    direction: Direction
    branches: list[str]
    tags: bool
    username: str
    secret: str | None = None
    github_app: dict[str, Any] | None = None
    poll_s: float | None = None
    review: dict[str, Any] | None = None
    hook_path: str = Field(description="Where the other host's webhook for pushes should POST, on this daemon.")
    created_at: datetime
    synced_at: datetime | None = Field(None, description="Of the last sync that came to its end.")
    error: str | None = Field(None, description="Why the last sync did not.")
    in_step: bool | None = Field(None, description="Whether every branch and tag was, then.")


class RemoteCreated(RemoteInfo):
    hook_secret: str = Field(description="Shown this once.")


class SyncReport(Answer):
    """One look at a remote: what was done, and how things stand now."""

    pulled: list[str] = Field(description="Refs changed here.")
    pushed: list[str] = Field(description="Refs changed there.")
    refs: list[RefState] = Field(description="Those not in step first; the first 1000.")
