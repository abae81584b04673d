"""What every wire type is made of."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

T = TypeVar("T")
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]


class Request(BaseModel):
    """Unknown fields are refused: a typo is an error and not a default."""

    model_config = ConfigDict(extra="forbid")


class Answer(BaseModel):
    """Unknown fields are ignored: an older SDK can talk to a newer daemon."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Page(Answer, Generic[T]):
    items: list[T]
    next_cursor: str | None = Field(None, description="Pass as `cursor` for the next page; absent on the last.")
