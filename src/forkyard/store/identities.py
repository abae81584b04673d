"""Queries of identities, their tokens, what they are granted, and the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import sqlalchemy as sa

from forkyard.models.git import Permission
from forkyard.store.database import Database
from forkyard.store.tables import audit, identities, repo_grants, sandbox_grants, tokens


@dataclass(frozen=True)
class IdentityRecord:
    id: str
    name: str
    managed: str | None
    created_at: datetime


@dataclass(frozen=True)
class TokenRecord:
    id: str
    identity_id: str
    prefix: str
    name: str | None
    sandbox_id: str | None
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None


@dataclass(frozen=True)
class RepoGrantRecord:
    identity_id: str
    repo_id: str
    permission: Permission
    granted_at: datetime
    granted_by: str


@dataclass(frozen=True)
class SandboxGrantRecord:
    identity_id: str
    sandbox_id: str
    allowed_users: tuple[str, ...] | None
    granted_at: datetime
    granted_by: str


@dataclass(frozen=True)
class AuditRecord:
    at: datetime
    actor_kind: str
    actor_id: str | None
    actor_name: str
    action: str
    resource: str | None = None
    allowed: bool = True
    token_id: str | None = None
    sandbox_id: str | None = None
    address: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    id: int = 0


class IdentityQueries(Database):
    async def add_identity(self, identity_id: str, name: str, *, managed: str | None = None) -> IdentityRecord:
        """If there is one for `managed` already, that one."""
        record = IdentityRecord(identity_id, name, managed, datetime.now(UTC))

        def work(connection: sa.Connection) -> IdentityRecord:
            if managed is not None:
                query = identities.select().where(identities.c.managed == managed)
                there = connection.execute(query).mappings().first()
                if there is not None:
                    return _identity(there)
            connection.execute(identities.insert(), vars(record))
            return record

        return await self._write(work)

    async def identity(self, identity_id: str) -> IdentityRecord | None:
        query = identities.select().where(identities.c.id == identity_id)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else _identity(found)

    async def list_identities(self, *, managed: bool = False) -> list[IdentityRecord]:
        query = identities.select().order_by(identities.c.created_at, identities.c.id)
        if not managed:
            query = query.where(identities.c.managed.is_(None))
        return await self._read(lambda connection: [_identity(row) for row in connection.execute(query).mappings()])

    async def remove_identity(self, identity_id: str) -> bool:
        """With its tokens and grants."""
        delete = identities.delete().where(identities.c.id == identity_id)
        return await self._write(lambda connection: connection.execute(delete).rowcount == 1)

    async def remove_managed(self, prefix: str) -> None:
        """Those made for something that is gone."""
        delete = identities.delete().where(identities.c.managed.startswith(prefix, autoescape=True))
        await self._write(lambda connection: connection.execute(delete).rowcount)

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_token(self, record: TokenRecord, token_hash: str) -> None:
        row = {**vars(record), "hash": token_hash}
        await self._write(lambda connection: connection.execute(tokens.insert(), row).rowcount)

    async def token_by_hash(self, token_hash: str) -> tuple[TokenRecord, IdentityRecord] | None:
        query = sa.select(tokens).where(tokens.c.hash == token_hash)

        def work(connection: sa.Connection) -> tuple[TokenRecord, IdentityRecord] | None:
            token = connection.execute(query).mappings().first()
            if token is None:
                return None
            owner = connection.execute(identities.select().where(identities.c.id == token["identity_id"])).mappings()
            return _token(token), _identity(owner.one())

        return await self._read(work)

    async def list_tokens(self, identity_id: str) -> list[TokenRecord]:
        query = tokens.select().where(tokens.c.identity_id == identity_id).order_by(tokens.c.created_at, tokens.c.id)
        return await self._read(lambda connection: [_token(row) for row in connection.execute(query).mappings()])

    async def remove_token(self, identity_id: str, token_id: str) -> bool:
        delete = tokens.delete().where(tokens.c.identity_id == identity_id, tokens.c.id == token_id)
        return await self._write(lambda connection: connection.execute(delete).rowcount == 1)

    async def touch_token(self, token_id: str) -> None:
        update = tokens.update().where(tokens.c.id == token_id).values(last_used_at=datetime.now(UTC))
        await self._write(lambda connection: connection.execute(update).rowcount)

    # ── grants ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def grant_repo(self, grant: RepoGrantRecord) -> None:
        here = sa.and_(repo_grants.c.identity_id == grant.identity_id, repo_grants.c.repo_id == grant.repo_id)

        def work(connection: sa.Connection) -> None:
            connection.execute(repo_grants.delete().where(here))
            connection.execute(repo_grants.insert(), vars(grant))

        await self._write(work)

    async def repo_grant(self, identity_id: str, repo_id: str) -> RepoGrantRecord | None:
        here = sa.and_(repo_grants.c.identity_id == identity_id, repo_grants.c.repo_id == repo_id)
        query = repo_grants.select().where(here)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else RepoGrantRecord(**cast(dict[str, Any], dict(found)))

    async def list_repo_grants(self, identity_id: str) -> list[RepoGrantRecord]:
        query = repo_grants.select().where(repo_grants.c.identity_id == identity_id).order_by(repo_grants.c.repo_id)

        def work(connection: sa.Connection) -> list[RepoGrantRecord]:
            rows = connection.execute(query).mappings()
            return [RepoGrantRecord(**cast(dict[str, Any], dict(row))) for row in rows]

        return await self._read(work)

    async def revoke_repo(self, identity_id: str, repo_id: str) -> bool:
        here = sa.and_(repo_grants.c.identity_id == identity_id, repo_grants.c.repo_id == repo_id)
        return await self._write(lambda connection: connection.execute(repo_grants.delete().where(here)).rowcount == 1)

    async def grant_sandbox(self, grant: SandboxGrantRecord) -> None:
        table = sandbox_grants.c
        here = sa.and_(table.identity_id == grant.identity_id, table.sandbox_id == grant.sandbox_id)
        users = None if grant.allowed_users is None else list(grant.allowed_users)

        def work(connection: sa.Connection) -> None:
            connection.execute(sandbox_grants.delete().where(here))
            connection.execute(sandbox_grants.insert(), {**vars(grant), "allowed_users": users})

        await self._write(work)

    async def sandbox_grant(self, identity_id: str, sandbox_id: str) -> SandboxGrantRecord | None:
        table = sandbox_grants.c
        query = sandbox_grants.select().where(table.identity_id == identity_id, table.sandbox_id == sandbox_id)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else _sandbox_grant(found)

    async def list_sandbox_grants(self, identity_id: str) -> list[SandboxGrantRecord]:
        table = sandbox_grants.c
        query = sandbox_grants.select().where(table.identity_id == identity_id).order_by(table.sandbox_id)
        return await self._read(
            lambda connection: [_sandbox_grant(row) for row in connection.execute(query).mappings()]
        )

    async def revoke_sandbox(self, identity_id: str, sandbox_id: str) -> bool:
        table = sandbox_grants.c
        delete = sandbox_grants.delete().where(table.identity_id == identity_id, table.sandbox_id == sandbox_id)
        return await self._write(lambda connection: connection.execute(delete).rowcount == 1)

    # ── audit ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_audit(self, record: AuditRecord) -> None:
        row = {**vars(record), "data": dict(record.data)}
        del row["id"]
        await self._write(lambda connection: connection.execute(audit.insert(), row).rowcount)

    async def list_audit(
        self,
        *,
        actor_id: str | None = None,
        action: str | None = None,
        resource: str | None = None,
        before: int | None = None,
        limit: int | None = None,
    ) -> list[AuditRecord]:
        """Newest first."""
        query = audit.select().order_by(audit.c.id.desc()).limit(limit)
        for column, value in ((audit.c.actor_id, actor_id), (audit.c.action, action), (audit.c.resource, resource)):
            if value is not None:
                query = query.where(column == value)
        if before is not None:
            query = query.where(audit.c.id < before)

        def work(connection: sa.Connection) -> list[AuditRecord]:
            return [AuditRecord(**cast(dict[str, Any], dict(row))) for row in connection.execute(query).mappings()]

        return await self._read(work)


def _identity(row: sa.RowMapping) -> IdentityRecord:
    return IdentityRecord(**cast(dict[str, Any], dict(row)))


def _token(row: sa.RowMapping) -> TokenRecord:
    return TokenRecord(**{key: value for key, value in cast(dict[str, Any], dict(row)).items() if key != "hash"})


def _sandbox_grant(row: sa.RowMapping) -> SandboxGrantRecord:
    users = row["allowed_users"]
    return SandboxGrantRecord(
        **{**cast(dict[str, Any], dict(row)), "allowed_users": None if users is None else tuple(users)}
    )
