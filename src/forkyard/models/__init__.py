"""Wire types shared by the API and the SDK.

Owns: the shape of every JSON body under `/api/v1`. Never does: I/O, decisions. Unknown fields in a request are
refused, so that a typo is an error and not a default; unknown fields in an answer are ignored, so that an older SDK
can talk to a newer daemon.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from forkyard.lifecycle import Cause, State
from forkyard.models.base import Answer, Request
from forkyard.models.base import EnvName as EnvName
from forkyard.models.base import Page as Page
from forkyard.models.bases import RegistryAuth
from forkyard.models.labels import LabelKey, LabelValue
from forkyard.models.network import NetworkPolicy, Secret
from forkyard.models.specs import GitRepo, Spec
from forkyard.models.texts import Owner
from forkyard.models.volumes import MAX_VOLUMES, CacheKind, MountPath, SandboxVolume, VolumeMount

#: Lower case letters and digits only: an id is also a host name and a label in preview URLs.
SandboxId = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9]{19}$")]
SnapshotId = Annotated[str, StringConstraints(pattern=r"^sc-[a-z0-9]{20}$")]
Persistence = Literal["ephemeral", "until-stopped", "sticky", "persistent"]
OnTtl = Literal["delete", "pause", "stop"]
AnnotationKey = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./-]{1,64}$")]
AnnotationValue = Annotated[str, StringConstraints(max_length=65536)]
#: Fewer bytes than these within a quarter of the idle timeout are no sign of life: keep-alives, a poll now and then.
DEFAULT_ACTIVITY_BYTES = 4096
#: Ten years. What should never come has no number.
LONGEST_S = 86400.0 * 3650


class Shape(BaseModel):
    """How big a machine is. The first use of a new shape builds its template; later ones are restored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vcpus: int = Field(1, ge=1, le=8)
    memory_mib: int = Field(512, ge=128, le=16384)
    disk_gib: int = Field(8, ge=4, le=1024)


# ── sandboxes ────────────────────────────────────────────────────────────────────────────────────────────────────


class SandboxCreate(Request):
    name: str | None = Field(None, max_length=128, description="For people; need not be unique.")
    vcpus: int = Field(1, ge=1, le=8)
    memory_mib: int = Field(512, ge=128, le=16384)
    disk_gib: int = Field(8, ge=4, le=1024)
    labels: dict[LabelKey, LabelValue] = Field(
        default_factory=dict,
        max_length=64,
        description="To find it by. Those that begin with `forkyard.` are Forkyard's own.",
    )
    annotations: dict[AnnotationKey, AnnotationValue] = Field(
        default_factory=dict, max_length=16, description="Notes of programs: kept as they are, searched by nobody."
    )
    env: dict[EnvName, str] = Field(default_factory=dict, max_length=256, description="For every exec in this sandbox.")
    snapshot: str | None = Field(None, description="Id or name of a snapshot to start from; its shape is taken.")
    spec: Spec | None = Field(None, description="What it is made of: built in layers first, if it was not before.")
    registry: RegistryAuth | None = Field(
        None, description="With a spec: for images of a private registry, if it is built now. Never written down."
    )
    idle_timeout_s: float | None = Field(
        300.0, gt=0, le=LONGEST_S, description="Paused when idle for this long; null = never."
    )
    ttl_s: float | None = Field(
        None, gt=0, le=LONGEST_S, description="Ends this long after its creation; see `on_ttl`."
    )
    on_ttl: OnTtl = Field(
        "delete",
        description="What the ttl does: `delete` it; or `pause` or `stop` it if it runs, and it begins anew when it runs "
        "again.",
    )
    persistence: Persistence = Field(
        "sticky",
        description="`ephemeral`: deleted when it pauses or stops. `until-stopped`: deleted when it stops, and kept while "
        "it sleeps. `sticky`: may be evicted when the disk budget is reached. `persistent`: never evicted.",
    )
    priority: int = Field(5, ge=0, le=10, description="Of sticky sandboxes the lowest are evicted first.")
    checkpoint_every_s: float | None = Field(
        None, ge=1, le=LONGEST_S, description="Take a snapshot this often, automatically."
    )
    checkpoints_kept: int = Field(5, ge=1, le=100, description="How many automatic snapshots are kept.")
    network: NetworkPolicy = Field(default_factory=NetworkPolicy, description="What may leave and what may enter.")
    secrets: dict[EnvName, Secret] = Field(
        default_factory=dict,
        max_length=64,
        description="Variables that hold a placeholder inside; the value is put in on the way out.",
    )
    volumes: dict[MountPath, VolumeMount] = Field(
        default_factory=dict,
        max_length=MAX_VOLUMES,
        description="By path: the name of a volume (`rw`), or how to mount it.",
    )
    cache: list[CacheKind] = Field(
        default_factory=list,
        max_length=2,
        description="Package caches: each a copy of its own of a volume `cache-KIND`.",
    )
    identity: str | None = Field(
        None,
        max_length=128,
        description="Id or name of an identity: inside, http://git.forkyard.internal/NAME.git are the repositories that "
        "it may use, without a credential. Forks have it too; with a snapshot it is not taken over.",
    )
    activity_threshold_bytes: int = Field(
        DEFAULT_ACTIVITY_BYTES,
        ge=0,
        le=2**31 - 1,
        description="More network traffic than this, in a quarter of the idle timeout, keeps it awake.",
    )

    git: list[GitRepo] = Field(
        default_factory=list,
        max_length=16,
        description="Repositories that are cloned before the answer, hosted ones or others. A string is "
        "`URL[#REV][:PATH]`. Default path: /repo.",
    )

    @model_validator(mode="after")
    def _clones_apart(self) -> Self:
        paths = [repo.path.rstrip("/") for repo in self.git]
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f"two repositories cannot both be cloned to {path}; give each a path of its own")
        return self

    def shape(self) -> Shape:
        return Shape(vcpus=self.vcpus, memory_mib=self.memory_mib, disk_gib=self.disk_gib)


