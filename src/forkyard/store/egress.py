"""Queries of the egress log: what left each sandbox, and what was kept from leaving.

Of each sandbox the newest `KEPT` records stay, also after its end; its totals are columns of the sandbox and are never
lost. Followers read the table, as with events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import sqlalchemy as sa

from forkyard.models.network import EgressRecord
from forkyard.net.base import Traffic
from forkyard.store.database import Database
from forkyard.store.tables import egress, sandboxes

KEPT = 10_000
#: Old records are removed when so many new ones have come: a delete per batch would cost more than it frees.
PRUNE_EVERY = 500


class EgressQueries(Database):
    def __init__(self, writer: sa.Engine, reader: sa.Engine, wal: Path) -> None:
        super().__init__(writer, reader, wal)
        self._added: Counter[str] = Counter()  # since old records of that sandbox were last looked for

    async def add_egress(self, records: Sequence[EgressRecord], *, kept: int = KEPT) -> None:
        rows = [record.model_dump(exclude={"id"}) for record in records]
        full = self._full(records)

        def work(connection: sa.Connection) -> None:
            connection.execute(egress.insert(), rows)
            for sandbox_id in full:
                mine = egress.c.sandbox_id == sandbox_id
                newest = sa.select(egress.c.id).where(mine).order_by(egress.c.id.desc())
                last = connection.execute(newest.offset(kept).limit(1)).scalar()
                if last is not None:
                    connection.execute(egress.delete().where(mine, egress.c.id <= last))

        await self._write(work)

    def _full(self, records: Sequence[EgressRecord]) -> list[str]:
        """Sandboxes of which enough has come to look for old records."""
        self._added.update(record.sandbox_id for record in records)
        full = [sandbox_id for sandbox_id, count in self._added.items() if count >= PRUNE_EVERY]
        for sandbox_id in full:
            del self._added[sandbox_id]
        return full

    async def list_egress(
        self,
        sandbox_id: str,
        *,
        exec_id: str | None = None,
        kind: str | None = None,
        verdict: str | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> list[EgressRecord]:
        """Oldest first."""
        table = egress.c
        query = egress.select().where(table.sandbox_id == sandbox_id, table.id > after).order_by(table.id).limit(limit)
        for column, wanted in ((table.exec_id, exec_id), (table.kind, kind), (table.verdict, verdict)):
            if wanted is not None:
                query = query.where(column == wanted)
        return await self._read(
            lambda connection: [EgressRecord.model_validate(dict(row)) for row in connection.execute(query).mappings()]
        )

    async def last_egress_id(self, sandbox_id: str) -> int:
        query = sa.select(sa.func.max(egress.c.id)).where(egress.c.sandbox_id == sandbox_id)
        return await self._read(lambda connection: connection.execute(query).scalar()) or 0

    async def egress_before_newest(self, sandbox_id: str, count: int) -> int:
        """The id after which the `count` newest records follow."""
        newest = sa.select(egress.c.id).where(egress.c.sandbox_id == sandbox_id).order_by(egress.c.id.desc())
        query = newest.offset(count).limit(1)
        return await self._read(lambda connection: connection.execute(query).scalar()) or 0

    async def add_traffic(self, more: Mapping[str, Traffic]) -> None:
        """By sandbox, what has come since the last call."""
        table = sandboxes.c

        def work(connection: sa.Connection) -> None:
            for sandbox_id, traffic in more.items():
                values = {name: sa.func.coalesce(table[name], 0) + count for name, count in asdict(traffic).items()}
                connection.execute(sandboxes.update().where(table.id == sandbox_id).values(values))

        await self._write(work)

    async def note_trust(self, sandbox_id: str, trusts_ca: bool | None) -> None:
        """What its guest was told of our certificate authority; None: nobody knows."""
        update = sandboxes.update().where(sandboxes.c.id == sandbox_id).values(trusts_ca=trusts_ca)
        await self._write(lambda connection: connection.execute(update).rowcount)

    async def traffic_of_all(self) -> Traffic:
        sums = (sa.func.sum(sandboxes.c[each.name]) for each in fields(Traffic))
        query = sa.select(*(sa.func.coalesce(total, 0) for total in sums))
        return await self._read(lambda connection: Traffic(*map(int, connection.execute(query).one())))
