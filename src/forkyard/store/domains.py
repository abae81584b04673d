"""Queries of previews: their tokens, the links that were used, and domains of users."""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa

from forkyard.store.database import Database, record_event
from forkyard.store.records import DomainRecord
from forkyard.store.tables import domains, preview_links, preview_tokens


class PreviewQueries(Database):
    async def preview_token(self, sandbox_id: str, port: int) -> str | None:
        table = preview_tokens.c
        query = sa.select(table.token).where(table.sandbox_id == sandbox_id, table.port == port)
        return await self._read(lambda connection: connection.execute(query).scalar())

    async def put_preview_token(self, sandbox_id: str, port: int, token: str, *, replace: bool) -> str:
        """The token from now on: with `replace` this one, else the one there is."""
        table = preview_tokens.c
        here = sa.and_(table.sandbox_id == sandbox_id, table.port == port)
        now = datetime.now(UTC)

        def work(connection: sa.Connection) -> str:
            if replace:
                connection.execute(preview_tokens.delete().where(here))
            elif (found := connection.execute(sa.select(table.token).where(here)).scalar()) is not None:
                return str(found)
            connection.execute(
                preview_tokens.insert(), {"sandbox_id": sandbox_id, "port": port, "token": token, "created_at": now}
            )
            if replace:
                record_event(connection, now, sandbox_id, "preview.rotated", data={"port": port})
            return token

        return await self._write(work)

    async def use_preview_link(self, nonce: str, expires_at: datetime) -> bool:
        """False if it was used before."""
        table = preview_links.c

        def work(connection: sa.Connection) -> bool:
            connection.execute(preview_links.delete().where(table.expires_at <= datetime.now(UTC)))
            if connection.execute(sa.select(table.nonce).where(table.nonce == nonce)).scalar() is not None:
                return False
            connection.execute(preview_links.insert(), {"nonce": nonce, "expires_at": expires_at})
            return True

        return await self._write(work)

    # ── domains ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_domain(self, record: DomainRecord) -> bool:
        """False if it is there already."""

        def work(connection: sa.Connection) -> bool:
            if connection.execute(sa.select(domains.c.domain).where(domains.c.domain == record.domain)).first():
                return False
            row = {
                "domain": record.domain,
                "sandbox_id": record.sandbox_id,
                "port": record.port,
                "token": record.token,
                "verified_at": record.verified_at,
                "created_at": record.created_at,
            }
            connection.execute(domains.insert(), row)
            _event(connection, "domain.added", record)
            return True

        return await self._write(work)

    async def map_domain(self, domain: str, sandbox_id: str | None, port: int | None) -> DomainRecord | None:
        return await self._change(domain, "domain.mapped", sandbox_id=sandbox_id, port=port)

    async def verify_domain(self, domain: str) -> DomainRecord | None:
        return await self._change(domain, "domain.verified", verified_at=datetime.now(UTC))

    async def remove_domain(self, domain: str) -> bool:
        def work(connection: sa.Connection) -> bool:
            row = connection.execute(domains.select().where(domains.c.domain == domain)).mappings().first()
            if row is None:
                return False
            connection.execute(domains.delete().where(domains.c.domain == domain))
            _event(connection, "domain.removed", _domain(row))
            return True

        return await self._write(work)

    async def list_domains(self) -> list[DomainRecord]:
        query = domains.select().order_by(domains.c.domain)
        return await self._read(lambda connection: [_domain(row) for row in connection.execute(query).mappings()])

    async def _change(self, domain: str, kind: str, **values: object) -> DomainRecord | None:
        def work(connection: sa.Connection) -> DomainRecord | None:
            connection.execute(domains.update().where(domains.c.domain == domain).values(values))
            row = connection.execute(domains.select().where(domains.c.domain == domain)).mappings().first()
            if row is None:
                return None
            record = _domain(row)
            _event(connection, kind, record)
            return record

        return await self._write(work)


def _event(connection: sa.Connection, kind: str, record: DomainRecord) -> None:
    data = {"domain": record.domain, "port": record.port}
    record_event(connection, datetime.now(UTC), record.sandbox_id, kind, data=data)


def _domain(row: sa.RowMapping) -> DomainRecord:
    return DomainRecord(
        domain=row["domain"],
        sandbox_id=row["sandbox_id"],
        port=row["port"],
        token=row["token"],
        verified_at=row["verified_at"],
        created_at=row["created_at"],
    )
