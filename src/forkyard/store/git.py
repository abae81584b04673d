"""Queries of repositories and of LFS locks.

A repository's row is written before its directory and marked ready after it, and unmarked before the directory is
removed: what is not ready when the daemon starts is half of something and is cleared away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

import sqlalchemy as sa

from forkyard.errors import Conflict
from forkyard.models.git import Visibility
from forkyard.store.database import Database, record_event
from forkyard.store.records import Place
from forkyard.store.tables import lfs_locks, repo_grants, repos


@dataclass(frozen=True)
class RepoRecord:
    id: str
    name: str
    description: str | None
    visibility: Visibility
    ready: bool
    quota_bytes: int
    size_bytes: int
    created_at: datetime
    updated_at: datetime
    pushed_at: datetime | None


@dataclass(frozen=True)
class LockRecord:
    id: str
    repo_id: str
    path: str
    owner_id: str
    owner_name: str
    locked_at: datetime


class GitQueries(Database):
    async def add_repo(
        self, repo_id: str, name: str, *, description: str | None, visibility: Visibility, quota_bytes: int
    ) -> RepoRecord:
        """Not ready yet. `Conflict` if the name is taken."""
        now = datetime.now(UTC)
        row: dict[str, Any] = {
            "id": repo_id,
            "name": name,
            "description": description,
            "visibility": visibility,
            "ready": False,
            "quota_bytes": quota_bytes,
            "size_bytes": 0,
            "created_at": now,
            "updated_at": now,
            "pushed_at": None,
        }

        def work(connection: sa.Connection) -> RepoRecord:
            _refuse_taken(connection, name)
            connection.execute(repos.insert(), row)
            return _repo(row)

        return await self._write(work)

    async def mark_repo(self, repo_id: str, *, ready: bool, size_bytes: int | None = None) -> bool:
        """Made, or about to be removed. Each is an event."""
        values: dict[str, Any] = {"ready": ready}
        if size_bytes is not None:
            values["size_bytes"] = size_bytes

        def work(connection: sa.Connection) -> bool:
            update = repos.update().where(repos.c.id == repo_id, repos.c.ready.is_(not ready)).values(values)
            if connection.execute(update).rowcount != 1:
                return False
            kind = "repo.created" if ready else "repo.deleted"
            record_event(connection, datetime.now(UTC), None, kind, data={"repo_id": repo_id})
            return True

        return await self._write(work)

    async def remove_repo(self, repo_id: str) -> None:
        await self._write(lambda connection: connection.execute(repos.delete().where(repos.c.id == repo_id)).rowcount)

    async def update_repo(self, repo_id: str, changes: Mapping[str, Any]) -> RepoRecord | None:
        """`Conflict` if the new name is taken."""

        def work(connection: sa.Connection) -> RepoRecord | None:
            if "name" in changes:
                _refuse_taken(connection, changes["name"], besides=repo_id)
            here = sa.and_(repos.c.id == repo_id, repos.c.ready)
            values = {**changes, "updated_at": datetime.now(UTC)}
            if connection.execute(repos.update().where(here).values(values)).rowcount != 1:
                return None
            return _repo(connection.execute(repos.select().where(here)).mappings().one())

        return await self._write(work)

    async def note_repo(self, repo_id: str, *, size_bytes: int, pushed_at: datetime | None = None) -> None:
        """No change of what it is: how big it has become, when it was last written to."""
        values: dict[str, Any] = {"size_bytes": size_bytes}
        if pushed_at is not None:
            values["pushed_at"] = pushed_at
        update = repos.update().where(repos.c.id == repo_id).values(values)
        await self._write(lambda connection: connection.execute(update).rowcount)

    async def repo(self, id_or_name: str) -> RepoRecord | None:
        """Only one that is ready. An id is never another's name."""
        query = repos.select().where(sa.or_(repos.c.id == id_or_name, repos.c.name == id_or_name), repos.c.ready)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else _repo(found)

    async def list_repos(
        self,
        *,
        search: str | None = None,
        identity_id: str | None = None,
        ready: bool = True,
        before: Place | None = None,
        limit: int | None = None,
    ) -> list[RepoRecord]:
        """Newest first; with `identity_id`, those it may read."""
        table = repos.c
        query = (
            repos.select().where(table.ready.is_(ready)).order_by(table.created_at.desc(), table.id.desc()).limit(limit)
        )
        if search:
            query = query.where(table.name.icontains(search, autoescape=True))
        if identity_id is not None:
            granted = sa.select(repo_grants.c.repo_id).where(repo_grants.c.identity_id == identity_id)
            query = query.where(sa.or_(table.id.in_(granted), table.visibility == "public"))
        if before is not None:
            later = sa.and_(table.created_at == before.created_at, table.id < before.id)
            query = query.where(sa.or_(table.created_at < before.created_at, later))
        return await self._read(lambda connection: [_repo(row) for row in connection.execute(query).mappings()])

    # ── locks ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_lock(self, lock: LockRecord) -> tuple[LockRecord, bool]:
        """The lock of this path, and whether it is the new one."""

        def work(connection: sa.Connection) -> tuple[LockRecord, bool]:
            here = sa.and_(lfs_locks.c.repo_id == lock.repo_id, lfs_locks.c.path == lock.path)
            there = connection.execute(lfs_locks.select().where(here)).mappings().first()
            if there is not None:
                return _lock(there), False
            connection.execute(lfs_locks.insert(), vars(lock))
            return lock, True

        return await self._write(work)

    async def list_locks(
        self, repo_id: str, *, path: str | None = None, lock_id: str | None = None, after: str = "", limit: int
    ) -> Sequence[LockRecord]:
        """By path, from the one after `after` on."""
        table = lfs_locks.c
        query = lfs_locks.select().where(table.repo_id == repo_id, table.path > after).order_by(table.path).limit(limit)
        if path is not None:
            query = query.where(table.path == path)
        if lock_id is not None:
            query = query.where(table.id == lock_id)
        return await self._read(lambda connection: [_lock(row) for row in connection.execute(query).mappings()])

    async def remove_lock(self, lock_id: str) -> bool:
        delete = lfs_locks.delete().where(lfs_locks.c.id == lock_id)
        return await self._write(lambda connection: connection.execute(delete).rowcount == 1)


def _refuse_taken(connection: sa.Connection, name: str, besides: str = "") -> None:
    query = sa.select(repos.c.id).where(repos.c.name == name, repos.c.id != besides)
    if connection.execute(query).first() is not None:
        raise Conflict(f"a repository is already called {name!r}; choose another name, or delete that one")


def _repo(row: Mapping[str, Any] | sa.RowMapping) -> RepoRecord:
    return RepoRecord(**cast(dict[str, Any], dict(row)))


def _lock(row: sa.RowMapping) -> LockRecord:
    return LockRecord(**cast(dict[str, Any], dict(row)))
