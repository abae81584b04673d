"""What sandboxes used lately: samples of processor, memory and disk, taken by the host while they run.

Owns: one task that looks at all machines every few seconds, and an hour of what it saw, in memory: a new daemon begins
anew. Never does: ask a guest, or wake one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from forkyard.control.ground import Ground, machine
from forkyard.hosts.base import Incarnation, Load
from forkyard.lifecycle import State
from forkyard.models import UsageSample
from forkyard.store.records import SandboxRecord

log = structlog.get_logger(__name__)

EVERY_S = 10.0
KEEP_S = 3600.0
MOST = int(KEEP_S / EVERY_S)
#: What was seen this lately is as good as now.
FRESH_S = 1.0
#: Between two looks, where nobody had looked before.
GLANCE_S = 0.2
_MIB = 2**20


@dataclass(frozen=True)
class _Sample:
    at: float  # of the clock on the wall
    cores: float  # busy on average, since the look before
    load: Load


@dataclass(frozen=True)
class _Seen:
    at: float  # of a clock that is never set
    cpu_s: float


class History:
    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        #: Replaced by tests: the time of day, and one that is never set.
        self.wall: Callable[[], float] = time.time
        self.clock: Callable[[], float] = time.monotonic
        self._samples: dict[str, deque[_Sample]] = {}
        self._seen: Mapping[Incarnation, _Seen] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.look()
            except Exception:
                log.exception("usage was not looked at; it will be again")

    async def look(self) -> None:
        """At all machines. The first look at one is only what the next is compared with."""
        found, self._seen = await self._compared(self._seen)
        for incarnation, sample in found.items():
            kept = self._samples.setdefault(incarnation.sandbox_id, deque(maxlen=MOST))
            kept.append(sample)
        oldest = self.wall() - KEEP_S
        for sandbox_id, kept in list(self._samples.items()):
            while kept and kept[0].at < oldest:
                kept.popleft()
            if not kept:
                del self._samples[sandbox_id]

    async def of(
        self, sandbox_id: str, start: datetime | None = None, end: datetime | None = None
    ) -> list[UsageSample]:
        """From `start` to `end`, oldest first. The last is of now, if that is asked for and it runs."""
        record = await self._ground.record(sandbox_id)
        samples = list(self._samples.get(sandbox_id, ()))
        if record.state is State.RUNNING and (end is None or end.timestamp() >= self.wall()):
            samples += await self._now(machine(record), samples[-1].at if samples else 0.0)
        first = float("-inf") if start is None else start.timestamp()
        last = float("inf") if end is None else end.timestamp()
        return [_told(record, one) for one in samples if first <= one.at <= last]

    async def _now(self, incarnation: Incarnation, newest: float) -> list[_Sample]:
        if abs(self.wall() - newest) < FRESH_S:
            return []
        before = self._seen
        if incarnation not in before:
            _, before = await self._compared({})
            await asyncio.sleep(GLANCE_S)
        found, _ = await self._compared(before)
        return [found[incarnation]] if incarnation in found else []

    async def _compared(
        self, before: Mapping[Incarnation, _Seen]
    ) -> tuple[dict[Incarnation, _Sample], dict[Incarnation, _Seen]]:
        """Samples of those that were seen before, and what is seen of all."""
        loads = await self._ground.host.loads()
        now, wall = self.clock(), self.wall()
        found = {
            incarnation: _Sample(wall, max(load.cpu_s - seen.cpu_s, 0.0) / max(now - seen.at, 0.001), load)
            for incarnation, load in loads.items()
            if (seen := before.get(incarnation)) is not None
        }
        return found, {incarnation: _Seen(now, load.cpu_s) for incarnation, load in loads.items()}


def _told(record: SandboxRecord, sample: _Sample) -> UsageSample:
    shape = record.shape
    return UsageSample(
        at=datetime.fromtimestamp(sample.at, UTC),
        cpu_percent=round(min(100 * sample.cores / shape.vcpus, 100.0), 2),
        memory_mib=round(min(sample.load.memory_bytes / _MIB, float(shape.memory_mib)), 1),
        disk_mib=round(min(sample.load.disk_bytes / _MIB, shape.disk_gib * 1024.0), 1),
    )
