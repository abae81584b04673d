"""Records of what left, on their way from the doors to whoever keeps them.

Owns: a queue with an end. If its reader is slow, new records are dropped, and one per sandbox says how many.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from forkyard.models.network import EgressRecord

MOST_WAITING = 10_000


class EgressQueue:
    def __init__(self, most: int = MOST_WAITING) -> None:
        self._waiting: asyncio.Queue[EgressRecord] = asyncio.Queue(most)
        self._dropped: Counter[str] = Counter()

    def put(self, record: EgressRecord) -> None:
        try:
            self._waiting.put_nowait(record)
        except asyncio.QueueFull:
            self._dropped[record.sandbox_id] += 1

    async def records(self) -> AsyncIterator[EgressRecord]:
        while True:
            yield await self._waiting.get()
            if self._dropped and self._waiting.empty():
                dropped, self._dropped = self._dropped, Counter()
                for sandbox_id, count in dropped.items():
                    yield EgressRecord(
                        at=datetime.now(UTC),
                        sandbox_id=sandbox_id,
                        kind="tcp",
                        verdict="failed",
                        reason=f"{count} records of this sandbox were lost: more came than could be written down",
                    )