class SandboxUpdate(Request):
    """What can be changed of a living sandbox. Absent fields stay as they are."""

    name: str | None = Field(None, max_length=128)
    labels: dict[LabelKey, LabelValue] | None = Field(None, max_length=64)
    annotations: dict[AnnotationKey, AnnotationValue] | None = Field(None, max_length=16)
    idle_timeout_s: float | None = Field(None, gt=0, le=LONGEST_S, description="Null = never, if given.")
    ttl_s: float | None = Field(None, gt=0, le=LONGEST_S)
    on_ttl: OnTtl | None = None
    persistence: Persistence | None = None
    priority: int | None = Field(None, ge=0, le=10)
    checkpoint_every_s: float | None = Field(None, ge=1, le=LONGEST_S)
    checkpoints_kept: int | None = Field(None, ge=1, le=100)
    network: NetworkPolicy | None = Field(None, description="Takes effect at once, also for open connections.")
    identity: str | None = Field(None, max_length=128, description="Null = none, if given. Takes effect at once.")
    activity_threshold_bytes: int | None = Field(None, ge=0, le=2**31 - 1)


class SandboxPause(Request):
    durable: bool = Field(
        False, description="Answer when its memory is on disk, where a reboot of the host finds it; else that follows."
    )


class SandboxResume(Request):
    memory: bool = Field(True, description="False boots from the disk alone; what was in memory is dropped.")


class SandboxResize(Request):
    """Of a stopped sandbox; of a paused one only the disk. Takes effect at the next boot from disk; a disk only grows."""

    vcpus: int | None = Field(None, ge=1, le=8)
    memory_mib: int | None = Field(None, ge=128, le=16384)
    disk_gib: int | None = Field(None, ge=4, le=1024)


class SandboxFork(Request):
    count: int = Field(1, ge=1, le=100)
    name: str | None = Field(None, max_length=128)
    labels: dict[LabelKey, LabelValue] | None = Field(None, description="Default: the parent's.")


class SandboxRollback(Request):
    snapshot: str = Field(description="Id or name of a snapshot of this sandbox.")


class Milestone(Answer):
    """A step of the boot of the template this sandbox was restored from, or of its own start."""

    name: str
    at_ms: float = Field(description="Milliseconds since the start of that boot or create.")


