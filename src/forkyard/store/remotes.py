"""Queries of remotes and of how their refs stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, cast

import sqlalchemy as sa

from forkyard.errors import Conflict
from forkyard.models.git_triggers import Direction
from forkyard.store.database import Database
from forkyard.store.tables import git_remote_refs, git_remotes


@dataclass(frozen=True)
class RemoteRecord:
    id: str
    repo_id: str
    name: str
    url: str
    direction: Direction
    branches: Sequence[str]
    tags: bool
    username: str
    secret: str | None
    github_app: Mapping[str, Any] | None
    poll_s: float | None
    hook_secret: str  # sealed
    created_at: datetime
    synced_at: datetime | None = None
    error: str | None = None
    review: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RemoteRef:
    """Both sides as of the last sync. None: not there."""

    ref: str
    agreed_sha: str | None  # where both were at once, last
    local_sha: str | None
    remote_sha: str | None
    state: Literal["in_step", "ahead", "behind", "diverged"]
    detail: str | None = None


class RemoteQueries(Database):
    async def add_remote(self, record: RemoteRecord) -> None:
        """`Conflict` if the name is taken."""

        def work(connection: sa.Connection) -> None:
            taken = sa.select(git_remotes.c.id).where(
                git_remotes.c.repo_id == record.repo_id, git_remotes.c.name == record.name
            )
            if connection.execute(taken).first() is not None:
                raise Conflict(f"this repository has a remote {record.name!r} already; choose another name")
            connection.execute(git_remotes.insert(), vars(record))

        await self._write(work)

    async def remote(self, repo_id: str, name: str) -> RemoteRecord | None:
        query = git_remotes.select().where(git_remotes.c.repo_id == repo_id, git_remotes.c.name == name)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else _remote(found)

    async def list_remotes(self, repo_id: str | None = None) -> list[RemoteRecord]:
        query = git_remotes.select().order_by(git_remotes.c.created_at, git_remotes.c.id)
        if repo_id is not None:
            query = query.where(git_remotes.c.repo_id == repo_id)
        return await self._read(lambda connection: [_remote(row) for row in connection.execute(query).mappings()])

    async def update_remote(self, remote_id: str, changes: Mapping[str, Any], *, anew: bool) -> RemoteRecord | None:
        """`anew`: it is another place now, and nothing was agreed on with that. `Conflict` if the name is taken."""

        def work(connection: sa.Connection) -> RemoteRecord | None:
            row = connection.execute(git_remotes.select().where(git_remotes.c.id == remote_id)).mappings().first()
            if row is None:
                return None
            taken = sa.select(git_remotes.c.id).where(
                git_remotes.c.repo_id == row["repo_id"],
                git_remotes.c.name == changes.get("name"),
                git_remotes.c.id != remote_id,
            )
            if connection.execute(taken).first() is not None:
                raise Conflict(f"this repository has a remote {changes['name']!r} already; choose another name")
            if anew:
                connection.execute(git_remote_refs.delete().where(git_remote_refs.c.remote_id == remote_id))
            update = git_remotes.update().where(git_remotes.c.id == remote_id).values(dict(changes))
            return _remote(connection.execute(update.returning(git_remotes)).mappings().one())

        return await self._write(work)

    async def remove_remote(self, remote_id: str) -> bool:
        delete = git_remotes.delete().where(git_remotes.c.id == remote_id)
        return await self._write(lambda connection: connection.execute(delete).rowcount == 1)

    async def note_remote(self, remote_id: str, *, error: str | None, synced_at: datetime | None) -> None:
        values: dict[str, Any] = {"error": error}
        if synced_at is not None:
            values["synced_at"] = synced_at
        update = git_remotes.update().where(git_remotes.c.id == remote_id).values(values)
        await self._write(lambda connection: connection.execute(update).rowcount)

    async def remote_refs(self, remote_id: str) -> dict[str, RemoteRef]:
        query = git_remote_refs.select().where(git_remote_refs.c.remote_id == remote_id)

        def work(connection: sa.Connection) -> dict[str, RemoteRef]:
            return {row["ref"]: _ref(row) for row in connection.execute(query).mappings()}

        return await self._read(work)

    async def put_remote_refs(self, remote_id: str, changed: Sequence[RemoteRef], gone: Sequence[str]) -> None:
        def work(connection: sa.Connection) -> None:
            if connection.execute(sa.select(git_remotes.c.id).where(git_remotes.c.id == remote_id)).first() is None:
                return  # removed while it was synced
            for ref in (*(one.ref for one in changed), *gone):
                here = sa.and_(git_remote_refs.c.remote_id == remote_id, git_remote_refs.c.ref == ref)
                connection.execute(git_remote_refs.delete().where(here))
            if changed:
                connection.execute(git_remote_refs.insert(), [{**vars(one), "remote_id": remote_id} for one in changed])

        await self._write(work)

    async def remotes_out_of_step(self, repo_id: str) -> set[str]:
        query = (
            sa.select(git_remote_refs.c.remote_id)
            .join(git_remotes, git_remotes.c.id == git_remote_refs.c.remote_id)
            .where(git_remotes.c.repo_id == repo_id, git_remote_refs.c.state != "in_step")
            .distinct()
        )
        return await self._read(lambda connection: set(connection.execute(query).scalars()))


def _remote(row: sa.RowMapping) -> RemoteRecord:
    return RemoteRecord(**cast(dict[str, Any], dict(row)))


def _ref(row: sa.RowMapping) -> RemoteRef:
    return RemoteRef(**{name: value for name, value in row.items() if name != "remote_id"})
