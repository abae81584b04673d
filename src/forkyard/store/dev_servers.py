"""Queries of dev servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import sqlalchemy as sa

from forkyard.errors import Conflict
from forkyard.store.database import Database
from forkyard.store.tables import dev_servers


@dataclass(frozen=True)
class DevServerRecord:
    id: str
    name: str
    key_id: str
    request: Mapping[str, Any]
    created_at: datetime
    updated_at: datetime
    state: Literal["starting", "running"] = "starting"
    repo_id: str | None = None
    repo_url: str = ""
    branch: str = ""
    sandbox_id: str | None = None
    trigger_id: str | None = None
    setup: Mapping[str, Any] = field(default_factory=dict)
    sha: str = ""
    error: str | None = None


class DevServerQueries(Database):
    async def add_dev_server(self, new: DevServerRecord) -> None:
        def work(connection: sa.Connection) -> None:
            taken = sa.select(dev_servers.c.id).where(dev_servers.c.name == new.name)
            if connection.execute(taken).first() is not None:
                raise Conflict(f"there is a dev server {new.name!r} already; choose another name", name=new.name)
            connection.execute(dev_servers.insert(), vars(new))

        await self._write(work)

    async def dev_server(self, id_or_name: str) -> DevServerRecord | None:
        named = sa.or_(dev_servers.c.id == id_or_name, dev_servers.c.name == id_or_name)
        query = dev_servers.select().where(named)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else DevServerRecord(**found)

    async def list_dev_servers(self) -> list[DevServerRecord]:
        """Newest first."""
        query = dev_servers.select().order_by(dev_servers.c.created_at.desc(), dev_servers.c.id)
        return await self._read(
            lambda connection: [DevServerRecord(**row) for row in connection.execute(query).mappings()]
        )

    async def change_dev_server(self, server_id: str, **changes: Any) -> DevServerRecord | None:
        """None: it is not there any more."""
        values = {**changes, "updated_at": datetime.now(UTC)}
        update = dev_servers.update().where(dev_servers.c.id == server_id).values(values).returning(dev_servers)

        def work(connection: sa.Connection) -> DevServerRecord | None:
            found = connection.execute(update).mappings().first()
            return None if found is None else DevServerRecord(**found)

        return await self._write(work)

    async def remove_dev_server(self, server_id: str) -> None:
        delete = dev_servers.delete().where(dev_servers.c.id == server_id)
        await self._write(lambda connection: connection.execute(delete).rowcount)
