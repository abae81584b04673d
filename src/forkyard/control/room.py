"""Makes room: on disk by evicting sticky sandboxes that sleep, in memory by moving sleepers to disk.

Owns: what is done before "no capacity" is said. What must be decided is in `placement`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import structlog

from forkyard.control.ground import Ground, machine
from forkyard.control.placement import GIB, RETRY_AFTER_S, disk_shortfall_bytes, eviction_order
from forkyard.control.removal import Removal
from forkyard.errors import ForkyardError, NoCapacity, QuotaExceeded
from forkyard.lifecycle import State

log = structlog.get_logger(__name__)

#: What a new machine writes at first: it shares the blocks of its parent until it changes them.
MACHINE_BYTES = 16 * 2**20
MIB = 2**20

T = TypeVar("T")


class Cooler(Protocol):
    async def cool_if_free(self, sandbox_id: str) -> bool: ...


class Room:
    def __init__(self, ground: Ground, removal: Removal) -> None:
        self._ground = ground
        self._removal = removal
        self._evicting = asyncio.Lock()

    async def on_disk(self, need_bytes: int, what: str, *, spare: str | None = None) -> None:
        """Returns when `need_bytes` fit; `spare` is not evicted for it."""
        if await self._shortfall_bytes(need_bytes) == 0:
            return
        async with self._evicting:
            asleep = await self._ground.store.list_sandboxes(states=[State.PAUSED, State.STOPPED])
            for record in eviction_order(asleep):
                missing = await self._shortfall_bytes(need_bytes)
                if missing == 0:
                    return
                if record.id != spare and await self._evict(record.id, missing, what):
                    log.warning("sandbox evicted", sandbox=record.id, priority=record.priority)
            missing = await self._shortfall_bytes(need_bytes)
        if missing:
            raise NoCapacity(
                f"{what} needs {need_bytes / GIB:.2f} GiB on disk, and {missing / GIB:.2f} GiB are missing: all that "
                "may be evicted is gone; delete sandboxes or snapshots, or raise FORKYARD_DISK_BUDGET_GIB",
                retry_after_s=RETRY_AFTER_S,
            )

    async def _evict(self, sandbox_id: str, missing_bytes: int, what: str) -> bool:
        record = await self._ground.record(sandbox_id)
        if not eviction_order([record]):
            return False
        try:
            return await self._removal.evict(record, f"evicted to make room: {missing_bytes} bytes for {what}")
        except ForkyardError as error:
            log.error("sandbox not evicted", sandbox=sandbox_id, error=error.message)
            return False

    async def _shortfall_bytes(self, need_bytes: int) -> int:
        ground = self._ground
        stored_bytes = 0
        if ground.limits.disk_budget_bytes is not None:
            states = [state for state in State if state is not State.DELETED]
            records = await ground.store.list_sandboxes(states=states)
            sizes = await asyncio.gather(*(ground.host.stored_bytes(machine(record)) for record in records))
            volumes = await ground.store.list_volumes()
            sizes += await asyncio.gather(*(ground.host.volume_bytes(volume.id) for volume in volumes))
            stored_bytes = sum(sizes) + await ground.store.snapshot_bytes()
        return disk_shortfall_bytes(ground.limits, ground.host.capacity(), stored_bytes, need_bytes)

    async def in_memory(self, attempt: Callable[[], Awaitable[T]], cooler: Cooler) -> T:
        """`attempt` asks for admission; while it is refused, sleepers that still hold memory are moved to disk, those
        that sleep longest first."""
        while True:
            try:
                return await attempt()
            except QuotaExceeded:
                raise
            except NoCapacity:
                hot = sorted(self._ground.hot.items(), key=lambda item: item[1].since)
                for sandbox_id, _ in hot:
                    if await cooler.cool_if_free(sandbox_id):
                        break
                else:
                    raise