class SandboxInfo(Answer):
    id: str
    name: str | None = None
    state: State
    cause: Cause
    cause_detail: str | None = Field(None, description="For people: what happened, and what to do next.")
    incarnation: int
    shape: Shape
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    template: str | None = None
    parent_id: str | None = Field(None, description="The sandbox it was forked from.")
    snapshot_id: str | None = Field(None, description="The snapshot it was created from or rolled back to.")
    persistence: Persistence = "sticky"
    priority: int = 5
    idle_timeout_s: float | None = None
    checkpoint_every_s: float | None = None
    checkpoints_kept: int = 5
    network: NetworkPolicy = Field(default_factory=NetworkPolicy)
    secret_names: list[str] = Field(default_factory=list)
    identity_id: str | None = Field(None, description="Whose repositories it may use.")
    volumes: list[SandboxVolume] = Field(default_factory=list)
    activity_threshold_bytes: int = DEFAULT_ACTIVITY_BYTES
    expires_at: datetime | None = Field(None, description="When its ttl has passed.")
    on_ttl: OnTtl = "delete"
    last_active_at: datetime | None = None
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None = None


class ForkChild(Answer):
    """One child of a fork: a running sandbox, or why there is none."""

    sandbox: SandboxInfo | None = None
    problem: dict[str, Any] | None = None


class ForkResult(Answer):
    parent_id: str
    paused_ms: float = Field(description="How long the parent stood still; 0 if it was paused anyway.")
    children: list[ForkChild]


class SnapshotCreate(Request):
    name: str | None = Field(
        None,
        max_length=128,
        pattern=r"^[^/\x00-\x1f\x7f]+$",
        description="Unique among the snapshots of a daemon; without `/` and control characters.",
    )


class SnapshotInfo(Answer):
    """RAM, device state and disk of a sandbox at one instant."""

    id: str
    name: str | None = None
    sandbox_id: str
    automatic: bool = Field(False, description="A checkpoint, taken by `checkpoint_every_s`.")
    shape: Shape
    size_bytes: int = Field(
        description="Of its memory, and of what was written to its disk since the snapshot, fork or create before."
    )
    paused_ms: float = 0.0
    created_at: datetime


class SandboxLogs(Answer):
    template_boot: list[Milestone] = Field(description="The boot that made the template, once.")
    create: list[Milestone] = Field(description="The restore that made this sandbox.")
    console: str = Field(description="End of the serial console of this machine.")


class SandboxUsage(Answer):
    pss_mib: float = Field(description="Memory of the machine, with shared pages counted by share.")
    cpu_s: float = Field(description="Processor time used since it started.")
    bytes_out: int = Field(0, description="Sent over the network, over the life of the sandbox.")
    bytes_in: int = 0
    ingress_bytes_in: int = Field(0, description="Into it by previews, SSH and forwarded ports, over its life.")
    ingress_bytes_out: int = Field(0, description="Out of it by these.")


class UsageSample(Answer):
    """As the host sees it; nobody inside was asked."""

    at: datetime
    cpu_percent: float = Field(description="Of all its processors together, since the sample before.")
    memory_mib: float = Field(description="Of its memory, what it has touched and not given back; its caches included.")
    disk_mib: float = Field(description="What its disk occupies, with the image below it.")


class UsageHistory(Answer):
    samples: list[UsageSample] = Field(description="Oldest first.")


# ── execs ────────────────────────────────────────────────────────────────────────────────────────────────────────


class ExecCreate(Request):
    command: str | list[str] = Field(description="A string runs in `bash -c`; a list is run as it is, without a shell.")
    cwd: str | None = Field(None, description="Default: that of the spec or image, else the user's home.")
    env: dict[EnvName, str] = Field(default_factory=dict)
    user: Owner | None = Field(None, description="By name or number. Default: that of the spec or image, else root.")
    timeout_s: float | None = Field(None, gt=0, le=86400 * 7, description="After it the whole process tree is killed.")
    stdin: bool = Field(False, description="Keep standard input open for `…/stdin`; else it is empty.")
    pty: bool = False
    rows: int = Field(24, ge=1, le=1000)
    cols: int = Field(80, ge=1, le=1000)
    label: str | None = Field(None, max_length=256)
    trace_id: str | None = Field(
        None, pattern=r"^[A-Za-z0-9._:/-]{1,128}$", description="Of the caller; every connection it makes carries it."
    )
    id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Chosen by the client, so that a start whose answer was lost can be found again.",
    )


