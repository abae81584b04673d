"""Whether saved memory is what was saved: found out before any machine runs on it.

Owns: reading it through once for all who start from it together, or soon after. Machines map it where it lies, so the
reading also brings it into the host's memory. Never does: what is on disk (`storage.snapshots`).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from forkyard.storage.snapshots import Saved, Snapshots

#: What was found whole, and has not been written since, is believed for so long.
FRESH_S = 300.0


@dataclass(frozen=True)
class _Look:
    stamp: tuple[int, ...]  # of the file that was looked at
    began: float
    reading: asyncio.Task[None]

    @property
    def failed(self) -> bool:
        return self.reading.done() and (self.reading.cancelled() or self.reading.exception() is not None)


class Intact:
    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._looks: dict[str, _Look] = {}

    async def open(self, snapshot_id: str) -> tuple[Saved, asyncio.Task[None]]:
        """What its manifest says, and the reading of its pages, under way or done: `SnapshotCorrupt` if they have changed.
        All else of it is checked when this returns. The task is others' too: shield it."""
        saved, stamp = await asyncio.to_thread(self._snapshots.open, snapshot_id)
        now = time.monotonic()
        self._looks = {name: look for name, look in self._looks.items() if now - look.began < FRESH_S}
        look = self._looks.get(snapshot_id)
        if look is None or look.stamp != stamp or look.failed:
            reading = asyncio.create_task(asyncio.to_thread(self._snapshots.verify, saved))
            reading.add_done_callback(lambda task: task.cancelled() or task.exception())
            look = self._looks[snapshot_id] = _Look(stamp, now, reading)
        return saved, look.reading
