"""Queries of runs, and of the schedules that begin them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from forkyard.store.database import Database
from forkyard.store.tables import runs, schedules


@dataclass(frozen=True)
class RunRecord:
    id: str
    schedule_id: str | None
    key_id: str
    state: str
    attempts: int
    max_attempts: int
    request: dict[str, Any]
    outcome: dict[str, Any] | None
    run_at: datetime
    next_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True)
class ScheduleRecord:
    id: str
    key_id: str
    name: str | None
    cron: str
    timezone: str
    retries: int
    request: dict[str, Any]
    active: bool
    next_at: datetime | None
    created_at: datetime
    updated_at: datetime


class RunQueries(Database):
    async def add_run(self, record: RunRecord) -> None:
        await self._write(lambda connection: connection.execute(runs.insert(), vars(record)).rowcount)

    async def run(self, run_id: str) -> RunRecord | None:
        query = runs.select().where(runs.c.id == run_id)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else RunRecord(**found)

    async def change_run(self, run_id: str, **values: Any) -> None:
        update = runs.update().where(runs.c.id == run_id).values(values)
        await self._write(lambda connection: connection.execute(update).rowcount)

    async def begin_run(self, record: RunRecord, now: datetime) -> bool:
        """False: it is not as `record` says any more. Somebody else has begun it, or it is gone."""
        here = sa.and_(runs.c.id == record.id, runs.c.state == record.state, runs.c.attempts == record.attempts)
        update = runs.update().where(here).values(state="running", started_at=now, next_at=None)
        return await self._write(lambda connection: connection.execute(update).rowcount == 1)

    async def list_runs(
        self,
        *,
        schedule_id: str | None = None,
        states: Collection[str] | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[RunRecord]:
        """Newest first."""
        query = runs.select().order_by(runs.c.run_at.desc(), runs.c.id).limit(limit).offset(offset)
        if schedule_id is not None:
            query = query.where(runs.c.schedule_id == schedule_id)
        if states is not None:
            query = query.where(runs.c.state.in_(states))
        return await self._read(lambda connection: [RunRecord(**row) for row in connection.execute(query).mappings()])

    async def count_runs(self, schedule_id: str | None = None) -> int:
        query = sa.select(sa.func.count()).select_from(runs)
        if schedule_id is not None:
            query = query.where(runs.c.schedule_id == schedule_id)
        return await self._read(lambda connection: int(connection.execute(query).scalar_one()))

    async def forget_runs(self, keep: int) -> None:
        """All but the newest that have ended."""
        ended = sa.select(runs.c.id).where(runs.c.state.in_(("succeeded", "failed")))
        old = ended.order_by(runs.c.run_at.desc()).offset(keep).limit(-1)
        delete = runs.delete().where(runs.c.id.in_(old))
        await self._write(lambda connection: connection.execute(delete).rowcount)

    # ── schedules ────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_schedule(self, record: ScheduleRecord) -> None:
        await self._write(lambda connection: connection.execute(schedules.insert(), vars(record)).rowcount)

    async def schedule(self, schedule_id: str) -> ScheduleRecord | None:
        query = schedules.select().where(schedules.c.id == schedule_id)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else ScheduleRecord(**found)

    async def list_schedules(self) -> list[ScheduleRecord]:
        query = schedules.select().order_by(schedules.c.created_at, schedules.c.id)
        return await self._read(
            lambda connection: [ScheduleRecord(**row) for row in connection.execute(query).mappings()]
        )

    async def change_schedule(self, schedule_id: str, **values: Any) -> None:
        changed = {**values, "updated_at": datetime.now(UTC)}
        update = schedules.update().where(schedules.c.id == schedule_id).values(changed)
        await self._write(lambda connection: connection.execute(update).rowcount)

    async def remove_schedule(self, schedule_id: str) -> bool:
        """With its runs."""

        def work(connection: sa.Connection) -> bool:
            connection.execute(runs.delete().where(runs.c.schedule_id == schedule_id))
            return connection.execute(schedules.delete().where(schedules.c.id == schedule_id)).rowcount == 1

        return await self._write(work)

    async def fire(self, schedule: ScheduleRecord, next_at: datetime, run: RunRecord) -> bool:
        """The run is on record and the schedule has moved on, both or neither. False: somebody else did so, or it was
        changed meanwhile."""
        table = schedules.c
        here = sa.and_(table.id == schedule.id, table.next_at == schedule.next_at, table.active)

        def work(connection: sa.Connection) -> bool:
            if connection.execute(schedules.update().where(here).values(next_at=next_at)).rowcount != 1:
                return False
            connection.execute(runs.insert(), vars(run))
            return True

        return await self._write(work)
