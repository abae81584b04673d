"""Queries of the snapshots table.

A row is written before the snapshot and marked ready after it, and unmarked before the snapshot is removed: whatever is
not ready when the daemon starts is half of something and is cleared away.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

import sqlalchemy as sa

from forkyard.errors import Conflict
from forkyard.models import Shape
from forkyard.store.database import Database, record_event
from forkyard.store.records import Place, SnapshotRecord
from forkyard.store.tables import events, snapshots


class SnapshotQueries(Database):
    async def add_snapshot(
        self,
        snapshot_id: str,
        sandbox_id: str,
        shape: Shape,
        *,
        name: str | None = None,
        automatic: bool = False,
        trusts_ca: bool | None = None,
        annotations: Mapping[str, str] | None = None,
    ) -> None:
        """Not ready yet. `Conflict` if the name is taken."""
        row = {
            "id": snapshot_id,
            "name": name,
            "sandbox_id": sandbox_id,
            "automatic": automatic,
            "ready": False,
            **shape.model_dump(),
            "size_bytes": 0,
            "paused_ms": 0.0,
            "created_at": datetime.now(UTC),
            "trusts_ca": trusts_ca,
            "annotations": dict(annotations or {}),
        }

        def work(connection: sa.Connection) -> None:
            _name_is_free(connection, name, snapshot_id)
            connection.execute(snapshots.insert(), row)

        await self._write(work)

    async def rename_snapshot(self, snapshot_id: str, name: str, *, take: bool = False) -> SnapshotRecord | None:
        """`Conflict` if the name is taken; or, to `take` it, whoever has it has none then. None if there is no such
        snapshot."""
        here = sa.and_(snapshots.c.id == snapshot_id, snapshots.c.ready)

        def work(connection: sa.Connection) -> SnapshotRecord | None:
            if take:
                connection.execute(snapshots.update().where(snapshots.c.name == name).values(name=None))
            _name_is_free(connection, name, snapshot_id)
            connection.execute(snapshots.update().where(here).values(name=name))
            row = connection.execute(snapshots.select().where(here)).mappings().first()
            return None if row is None else _snapshot(row)

        return await self._write(work)

    async def finish_snapshot(self, snapshot_id: str, *, size_bytes: int, paused_ms: float) -> SnapshotRecord | None:
        """It is ready. None if it was removed meanwhile."""
        now = datetime.now(UTC)
        values = {"ready": True, "size_bytes": size_bytes, "paused_ms": paused_ms, "created_at": now}
        update = snapshots.update().where(snapshots.c.id == snapshot_id).values(values)

        def work(connection: sa.Connection) -> SnapshotRecord | None:
            connection.execute(update)
            row = connection.execute(snapshots.select().where(snapshots.c.id == snapshot_id)).mappings().first()
            if row is None:
                return None
            data = {"snapshot_id": snapshot_id, "name": row["name"], "automatic": row["automatic"], **values}
            del data["created_at"], data["ready"]
            record_event(connection, now, row["sandbox_id"], "snapshot.created", data=data)
            return _snapshot(row)

        return await self._write(work)

    async def retire_snapshot(self, snapshot_id: str) -> bool:
        """From now on nobody finds it, and its name is free. False if somebody else retired it before."""
        update = (
            snapshots.update()
            .where(snapshots.c.id == snapshot_id, snapshots.c.ready)
            .values(ready=False, name=None)
            .returning(snapshots.c.sandbox_id)
        )

        def work(connection: sa.Connection) -> bool:
            sandbox_id = connection.execute(update).scalar()
            if sandbox_id is None:
                return False
            record_event(
                connection, datetime.now(UTC), sandbox_id, "snapshot.deleted", data={"snapshot_id": snapshot_id}
            )
            return True

        return await self._write(work)

    async def forget_snapshot(self, snapshot_id: str) -> None:
        delete = snapshots.delete().where(snapshots.c.id == snapshot_id)
        await self._write(lambda connection: connection.execute(delete).rowcount)

    async def snapshot_was_deleted(self, snapshot_id: str) -> bool:
        """As far as events tell."""
        query = sa.select(events.c.id).where(
            events.c.kind == "snapshot.deleted", events.c.data["snapshot_id"].as_string() == snapshot_id
        )
        return await self._read(lambda connection: connection.execute(query.limit(1)).first()) is not None

    async def snapshot(self, id_or_name: str) -> SnapshotRecord | None:
        table = snapshots.c
        query = snapshots.select().where(table.ready, sa.or_(table.id == id_or_name, table.name == id_or_name))
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else _snapshot(found)

    async def list_snapshots(
        self,
        *,
        sandbox_id: str | None = None,
        automatic: bool | None = None,
        ready: bool = True,
        before: Place | None = None,
        limit: int | None = None,
    ) -> list[SnapshotRecord]:
        """Newest first."""
        table = snapshots.c
        query = snapshots.select().where(table.ready == ready).order_by(table.created_at.desc(), table.id.desc())
        if sandbox_id is not None:
            query = query.where(table.sandbox_id == sandbox_id)
        if automatic is not None:
            query = query.where(table.automatic == automatic)
        if before is not None:
            query = query.where(
                sa.or_(
                    table.created_at < before.created_at,
                    sa.and_(table.created_at == before.created_at, table.id < before.id),
                )
            )
        query = query.limit(limit)
        return await self._read(lambda connection: [_snapshot(row) for row in connection.execute(query).mappings()])

    async def snapshot_bytes(self) -> int:
        query = sa.select(sa.func.coalesce(sa.func.sum(snapshots.c.size_bytes), 0))
        return await self._read(lambda connection: int(connection.execute(query).scalar_one()))


def _name_is_free(connection: sa.Connection, name: str | None, snapshot_id: str) -> None:
    if name is None:
        return
    query = sa.select(snapshots.c.id).where(snapshots.c.name == name, snapshots.c.id != snapshot_id)
    taken = connection.execute(query).scalar()
    if taken is not None:
        raise Conflict(
            f"there is a snapshot named {name!r} already ({taken}); choose another name, or delete it",
            snapshot_id=taken,
        )


def _snapshot(row: sa.RowMapping) -> SnapshotRecord:
    return SnapshotRecord(
        id=row["id"],
        name=row["name"],
        sandbox_id=row["sandbox_id"],
        automatic=row["automatic"],
        shape=Shape(vcpus=row["vcpus"], memory_mib=row["memory_mib"], disk_gib=row["disk_gib"]),
        size_bytes=row["size_bytes"],
        paused_ms=row["paused_ms"],
        created_at=row["created_at"],
        trusts_ca=row["trusts_ca"],
        annotations=row["annotations"] or {},
    )
