"""Forgets what ended long ago: rows of deleted sandboxes, and events.

Owns: which rows may go. A deleted sandbox is remembered as long as something refers to it: a snapshot of it, say.
"""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa

from forkyard.lifecycle import State
from forkyard.store.database import Database
from forkyard.store.tables import egress, events, idempotency, metadata, sandboxes

#: At a time, so that nobody waits long for the one writer.
MOST_ROWS = 500
#: What goes with its sandbox. Rows of any other table that refer to it keep it.
_GO_ALONG = (egress, events, idempotency)


class Retention(Database):
    async def forget_ended(self, before: datetime) -> int:
        """Forget sandboxes that were deleted before then, and events of none that are older; returns how many rows of
        both. Call again while it returns any."""

        def work(connection: sa.Connection) -> int:
            refers = [
                sa.exists().where(key.parent == sandboxes.c.id)
                for table in metadata.sorted_tables
                if table not in _GO_ALONG
                for key in table.foreign_keys
                if key.column.table is sandboxes
            ]
            gone = sa.and_(sandboxes.c.state == State.DELETED, sandboxes.c.ended_at < before, *(~r for r in refers))
            ids = list(connection.execute(sa.select(sandboxes.c.id).where(gone).limit(MOST_ROWS)).scalars())
            for table in _GO_ALONG:
                connection.execute(table.delete().where(table.c.sandbox_id.in_(ids)))
            connection.execute(sandboxes.delete().where(sandboxes.c.id.in_(ids)))
            old = sa.select(events.c.id).where(events.c.sandbox_id.is_(None), events.c.at < before).limit(MOST_ROWS)
            removed = connection.execute(events.delete().where(events.c.id.in_(old)))
            return len(ids) + int(removed.rowcount)

        return await self._write(work)
