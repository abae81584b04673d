"""Requests checked before they are sent: a wrong argument is our own error with the argument's name, not pydantic's."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from forkyard.errors import InvalidRequest, InvalidShape
from forkyard.models import (
    ExecCreate,
    SandboxCreate,
    SandboxFork,
    SandboxResize,
    SandboxUpdate,
    Shape,
    SnapshotCreate,
)
from forkyard.models.base import field_of
from forkyard.models.builds import ServiceCreate
from forkyard.models.code import CodeRun, ContextCreate
from forkyard.models.dev_servers import DevServerCreate
from forkyard.models.network import EgressPolicy, EgressRule, NetworkPolicy, Preset, Secret
from forkyard.models.reviews import ReviewPlan
from forkyard.models.runs import RunCreate, ScheduleCreate, ScheduleUpdate
from forkyard.models.specs import GitRepo
from forkyard.models.ssh import SshAccessCreate, SshKeyCreate
from forkyard.models.volumes import VolumeCreate

M = TypeVar("M", bound=BaseModel)

#: Fields that hold, or are, what nobody else should see.
_SECRET = frozenset({"secrets", "registry"})
#: Of an argument that is not possible.
_SHOWN_CHARS = 200


class Unchanged(Enum):
    """Not given, where None is a value of its own."""

    UNCHANGED = 0

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final = Unchanged.UNCHANGED


def exec_create(**fields: Any) -> ExecCreate:
    return _valid(ExecCreate, fields)


def sandbox_create(**fields: Any) -> SandboxCreate:
    return _valid(SandboxCreate, fields)


def sandbox_update(**fields: Any) -> SandboxUpdate:
    return _valid(SandboxUpdate, {name: value for name, value in fields.items() if value is not UNCHANGED})


def run_create(**fields: Any) -> RunCreate:
    return _valid(RunCreate, fields)


def schedule_create(**fields: Any) -> ScheduleCreate:
    return _valid(ScheduleCreate, fields)


def schedule_update(**fields: Any) -> ScheduleUpdate:
    return _valid(ScheduleUpdate, {name: value for name, value in fields.items() if value is not None})


def sandbox_resize(**fields: int | None) -> SandboxResize:
    given = {name: value for name, value in fields.items() if value is not None}
    if not given:
        raise InvalidRequest("A resize needs at least one of vcpus, memory_mib and disk_gib.")
    return _valid(SandboxResize, given)


def sandbox_fork(**fields: Any) -> SandboxFork:
    return _valid(SandboxFork, fields)


def git_repo(given: GitRepo | str | Mapping[str, Any]) -> GitRepo:
    return given if isinstance(given, GitRepo) else _valid(GitRepo, given)


def snapshot_create(**fields: Any) -> SnapshotCreate:
    return _valid(SnapshotCreate, fields)


def secret(value: Secret | Mapping[str, Any]) -> Secret:
    return value if isinstance(value, Secret) else _valid(Secret, dict(value))


def volume_create(**fields: Any) -> VolumeCreate:
    return _valid(VolumeCreate, fields)


def ssh_key_create(**fields: Any) -> SshKeyCreate:
    return _valid(SshKeyCreate, fields)


def ssh_access_create(**fields: Any) -> SshAccessCreate:
    return _valid(SshAccessCreate, fields)


def service_create(**fields: Any) -> ServiceCreate:
    return _valid(ServiceCreate, fields)


def code_run(**fields: Any) -> CodeRun:
    return _valid(CodeRun, fields)


def context_create(**fields: Any) -> ContextCreate:
    return _valid(ContextCreate, fields)


def dev_server_create(**fields: Any) -> DevServerCreate:
    return _valid(DevServerCreate, {name: value for name, value in fields.items() if value is not None})


def egress_rule(**fields: Any) -> EgressRule:
    rule = _valid(EgressRule, fields)
    if (found := rule.in_vain()) is not None:
        raise InvalidRequest(f"{found[0]}: {found[1]}", field=found[0])
    return rule


#: A preset's name; or what may leave; or that and what may enter. Plain mappings will do.
Network: TypeAlias = Preset | EgressPolicy | NetworkPolicy | Mapping[str, Any]


def network_policy(network: Network) -> NetworkPolicy:
    if isinstance(network, str):
        return _valid(NetworkPolicy, {"egress": {"preset": network}})
    if isinstance(network, EgressPolicy):
        network = NetworkPolicy(egress=network)
    elif not isinstance(network, NetworkPolicy):
        network = _valid(NetworkPolicy, dict(network))
    network.egress.check_rules()
    return network


def review_plan(plan: ReviewPlan | Mapping[str, Any] | None) -> ReviewPlan:
    return plan if isinstance(plan, ReviewPlan) else _valid(ReviewPlan, dict(plan or {}))


def _valid(model: type[M], fields: Any) -> M:
    try:
        return model.model_validate(fields)
    except ValidationError as exc:
        first = exc.errors()[0]
        name = field_of(first["loc"])
        cls = InvalidShape if name in Shape.model_fields else InvalidRequest
        # What was given in place of a secret may be one.
        hidden = model is Secret or bool(_SECRET.intersection(first["loc"]))
        given = "" if hidden else f"={_shortened(repr(first['input']))}"
        raise cls(f"{name}{given} is not possible: {first['msg'].removeprefix('Value error, ')}.", field=name) from None


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
