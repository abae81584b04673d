"""Labels of sandboxes: those of users, and those by which Forkyard knows what it made for a task of its own.

Owns: that nobody else can give a sandbox one of the latter, for what has it is deleted with its task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import AfterValidator, StringConstraints

from forkyard.models.base import Request

OURS = "forkyard."


def _theirs(key: str) -> str:
    if key.startswith(OURS):
        raise ValueError(f"labels that begin with `{OURS}` are Forkyard's own; choose another name")
    return key


LabelKey = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_./-]{1,64}$"), AfterValidator(_theirs)]
LabelValue = Annotated[str, StringConstraints(max_length=256)]
R = TypeVar("R", bound=Request)


def marked(request: R, marks: Mapping[str, str]) -> R:
    """The same request for a machine of ours, with labels that begin with `forkyard.`."""
    labels: Mapping[str, str] = getattr(request, "labels", None) or {}
    return request.model_copy(update={"labels": {**labels, **marks}})


def theirs(labels: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in labels.items() if not key.startswith(OURS)}


def ours(labels: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in labels.items() if key.startswith(OURS)}
