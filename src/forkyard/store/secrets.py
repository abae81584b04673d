"""Queries of stored secrets. What they see is encrypted; `control.secrets` has the key."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

import sqlalchemy as sa

from forkyard.store.database import Database, record_event
from forkyard.store.tables import secrets


@dataclass(frozen=True)
class SecretRecord:
    name: str
    sealed: str = field(repr=False)
    created_at: datetime
    updated_at: datetime
    version: int = 1
    metadata: dict[str, str] = field(default_factory=dict)


class SecretQueries(Database):
    async def put_secret(self, name: str, sealed: str, metadata: dict[str, str] | None = None) -> SecretRecord:
        """`metadata` None: what it has."""
        now = datetime.now(UTC)

        def work(connection: sa.Connection) -> SecretRecord:
            mine = secrets.c.name == name
            earlier = connection.execute(secrets.select().where(mine)).mappings().first()
            if earlier is None:
                row = {"name": name, "sealed": sealed, "created_at": now, "updated_at": now}
                connection.execute(secrets.insert(), {**row, "version": 1, "metadata": metadata or {}})
            else:
                kept = earlier["metadata"] if metadata is None else metadata
                values = {"sealed": sealed, "updated_at": now, "version": earlier["version"] + 1, "metadata": kept}
                connection.execute(secrets.update().where(mine).values(**values))
            record_event(connection, now, None, "secret.set", data={"name": name})
            return SecretRecord(**connection.execute(secrets.select().where(mine)).mappings().one())

        return await self._write(work)

    async def secret(self, name: str) -> SecretRecord | None:
        query = secrets.select().where(secrets.c.name == name)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else SecretRecord(**found)

    async def list_secrets(self) -> list[SecretRecord]:
        query = secrets.select().order_by(secrets.c.name)
        return await self._read(
            lambda connection: [SecretRecord(**row) for row in connection.execute(query).mappings()]
        )

    async def remove_secret(self, name: str) -> bool:
        def work(connection: sa.Connection) -> bool:
            if connection.execute(secrets.delete().where(secrets.c.name == name)).rowcount != 1:
                return False
            record_event(connection, datetime.now(UTC), None, "secret.deleted", data={"name": name})
            return True

        return await self._write(work)
