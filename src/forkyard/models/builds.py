"""Wire types of builds and of services in a sandbox."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from forkyard.models.base import Answer, EnvName, Request
from forkyard.models.bases import RegistryAuth
from forkyard.models.network import NetworkPolicy, Secret
from forkyard.models.specs import Service, Spec

#: Of a machine that builds a layer.
BUILD_LABEL = "forkyard.build"
BuildState = Literal["running", "succeeded", "failed", "cancelled"]


class BuildCreate(Request):
    spec: Spec
    skip_cache: bool = Field(False, description="Build all layers even if they are there.")
    network: NetworkPolicy = Field(
        default_factory=NetworkPolicy, description="What the build may reach. Sandboxes made of it have their own."
    )
    identity: str | None = Field(
        None, max_length=128, description="Whose hosted repositories the build may clone. Sandboxes do not inherit it."
    )
    registry: RegistryAuth | None = Field(
        None,
        description="For images of a private registry. Never written down: a daemon that starts anew has it no more.",
    )
    secrets: dict[EnvName, Secret] = Field(
        default_factory=dict,
        max_length=64,
        description="Stored secrets that the build may use: a placeholder inside, the value on the way out.",
    )
    allow_secrets: bool = Field(
        False,
        description="Also keep a layer in whose memory or files the value of a stored secret is found. Such builds have "
        "layers of their own: no other build, and no create with a spec, finds them.",
    )

    @field_validator("secrets")
    @classmethod
    def _stored(cls, secrets: dict[str, Secret]) -> dict[str, Secret]:
        for name, secret in secrets.items():
            if secret.value is not None:
                raise ValueError(
                    f"{name}: a build is kept on record, so its secrets are stored ones, without a value here"
                )
        return secrets


class LayerInfo(Answer):
    """One layer of a build: from the cache, or built, and why."""

    index: int
    key: str = Field(description="Hash of all that goes into it.")
    steps: list[str] = Field(description="What it does, in short.")
    cached: bool
    reason: str = Field(description="Why it is in the cache, or why not.")
    steps_kept: int = Field(0, description="If it is not: how many of its steps are, so that only the rest is done.")
    snapshot_id: str | None = None
    duration_ms: float | None = Field(None, description="If it was built now.")


class UnitState(Answer):
    name: str
    active: str = Field(description="`active`, `failed`, `activating` …")
    sub: str = ""
    result: str = ""
    exit_code: int | None = None
    log: str = Field("", description="The end of its journal.")


class BuildFailure(Answer):
    message: str
    layer: int | None = None
    step: int | None = Field(None, description="Its number in the spec.")
    what: str | None = Field(None, description="The step, in short.")
    exit_code: int | None = None
    log: str = Field("", description="The end of what the step printed.")
    units: list[UnitState] = Field(default_factory=list, description="Services of the machine when it failed.")
    denied: list[str] = Field(default_factory=list, description="Where its network policy did not let the build go.")
    debug_snapshot_id: str | None = Field(None, description="The machine as the failure left it.")


class BuildInfo(Answer):
    id: str
    name: str | None = None
    state: BuildState
    layers: list[LayerInfo]
    snapshot_id: str | None = Field(None, description="Of the last layer: what sandboxes are made from.")
    failure: BuildFailure | None = None
    created_at: datetime
    finished_at: datetime | None = None


class BuildPlan(Answer):
    layers: list[LayerInfo]


class BuildPhase(Answer):
    """A layer or a step begins or ends, or what the machine starts from is found."""

    type: Literal["phase"] = "phase"
    n: int = Field(description="Lines count from 1; `after` takes one.")
    at: datetime
    phase: Literal["base", "cached", "layer", "step", "snapshot", "done", "waiting"]
    layer: int
    step: int | None = None
    text: str
    duration_ms: float | None = None


class BuildOutput(Answer):
    type: Literal["output"] = "output"
    n: int
    at: datetime
    stream: Literal["stdout", "stderr"]
    text: str


class BuildEnd(Answer):
    """The last line."""

    type: Literal["end"] = "end"
    n: int
    at: datetime
    state: BuildState
    message: str | None = None


BuildEvent = Annotated[BuildPhase | BuildOutput | BuildEnd, Field(discriminator="type")]


class Pruned(Answer):
    layers: int
    freed_bytes: int


class ServiceInfo(Answer):
    name: str
    active: str = Field(description="`active`, `inactive`, `failed`, `activating` …")
    sub: str
    result: str
    exit_code: int | None = None
    pid: int | None = None
    restarts: int = 0
    enabled: bool = True
    service: Service | None = Field(None, description="As it was asked for.")


class ServiceLogs(Answer):
    name: str
    log: str


class ServiceCreate(Service):
    """A service for a sandbox that runs. One of the same name is replaced."""

    wait: bool = Field(True, description="Answer when it is ready; else when it was started.")

    def service(self) -> Service:
        return Service.model_validate(self.model_dump(exclude={"wait"}))


def build_event(line: dict[str, Any]) -> BuildPhase | BuildOutput | BuildEnd:
    kinds: dict[str, type[BuildPhase | BuildOutput | BuildEnd]] = {"phase": BuildPhase, "output": BuildOutput}
    return kinds.get(str(line.get("type")), BuildEnd).model_validate(line)
