"""What every wire type is made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

T = TypeVar("T")
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]


#: Parts of a location that are pydantic's own: which form of a field was tried.
_INNER = re.compile(r"(function-(after|before|wrap|plain)|list|dict|nullable|union|literal)\[.*|constrained-str")


def field_of(location: Sequence[int | str]) -> str:
    """Where in a body something is wrong, as people would say it."""
    return ".".join(str(part) for part in location if not _INNER.fullmatch(str(part)))


class Request(BaseModel):
    """Unknown fields are refused: a typo is an error and not a default."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)  # it may be a secret, and errors are logged


class Answer(BaseModel):
    """Unknown fields are ignored: an older SDK can talk to a newer daemon."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)


class Page(Answer, Generic[T]):
    items: list[T]
    next_cursor: str | None = Field(None, description="Pass as `cursor` for the next page; absent on the last.")
