"""Who uses a sandbox, and since when nobody does.

Owns: the number of calls under way and the time of the last sign of life, per sandbox, in memory. A call in progress
keeps a sandbox awake; a stream that is only open does not, but every piece that flows through it is a sign of life.
Never does: decisions (`idle`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta


class Activity:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._uses: dict[str, int] = {}
        self._last: dict[str, float] = {}

    @contextmanager
    def using(self, sandbox_id: str) -> Iterator[None]:
        self.begin(sandbox_id)
        try:
            yield
        finally:
            self.end(sandbox_id)

    def begin(self, sandbox_id: str) -> None:
        self._uses[sandbox_id] = self._uses.get(sandbox_id, 0) + 1
        self.touch(sandbox_id)

    def end(self, sandbox_id: str) -> None:
        self.touch(sandbox_id)
        left = self._uses.pop(sandbox_id) - 1
        if left:
            self._uses[sandbox_id] = left

    def touch(self, sandbox_id: str) -> None:
        self._last[sandbox_id] = self.clock()

    def in_use(self, sandbox_id: str) -> bool:
        return sandbox_id in self._uses

    def idle_s(self, sandbox_id: str) -> float:
        """Of a sandbox not heard of yet (this daemon has just started) the idle time begins now."""
        if sandbox_id in self._uses:
            return 0.0
        return self.clock() - self._last.setdefault(sandbox_id, self.clock())

    def last_at(self, sandbox_id: str) -> datetime:
        return datetime.now(UTC) - timedelta(seconds=self.idle_s(sandbox_id))

    def keep_only(self, sandbox_ids: set[str]) -> None:
        """Forget those that are gone, and ids that were only guessed."""
        for sandbox_id in self._last.keys() - sandbox_ids - self._uses.keys():
            del self._last[sandbox_id]
