"""Who is let in, and who must go when the disk is full. Pure: numbers in, a decision out.

Memory is counted by what machines may use, not by what they do: machines of one template share most of it, so their sum
may exceed the host's memory by `memory_overcommit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from forkyard.errors import NoCapacity, QuotaExceeded
from forkyard.hosts.base import Capacity
from forkyard.lifecycle import State
from forkyard.settings import Settings
from forkyard.store.records import Load, SandboxRecord

GIB = 2**30
RETRY_AFTER_S = 5.0
WINDOW_S = 60.0


@dataclass(frozen=True)
class Limits:
    """The settings that decide here; see there."""

    memory_overcommit: float = 4.0
    quota_running: int | None = None
    quota_memory_mib: int | None = None
    quota_creates_per_minute: int | None = None
    quota_volumes_mib: int | None = None
    volume_mib: int = 64 * 1024
    disk_budget_bytes: int | None = None
    disk_reserve_bytes: int = 0
    cool_after_s: float = 60.0
    retention_s: float = 30 * 86400.0

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        budget_gib = settings.disk_budget_gib
        return cls(
            memory_overcommit=settings.memory_overcommit,
            quota_running=settings.quota_running,
            quota_memory_mib=settings.quota_memory_mib,
            quota_creates_per_minute=settings.quota_creates_per_minute,
            quota_volumes_mib=None if settings.quota_volumes_gib is None else int(settings.quota_volumes_gib * 1024),
            volume_mib=int(settings.volume_gib * 1024),
            disk_budget_bytes=None if budget_gib is None else int(budget_gib * GIB),
            disk_reserve_bytes=int(settings.disk_reserve_gib * GIB),
            cool_after_s=settings.cool_after_s,
            retention_s=settings.retention_days * 86400,
        )


def admit(limits: Limits, capacity: Capacity, load: Load, memory_mib: int, *, held_mib: int, creates: bool) -> None:
    """Raises if a machine of `memory_mib` may not start. `held_mib`: memory of paused machines that is not on disk."""
    quota = limits.quota_creates_per_minute
    if creates and quota is not None and load.key_creates >= quota:
        wait_s = max(1.0, WINDOW_S - load.key_oldest_create_s) if quota else WINDOW_S
        raise QuotaExceeded(
            f"this API key has created {load.key_creates} sandboxes within a minute, and {quota} are its quota; "
            f"try again in {wait_s:.0f} s",
            retry_after_s=wait_s,
        )
    if limits.quota_running is not None and load.key_running >= limits.quota_running:
        raise QuotaExceeded(
            f"this API key has {load.key_running} running sandboxes, and {limits.quota_running} are its quota; "
            "pause or delete some",
            retry_after_s=RETRY_AFTER_S,
        )
    if limits.quota_memory_mib is not None and load.key_memory_mib + memory_mib > limits.quota_memory_mib:
        raise QuotaExceeded(
            f"the running sandboxes of this API key have {load.key_memory_mib} MiB of memory; {memory_mib} more would "
            f"exceed its quota of {limits.quota_memory_mib} MiB; pause or delete some",
            retry_after_s=RETRY_AFTER_S,
        )
    ceiling_mib = int(capacity.memory_mib * limits.memory_overcommit)
    if load.memory_mib + held_mib + memory_mib > ceiling_mib:
        raise NoCapacity(
            f"the machines on this host have {load.memory_mib + held_mib} MiB of memory; {memory_mib} more would "
            f"exceed the limit of {ceiling_mib} MiB ({capacity.memory_mib} MiB x {limits.memory_overcommit:g}); pause "
            "or delete some, or raise FORKYARD_MEMORY_OVERCOMMIT",
            retry_after_s=RETRY_AFTER_S,
        )


def disk_shortfall_bytes(limits: Limits, capacity: Capacity, stored_bytes: int, need_bytes: int) -> int:
    """How much must go before `need_bytes` fit; 0 if they fit."""
    missing = limits.disk_reserve_bytes + need_bytes - capacity.disk_free_bytes
    if limits.disk_budget_bytes is not None:
        missing = max(missing, stored_bytes + need_bytes - limits.disk_budget_bytes)
    return max(0, missing)


def eviction_order(records: Iterable[SandboxRecord]) -> list[SandboxRecord]:
    """Those that may be evicted: the lowest priority first, then the least recently active."""
    may_go = [
        record for record in records if record.persistence == "sticky" and record.state in (State.PAUSED, State.STOPPED)
    ]
    return sorted(may_go, key=lambda record: (record.priority, _last_active(record), record.id))


def _last_active(record: SandboxRecord) -> datetime:
    return record.last_active_at or record.created_at