class ExecInfo(Answer):
    id: str
    command: str | list[str]
    cwd: str | None = None
    user: str
    pty: bool = False
    label: str | None = None
    trace_id: str | None = None
    running: bool
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    started_at: datetime
    duration_ms: float | None = None
    stdout_bytes: int = Field(0, description="Produced so far, also what is no longer kept.")
    stderr_bytes: int = 0


class ExecStarted(Answer):
    type: Literal["started"] = "started"
    exec_id: str
    pid: int | None = None


class ExecOutput(Answer):
    """A piece of output. `data` is base64; `offset` counts this stream's bytes from its beginning."""

    type: Literal["output"] = "output"
    stream: Literal["stdout", "stderr"]
    offset: int
    data: str


class ExecLost(Answer):
    """Output that is no longer kept: it was produced while nobody read, and pushed out by newer output."""

    type: Literal["lost"] = "lost"
    stream: Literal["stdout", "stderr"]
    offset: int
    bytes: int


class ExecExit(Answer):
    type: Literal["exit"] = "exit"
    exit_code: int | None = Field(description="None if a signal ended it.")
    signal: int | None = None
    timed_out: bool = False
    duration_ms: float
    denied: list[str] = Field(
        default_factory=list, description="If it failed: what the network policy refused it, such as `example.com:443`."
    )


class ExecFailed(Answer):
    """The stream broke before the process ended; `problem` is the same body an error answer has."""

    type: Literal["error"] = "error"
    problem: dict[str, Any]


ExecEvent = Annotated[ExecStarted | ExecOutput | ExecLost | ExecExit | ExecFailed, Field(discriminator="type")]


class ExecSignal(Request):
    signal: int = Field(15, ge=1, le=64)
    tree: bool = Field(True, description="All processes this exec started, not only the first.")


class ExecResize(Request):
    rows: int = Field(ge=1, le=1000)
    cols: int = Field(ge=1, le=1000)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────

FileType = Literal["file", "directory", "symlink", "other"]


class FileInfo(Answer):
    name: str
    path: str
    type: FileType
    size: int
    mode: int = Field(description="Permission bits, e.g. 0o644 as 420.")
    owner: str
    group: str
    modified_at: datetime
    target: str | None = Field(None, description="Where a symlink points.")
    attributes: dict[str, str] = Field(
        default_factory=dict, description="Extended attributes of the user, without `user.` before their names."
    )


class FileExists(Answer):
    exists: bool


class FileMove(Request):
    source: str
    destination: str
    overwrite: bool = True


class FileChmod(Request):
    path: str
    mode: int = Field(ge=0, le=0o7777)


class FileMkdir(Request):
    path: str
    mode: int = Field(0o755, ge=0, le=0o7777)
    parents: bool = True
    user: str | None = None


class WatchEvent(Answer):
    type: Literal["created", "modified", "deleted", "moved", "attributes", "overflow"]
    path: str
    to: str | None = Field(None, description="New path, of a move inside the watched tree.")


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────


class EventInfo(Answer):
    """One line of history. Every change of a sandbox's state is one, with its cause."""

    id: int
    at: datetime
    sandbox_id: str | None
    kind: str = Field(description="`sandbox.running`, `sandbox.failed`, `template.built`, `daemon.started` …")
    cause: Cause | None = None
    detail: str | None = None
    data: dict[str, Any] = Field(default_factory=dict)


KeyFormat = Literal["forkyard", "e2b", "freestyle"]


class KeyInfo(Answer):
    id: str
    name: str
    prefix: str = Field("", description="How the key begins, to tell keys apart.")
    created_at: datetime
    last_used_at: datetime | None = None


class KeyCreate(Request):
    name: str = Field(min_length=1, max_length=128)
    format: KeyFormat = Field(
        "forkyard", description="What the key looks like: clients of other services check theirs. All open the same."
    )


class KeyCreated(KeyInfo):
    key: str = Field(description="Shown this once; only its hash is kept.")


class Check(Answer):
    """One line of `forkyard doctor`."""

    name: str
    status: Literal["ok", "warning", "failed"]
    summary: str
    advice: str | None = None


class Health(Answer):
    status: Literal["ok", "starting"]
    version: str
    accel: str | None = None
    sandboxes_running: int = 0
    pid: int


class Shutdown(Request):
    destroy: bool = Field(False, description="Delete all sandboxes first; else they go on running.")
