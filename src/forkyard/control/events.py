"""History, as it is and as it happens.

Owns: reading and following the events table. The table is the truth and a commit only wakes: a follower holds no
queue, so a slow one costs nothing and misses nothing, and one that was away continues after the last id it saw. Never
does: writing states (`store.transition` writes their events).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from forkyard.errors import NoCapacity
from forkyard.lifecycle import Cause
from forkyard.models import EventInfo, Page
from forkyard.store.records import EventRecord
from forkyard.store.sql import Store

MAX_FOLLOWERS = 256
BATCH = 100


class Events:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._followers = 0

    async def publish(
        self,
        kind: str,
        *,
        sandbox_id: str | None = None,
        cause: Cause | None = None,
        detail: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        await self._store.add_event(kind, sandbox_id=sandbox_id, cause=cause, detail=detail, data=data)

    async def page(self, *, sandbox_id: str | None = None, after: int = 0, limit: int = 100) -> Page[EventInfo]:
        """Oldest first; `next_cursor` is the `after` of the next page."""
        found = await self._store.list_events(sandbox_id=sandbox_id, after=after, limit=limit + 1)
        more = len(found) > limit
        found = found[:limit]
        return Page[EventInfo](
            items=[event_info(record) for record in found], next_cursor=str(found[-1].id) if more else None
        )

    async def before_newest(self, count: int, *, sandbox_id: str | None = None) -> int:
        """The `after` with which the `count` newest events come first."""
        return await self._store.event_before_newest(count, sandbox_id=sandbox_id)

    @asynccontextmanager
    async def follow(
        self, *, sandbox_id: str | None = None, after: int | None = None
    ) -> AsyncIterator[AsyncIterator[EventInfo]]:
        """Events after the id `after`, without end; by default those that happen from now on."""
        if self._followers >= MAX_FOLLOWERS:
            raise NoCapacity(f"{MAX_FOLLOWERS} clients follow events already; close some, or page with `after`")
        self._followers += 1
        try:
            start = await self._store.last_event_id() if after is None else after
            yield self._rows(sandbox_id, start)
        finally:
            self._followers -= 1

    async def _rows(self, sandbox_id: str | None, after: int) -> AsyncIterator[EventInfo]:
        while True:
            news = self._store.news
            found = await self._store.list_events(sandbox_id=sandbox_id, after=after, limit=BATCH)
            for record in found:
                yield event_info(record)
                after = record.id
            if not found:
                await news.wait()


def event_info(record: EventRecord) -> EventInfo:
    return EventInfo(
        id=record.id,
        at=record.at,
        sandbox_id=record.sandbox_id,
        kind=record.kind,
        cause=record.cause,
        detail=record.detail,
        data=dict(record.data),
    )
