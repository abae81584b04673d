"""Queries of builds and of the layers they leave."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from forkyard.store.database import Database, record_event
from forkyard.store.records import Place
from forkyard.store.tables import builds, layers, snapshots


@dataclass(frozen=True)
class LayerRecord:
    key: str
    snapshot_id: str
    parent_key: str | None
    inputs: list[dict[str, str]]
    size_bytes: int
    used_at: datetime


@dataclass(frozen=True)
class BuildRecord:
    id: str
    state: str
    key_id: str
    request: dict[str, Any]
    layers: list[dict[str, Any]]
    snapshot_id: str | None
    failure: dict[str, Any] | None
    created_at: datetime
    finished_at: datetime | None


class BuildQueries(Database):
    # ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def layer(self, key: str, *, use: bool = False) -> LayerRecord | None:
        """None also if its snapshot is gone. `use`: it was needed now."""
        query = (
            layers.select()
            .join(snapshots, snapshots.c.id == layers.c.snapshot_id)
            .where(layers.c.key == key, snapshots.c.ready)
        )
        touch = layers.update().where(layers.c.key == key).values(used_at=datetime.now(UTC))

        def work(connection: sa.Connection) -> LayerRecord | None:
            row = connection.execute(query).mappings().first()
            if row is not None and use:
                connection.execute(touch)
            return None if row is None else _layer(row)

        return await (self._write(work, durable=False) if use else self._read(work))

    async def put_layer(
        self, key: str, snapshot_id: str, parent_key: str | None, inputs: list[dict[str, str]], size_bytes: int
    ) -> str | None:
        """The snapshot that had this place before, if any."""
        now = datetime.now(UTC)
        row = {
            "key": key,
            "snapshot_id": snapshot_id,
            "parent_key": parent_key,
            "inputs": inputs,
            "size_bytes": size_bytes,
            "created_at": now,
            "used_at": now,
        }

        def work(connection: sa.Connection) -> str | None:
            before = connection.execute(sa.select(layers.c.snapshot_id).where(layers.c.key == key)).scalar()
            connection.execute(layers.delete().where(layers.c.key == key))
            connection.execute(layers.insert(), row)
            return before

        return await self._write(work)

    async def list_layers(self) -> list[LayerRecord]:
        """Least lately used first."""
        query = layers.select().order_by(layers.c.used_at, layers.c.key)
        return await self._read(lambda connection: [_layer(row) for row in connection.execute(query).mappings()])

    async def forget_layer(self, key: str, snapshot_id: str) -> bool:
        """False if it is another one by now."""
        delete = layers.delete().where(layers.c.key == key, layers.c.snapshot_id == snapshot_id)
        return await self._write(lambda connection: connection.execute(delete).rowcount == 1)

    # ── builds ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_build(
        self, build_id: str, key_id: str, request: dict[str, Any], plan: list[dict[str, Any]]
    ) -> BuildRecord:
        now = datetime.now(UTC)
        row = {
            "id": build_id,
            "state": "running",
            "key_id": key_id,
            "request": request,
            "layers": plan,
            "created_at": now,
        }

        def work(connection: sa.Connection) -> BuildRecord:
            connection.execute(builds.insert(), row)
            record_event(connection, now, None, "build.started", data={"build_id": build_id})
            return _build(connection.execute(builds.select().where(builds.c.id == build_id)).mappings().one())

        return await self._write(work)

    async def build(self, build_id: str) -> BuildRecord | None:
        query = builds.select().where(builds.c.id == build_id)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else _build(found)

    async def list_builds(
        self, *, states: Collection[str] | None = None, before: Place | None = None, limit: int | None = None
    ) -> list[BuildRecord]:
        """Newest first."""
        table = builds.c
        query = builds.select().order_by(table.created_at.desc(), table.id.desc()).limit(limit)
        if states is not None:
            query = query.where(table.state.in_(list(states)))
        if before is not None:
            query = query.where(sa.tuple_(table.created_at, table.id) < sa.tuple_(before.created_at, before.id))
        return await self._read(lambda connection: [_build(row) for row in connection.execute(query).mappings()])

    async def change_build(self, build_id: str, **values: Any) -> None:
        """What a build has done so far."""
        update = builds.update().where(builds.c.id == build_id).values(**values)
        await self._write(lambda connection: connection.execute(update).rowcount)

    async def end_build(
        self, build_id: str, state: str, *, snapshot_id: str | None = None, failure: dict[str, Any] | None = None
    ) -> None:
        now = datetime.now(UTC)
        update = (
            builds.update()
            .where(builds.c.id == build_id, builds.c.state == "running")
            .values(state=state, snapshot_id=snapshot_id, failure=failure, finished_at=now)
        )

        def work(connection: sa.Connection) -> None:
            if connection.execute(update).rowcount == 1:
                data = {"build_id": build_id, "snapshot_id": snapshot_id}
                record_event(connection, now, None, f"build.{state}", data=data)

        await self._write(work)

    async def forget_build(self, build_id: str) -> bool:
        delete = builds.delete().where(builds.c.id == build_id)
        return await self._write(lambda connection: connection.execute(delete).rowcount == 1)


def _layer(row: sa.RowMapping) -> LayerRecord:
    return LayerRecord(
        row["key"], row["snapshot_id"], row["parent_key"], row["inputs"], row["size_bytes"], row["used_at"]
    )


def _build(row: sa.RowMapping) -> BuildRecord:
    return BuildRecord(
        id=row["id"],
        state=row["state"],
        key_id=row["key_id"],
        request=row["request"],
        layers=row["layers"],
        snapshot_id=row["snapshot_id"],
        failure=row["failure"],
        created_at=row["created_at"],
        finished_at=row["finished_at"],
    )
