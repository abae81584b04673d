"""Bodies that Freestyle's clients send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, SecretStr, StringConstraints

from forkyard.compat.freestyle.calls import Body
from forkyard.models import Persistence as Ours
from forkyard.models.bases import RegistryAuth, RegistryName

MAX_SECONDS = 366 * 86400


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair") from None
    return text


def _host(registry: Any) -> Any:
    """Clients have it as an address, too."""
    return registry.rpartition("://")[2].partition("/")[0] or None if isinstance(registry, str) else registry


Clean = AfterValidator(_encodable)
Text = Annotated[str, StringConstraints(max_length=65536), Clean]
Name = Annotated[str, StringConstraints(max_length=128), Clean]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
MAX_VCPUS, MAX_MEMORY_GB = 8, 16
LEAST_DISK_GB, MAX_DISK_GB = 4, 1024
LARGE = 2**31


class Persistence(Body):
    type: Literal["sticky", "ephemeral", "persistent"] = "sticky"
    priority: int | None = Field(None, ge=0, le=10)
    #: Of an ephemeral one: what it is deleted by. Their documentation begins it with a small letter.
    delete_event: Literal["OnStop", "onStop", "OnSuspend", "onSuspend", "onIdleTimeout"] | None = Field(
        None, alias="deleteEvent"
    )

    @property
    def ours(self) -> Ours:
        if self.type == "ephemeral" and self.delete_event in ("OnStop", "onStop"):
            return "until-stopped"
        return self.type


class DomainWanted(Body):
    domain: str = Field(max_length=253)
    port: int = Field(443, alias="vmPort", ge=1, le=65535)


class UnitRestart(Body):
    policy: Literal["no", "on-failure", "always", "on-abnormal"] = "no"
    restart_s: float | None = Field(None, alias="restartSec", ge=0, le=3600)
    burst: int | None = Field(None, alias="startLimitBurst", ge=0, le=10_000)
    interval_s: float | None = Field(None, alias="startLimitIntervalSec", ge=0, le=86400)


class Unit(Body):
    """A systemd unit, or what is changed of one."""

    name: str
    mode: Literal["oneshot", "service"] = "service"
    exec: list[Text] = Field(default_factory=list, max_length=64)
    env: dict[str, Text] | None = None
    user: str | None = None
    group: str | None = None
    workdir: Text | None = None
    after: list[str] | None = None
    requires: list[str] | None = None
    on_failure: list[str] | None = Field(None, alias="onFailure")
    wanted_by: list[str] | None = Field(None, alias="wantedBy")
    enable: bool | None = None
    timeout_s: float | None = Field(None, alias="timeoutSec", ge=0, le=MAX_SECONDS)
    remain: bool | None = Field(None, alias="remainAfterExit")
    delete_after_success: bool | None = Field(None, alias="deleteAfterSuccess")
    ready_signal: bool | None = Field(None, alias="readySignal")
    watchdog_s: float | None = Field(None, alias="watchdogSec", ge=0, le=86400)
    restart: UnitRestart | None = Field(None, alias="restartPolicy")


class Systemd(Body):
    services: list[Unit] | None = Field(None, max_length=150)
    patched: list[Unit] | None = Field(None, alias="patchedServices", max_length=150)


class User(Body):
    name: str
    uid: int | None = Field(None, ge=0, le=2**31)
    gecos: Text | None = None
    groups: list[str] | None = Field(None, max_length=64)
    home: Text | None = None
    shell: Text | None = None
    system: bool | None = None


class Group(Body):
    name: str
    gid: int | None = Field(None, ge=0, le=2**31)
    system: bool | None = None


class ExtraFile(Body):
    content: str
    encoding: Literal["utf8", "utf-8", "base64"] | None = None
    executable: bool | None = None


class GitUser(Body):
    name: Text | None = None
    email: Text | None = None
    signingkey: Text | None = None


class GitConfig(Body):
    user: GitUser | None = None


class RepoWanted(Body):
    repo: Text
    path: Text | None = None
    rev: Text | None = None


class Git(Body):
    config: GitConfig | None = None
    repos: list[RepoWanted] | None = Field(None, max_length=32)


class PortWanted(Body):
    port: int = Field(ge=1, le=65535)
    target: int = Field(alias="targetPort", ge=1, le=65535)


class BaseImage(Body):
    dockerfile: Text = Field(alias="dockerfileContent")


class Credentials(Body):
    """For images of a private registry."""

    username: str = Field(max_length=256)
    password: str = Field(max_length=65536)
    registry: Annotated[RegistryName | None, BeforeValidator(_host)] = None

    def auth(self) -> RegistryAuth:
        return RegistryAuth(username=self.username, password=SecretStr(self.password), registry=self.registry)


class Layer(Body):
    """What a machine is made of, or one layer of it. `snapshot` is the layer below."""

    snapshot_id: Text | None = Field(None, alias="snapshotId")
    base_image: BaseImage | None = Field(None, alias="baseImage")
    disk_gb: int | None = Field(None, alias="rootfsSizeGb", ge=-LARGE, le=LARGE)
    memory_gb: int | None = Field(None, alias="memSizeGb", ge=-LARGE, le=LARGE)
    vcpus: int | None = Field(None, alias="vcpuCount", ge=-LARGE, le=LARGE)
    workdir: Text | None = None
    idle_s: Seconds | None = Field(None, alias="idleTimeoutSeconds")
    ports: list[PortWanted] | None = Field(None, max_length=64)
    systemd: Systemd | None = None
    users: list[User] | None = Field(None, max_length=64)
    groups: list[Group] | None = Field(None, max_length=64)
    files: dict[Text, ExtraFile] | None = Field(None, alias="additionalFiles", max_length=1000)
    git: Git | None = None
    git_repos: list[RepoWanted] | None = Field(None, alias="gitRepos", max_length=32)
    apt: list[str] | None = Field(None, alias="aptDeps", max_length=500)
    discriminator: Annotated[str, StringConstraints(max_length=200), Clean] | None = None
    skip_cache: bool | None = Field(None, alias="skipCache")
    snapshot: Layer | None = Field(None, validation_alias=AliasChoices("snapshot", "template"))


class NewVm(Layer):
    """Its own fields are the topmost layer. Clients send the rest as `spec`, or the older ones as `template`."""

    name: Name | None = None
    threshold: int | None = Field(None, alias="activityThresholdBytes", ge=0, le=2**31 - 1)
    persistence: Persistence | None = None
    spec: Layer | None = None
    template: Layer | None = None
    snapshot: Layer | None = None
    credentials: Credentials | None = Field(None, alias="dockerCredentials")
    udp: list[Any] | None = Field(None, alias="udpHolePunchPorts")
    domains: list[DomainWanted] | None = Field(None, max_length=64)
    recreate: bool | None = None
    nics: list[Any] | None = None


class StartVm(Body):
    idle_s: Seconds | None = Field(None, alias="idleTimeoutSeconds")
    threshold: int | None = Field(None, alias="activityThresholdBytes", ge=0, le=2**31 - 1)


class ForkVm(Body):
    count: int | None = Field(1, ge=1, le=100)


class SnapshotVm(Body):
    name: Name | None = None
    persistence: Persistence | None = None


class ResizeVm(Body):
    vcpus: int | None = Field(None, alias="vcpuCount", ge=-LARGE, le=LARGE)
    memory_gb: int | None = Field(None, alias="memSizeGb", ge=-LARGE, le=LARGE)
    disk_gb: int | None = Field(None, alias="rootfsSizeGb", ge=-LARGE, le=1024)


class Exec(Body):
    command: Annotated[str, StringConstraints(max_length=2**20), Clean]
    terminal: Annotated[str, StringConstraints(max_length=64), Clean] | None = None
    timeout_ms: int | None = Field(None, alias="timeoutMs", ge=1, le=7 * 86_400_000)


class WriteFile(Body):
    content: str
    encoding: Literal["utf8", "utf-8", "base64"] = "utf8"


class EnsureSnapshot(Body):
    name: Name | None = None
    credentials: Credentials | None = Field(None, alias="dockerCredentials")
    spec: Layer | None = None
    template: Layer | None = None


class RenameSnapshot(Body):
    name: Name
