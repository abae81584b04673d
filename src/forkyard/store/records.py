"""Rows as values: what the store gives and takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from forkyard.lifecycle import Cause, State
from forkyard.models import Shape


@dataclass(frozen=True)
class SandboxRecord:
    id: str
    name: str | None
    state: State
    cause: Cause
    cause_detail: str | None
    incarnation: int
    shape: Shape
    labels: Mapping[str, str]
    env: Mapping[str, str]
    template: str | None
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True)
class NewSandbox:
    id: str
    shape: Shape
    name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class IdempotencyClaim:
    """`Idempotency-Key` of one API key, and a hash of the request it came with."""

    api_key_id: str
    key: str
    request_hash: str


@dataclass(frozen=True)
class EventRecord:
    id: int
    at: datetime
    sandbox_id: str | None
    kind: str
    cause: Cause | None
    detail: str | None
    data: Mapping[str, Any]


@dataclass(frozen=True)
class KeyRecord:
    id: str
    name: str
    prefix: str
    created_at: datetime
    last_used_at: datetime | None


@dataclass(frozen=True)
class Place:
    """Where a page of the list ends: lists are newest first, so inserts never move what is still to come."""

    created_at: datetime
    id: str
