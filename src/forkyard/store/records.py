"""Rows as values: what the store gives and takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from forkyard.lifecycle import Cause, State
from forkyard.models import DEFAULT_ACTIVITY_BYTES, OnTtl, Persistence, Shape
from forkyard.models.network import NetworkPolicy
from forkyard.models.volumes import SandboxVolume
from forkyard.net.base import Traffic


@dataclass(frozen=True)
class SealedSecret:
    """A secret of a sandbox. Forks inherit it as it is, placeholder included: it stands in their memory."""

    hosts: tuple[str, ...]
    header: str
    format: str
    placeholder: str = field(repr=False)
    sealed: str | None = field(repr=False)  # None: the stored secret of this name, whatever it is then


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
    key_id: str | None
    parent_id: str | None
    snapshot_id: str | None
    persistence: Persistence
    priority: int
    idle_timeout_s: float | None
    ttl_s: float | None
    checkpoint_every_s: float | None
    checkpoints_kept: int
    expires_at: datetime | None
    last_active_at: datetime | None
    created_at: datetime
    updated_at: datetime
    ended_at: datetime | None
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    secrets: Mapping[str, SealedSecret] = field(default_factory=dict)
    identity_id: str | None = None  # may be gone: then it may use nothing
    trusts_ca: bool | None = False  # whether its guest was told to trust our authority; None: nobody knows
    activity_threshold_bytes: int = DEFAULT_ACTIVITY_BYTES
    on_ttl: OnTtl = "delete"
    annotations: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[SandboxVolume, ...] = ()
    public_env: Mapping[str, str] = field(default_factory=dict)  # what its snapshots pass on
    traffic: Traffic = field(default_factory=Traffic)  # of its earlier machines, and of this one up to the last look


@dataclass(frozen=True)
class NewSandbox:
    id: str
    shape: Shape
    name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    key_id: str | None = None
    parent_id: str | None = None
    snapshot_id: str | None = None
    persistence: Persistence = "sticky"
    priority: int = 5
    idle_timeout_s: float | None = None
    ttl_s: float | None = None
    checkpoint_every_s: float | None = None
    checkpoints_kept: int = 5
    network: NetworkPolicy = field(default_factory=NetworkPolicy)
    secrets: Mapping[str, SealedSecret] = field(default_factory=dict)
    identity_id: str | None = None
    trusts_ca: bool | None = False
    activity_threshold_bytes: int = DEFAULT_ACTIVITY_BYTES
    on_ttl: OnTtl = "delete"
    annotations: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[SandboxVolume, ...] = ()
    public_env: Mapping[str, str] = field(default_factory=dict)  # what its snapshots pass on


@dataclass(frozen=True)
class SnapshotRecord:
    id: str
    name: str | None
    sandbox_id: str
    automatic: bool
    shape: Shape
    size_bytes: int
    paused_ms: float
    created_at: datetime
    trusts_ca: bool | None = None  # whether its guest was told to trust our authority; None: nobody knows
    annotations: Mapping[str, str] = field(default_factory=dict)  # of its sandbox then, and what was noted of itself


@dataclass(frozen=True)
class Load:
    """What is in use when a machine asks to be let in, itself not counted."""

    memory_mib: int
    key_running: int
    key_memory_mib: int
    key_creates: int  # in the last minute
    key_oldest_create_s: float  # how long ago the first of these was


#: Raises if there is no room. Called inside the transaction that takes it, so two callers cannot both get the last of
#: it; it must be quick.
Admit = Callable[[Load], None]


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
class SshKeyRecord:
    id: str
    name: str
    fingerprint: str
    created_at: datetime
    last_used_at: datetime | None


@dataclass(frozen=True)
class DomainRecord:
    domain: str
    sandbox_id: str | None
    port: int | None
    token: str
    verified_at: datetime | None
    created_at: datetime


@dataclass(frozen=True)
class Place:
    """Where a page of the list ends: lists are newest first, so inserts never move what is still to come."""

    created_at: datetime
    id: str
