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


class SecretQueries(Database):
    async def put_secret(self, name: str, sealed: str) -> SecretRecord:
        now = datetime.now(UTC)

        def work(connection: sa.Connection) -> SecretRecord:
            mine = secrets.c.name == name
            created_at = connection.execute(sa.select(secrets.c.created_at).where(mine)).scalar()
            if created_at is None:
                connection.execute(
                    secrets.insert(), {"name": name, "sealed": sealed, "created_at": now, "updated_at": now}
                )
            else:
                connection.execute(secrets.update().where(mine).values(sealed=sealed, updated_at=now))
            record_event(connection, now, None, "secret.set", data={"name": name})
            return SecretRecord(name, sealed, created_at or now, now)

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
