"""Queries of triggers, of where their repositories' refs were last seen, and of deliveries.

Refs seen and the deliveries that follow from it are written in one transaction: what was seen is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import sqlalchemy as sa

from forkyard.models.git_triggers import DeliveryStatus
from forkyard.store.database import Database
from forkyard.store.records import Place
from forkyard.store.tables import git_deliveries, git_seen_refs, git_triggers


@dataclass(frozen=True)
class TriggerRecord:
    id: str
    repo_id: str
    events: Sequence[str]
    branches: Sequence[str]
    tags: Sequence[str]
    paths: Sequence[str]
    action: str  # sealed
    enabled: bool
    key_id: str
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True)
class DeliveryRecord:
    id: str
    trigger_id: str
    event: str
    ref: str
    before: str
    after: str
    payload: Mapping[str, Any]
    created_at: datetime
    status: DeliveryStatus = "pending"
    tries: int = 0
    attempts: Sequence[Mapping[str, Any]] = field(default_factory=list)
    next_at: datetime | None = None
    finished_at: datetime | None = None


class TriggerQueries(Database):
    # ── triggers ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_trigger(self, record: TriggerRecord, refs: Mapping[str, str]) -> None:
        """`refs`: where they are, if this is the first trigger of its repository."""

        def work(connection: sa.Connection) -> None:
            query = sa.select(git_triggers.c.id).where(git_triggers.c.repo_id == record.repo_id).limit(1)
            if connection.execute(query).first() is None:
                connection.execute(git_seen_refs.delete().where(git_seen_refs.c.repo_id == record.repo_id))
                _see(connection, record.repo_id, refs)
            connection.execute(git_triggers.insert(), vars(record))

        await self._write(work)

    async def trigger(self, trigger_id: str) -> TriggerRecord | None:
        query = git_triggers.select().where(git_triggers.c.id == trigger_id)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else _trigger(found)

    async def list_triggers(self, repo_id: str | None = None) -> list[TriggerRecord]:
        query = git_triggers.select().order_by(git_triggers.c.created_at, git_triggers.c.id)
        if repo_id is not None:
            query = query.where(git_triggers.c.repo_id == repo_id)
        return await self._read(lambda connection: [_trigger(row) for row in connection.execute(query).mappings()])

    async def update_trigger(self, trigger_id: str, changes: Mapping[str, Any]) -> TriggerRecord | None:
        values = {**changes, "updated_at": datetime.now(UTC)}
        update = git_triggers.update().where(git_triggers.c.id == trigger_id).values(values).returning(git_triggers)

        def work(connection: sa.Connection) -> TriggerRecord | None:
            found = connection.execute(update).mappings().first()
            return None if found is None else _trigger(found)

        return await self._write(work)

    async def remove_trigger(self, trigger_id: str) -> bool:
        """With its deliveries."""
        delete = git_triggers.delete().where(git_triggers.c.id == trigger_id)
        return await self._write(lambda connection: connection.execute(delete).rowcount == 1)

    # ── refs seen ────────────────────────────────────────────────────────────────────────────────────────────────

    async def seen_refs(self, repo_id: str, refs: Sequence[str] | None = None) -> dict[str, str]:
        query = sa.select(git_seen_refs.c.ref, git_seen_refs.c.sha).where(git_seen_refs.c.repo_id == repo_id)
        if refs is not None and len(refs) <= 500:
            query = query.where(git_seen_refs.c.ref.in_(refs))
        return await self._read(lambda connection: {row.ref: row.sha for row in connection.execute(query)})

    async def see(
        self, repo_id: str, moved: Mapping[str, str], gone: Sequence[str], new: Sequence[DeliveryRecord]
    ) -> None:
        """Refs that moved or are gone, and the deliveries that tell of it."""

        def work(connection: sa.Connection) -> None:
            for ref in (*moved, *gone):
                here = sa.and_(git_seen_refs.c.repo_id == repo_id, git_seen_refs.c.ref == ref)
                connection.execute(git_seen_refs.delete().where(here))
            _see(connection, repo_id, moved)
            known = set(connection.execute(sa.select(git_triggers.c.id)).scalars())
            rows = [_row(record) for record in new if record.trigger_id in known]  # one may be deleted by now
            if rows:
                connection.execute(git_deliveries.insert(), rows)

        await self._write(work)

    # ── deliveries ───────────────────────────────────────────────────────────────────────────────────────────────

    async def delivery(self, delivery_id: str) -> DeliveryRecord | None:
        query = git_deliveries.select().where(git_deliveries.c.id == delivery_id)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else _delivery(found)

    async def list_deliveries(
        self, trigger_id: str, *, status: DeliveryStatus | None, before: Place | None, limit: int
    ) -> list[DeliveryRecord]:
        """Newest first."""
        table = git_deliveries.c
        query = git_deliveries.select().where(table.trigger_id == trigger_id)
        if status is not None:
            query = query.where(table.status == status)
        if before is not None:
            query = query.where(sa.tuple_(table.created_at, table.id) < sa.tuple_(before.created_at, before.id))
        query = query.order_by(table.created_at.desc(), table.id.desc()).limit(limit)
        return await self._read(lambda connection: [_delivery(row) for row in connection.execute(query).mappings()])

    async def due_deliveries(self, now: datetime, *, limit: int) -> tuple[list[DeliveryRecord], datetime | None]:
        """The oldest due one of each trigger, so that a slow one keeps no other waiting; and when the next will be."""
        table = git_deliveries.c
        pending = table.status == "pending"
        due = (
            sa.select(
                table.id, sa.func.row_number().over(partition_by=table.trigger_id, order_by=table.next_at).label("n")
            )
            .where(pending, table.next_at <= now)
            .subquery()
        )
        query = git_deliveries.select().join(due, due.c.id == table.id).where(due.c.n == 1).limit(limit)
        later = sa.select(sa.func.min(table.next_at)).where(pending, table.next_at > now)

        def work(connection: sa.Connection) -> tuple[list[DeliveryRecord], datetime | None]:
            found = [_delivery(row) for row in connection.execute(query).mappings()]
            return found, connection.execute(later).scalar()

        return await self._read(work)

    async def note_delivery(self, delivery_id: str, changes: Mapping[str, Any]) -> DeliveryRecord | None:
        update = git_deliveries.update().where(git_deliveries.c.id == delivery_id)
        returning = update.values(dict(changes)).returning(git_deliveries)

        def work(connection: sa.Connection) -> DeliveryRecord | None:
            found = connection.execute(returning).mappings().first()
            return None if found is None else _delivery(found)

        return await self._write(work)

    async def drop_deliveries(self, finished_before: datetime) -> int:
        delete = git_deliveries.delete().where(git_deliveries.c.finished_at < finished_before)
        return await self._write(lambda connection: connection.execute(delete).rowcount)


def _see(connection: sa.Connection, repo_id: str, refs: Mapping[str, str]) -> None:
    rows = [{"repo_id": repo_id, "ref": ref, "sha": sha} for ref, sha in refs.items()]
    if rows:
        connection.execute(git_seen_refs.insert(), rows)


def _row(record: DeliveryRecord) -> dict[str, Any]:
    return dict(vars(record))


def _trigger(row: sa.RowMapping) -> TriggerRecord:
    return TriggerRecord(**cast(dict[str, Any], dict(row)))


def _delivery(row: sa.RowMapping) -> DeliveryRecord:
    return DeliveryRecord(**cast(dict[str, Any], dict(row)))
