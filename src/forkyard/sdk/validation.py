"""Requests checked before they are sent: a wrong argument is our own error with the argument's name, not pydantic's."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from forkyard.errors import InvalidRequest, InvalidShape
from forkyard.models import ExecCreate, SandboxCreate, Shape

M = TypeVar("M", bound=BaseModel)


def exec_create(**fields: Any) -> ExecCreate:
    return _valid(ExecCreate, fields)


def sandbox_create(**fields: Any) -> SandboxCreate:
    return _valid(SandboxCreate, fields)


def _valid(model: type[M], fields: dict[str, Any]) -> M:
    try:
        return model.model_validate(fields)
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        cls = InvalidShape if name in Shape.model_fields else InvalidRequest
        raise cls(f"{name}={first['input']!r} is not possible: {first['msg']}.", field=name) from None
