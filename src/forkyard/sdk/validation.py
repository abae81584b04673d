"""Requests checked before they are sent: a wrong argument is our own error with the argument's name, not pydantic's."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final, TypeVar

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

M = TypeVar("M", bound=BaseModel)


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


def sandbox_resize(**fields: int | None) -> SandboxResize:
    given = {name: value for name, value in fields.items() if value is not None}
    if not given:
        raise InvalidRequest("A resize needs at least one of vcpus, memory_mib and disk_gib.")
    return _valid(SandboxResize, given)


def sandbox_fork(**fields: Any) -> SandboxFork:
    return _valid(SandboxFork, fields)


def snapshot_create(**fields: Any) -> SnapshotCreate:
    return _valid(SnapshotCreate, fields)


def _valid(model: type[M], fields: dict[str, Any]) -> M:
    try:
        return model.model_validate(fields)
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        cls = InvalidShape if name in Shape.model_fields else InvalidRequest
        raise cls(f"{name}={first['input']!r} is not possible: {first['msg']}.", field=name) from None
