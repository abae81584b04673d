"""Queries of reviews. A key is given to one review, whoever asks for it at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from forkyard.models.reviews import ReviewState
from forkyard.store.database import Database
from forkyard.store.records import Place
from forkyard.store.tables import reviews


@dataclass(frozen=True)
class ReviewRecord:
    id: str
    key: str
    state: ReviewState
    repo_id: str | None
    request: Mapping[str, Any]
    target: Mapping[str, Any]
    asked_by: Mapping[str, Any]
    created_at: datetime
    dossier: Mapping[str, Any] | None = None
    verdict: Mapping[str, Any] | None = None
    posted: Mapping[str, Any] | None = None
    error: str | None = None
    ended_at: datetime | None = None


class ReviewQueries(Database):
    async def claim_review(self, new: ReviewRecord) -> tuple[ReviewRecord, bool]:
        """The review of this key, and whether it is the caller's to run: it is new, or had failed."""

        def work(connection: sa.Connection) -> tuple[ReviewRecord, bool]:
            row = connection.execute(reviews.select().where(reviews.c.key == new.key)).mappings().first()
            if row is None:
                connection.execute(reviews.insert(), vars(new))
                return new, True
            if row["state"] != "failed":
                return _review(row), False
            again = {**vars(new), "id": row["id"], "created_at": row["created_at"]}
            connection.execute(reviews.update().where(reviews.c.id == row["id"]).values(again))
            return ReviewRecord(**again), True

        return await self._write(work)

    async def review(self, review_id: str) -> ReviewRecord | None:
        query = reviews.select().where(reviews.c.id == review_id)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else _review(found)

    async def move_review(self, review_id: str, state: ReviewState, to: ReviewState, **changes: Any) -> bool:
        """False if it is not in `state`."""
        values = {**changes, "state": to}
        if to in ("done", "failed"):
            values["ended_at"] = datetime.now(UTC)
        update = reviews.update().where(reviews.c.id == review_id, reviews.c.state == state).values(values)
        return await self._write(lambda connection: connection.execute(update).rowcount == 1)

    async def fail_reviews(self, error: str) -> None:
        """Those a daemon was at when it ended."""
        update = (
            reviews.update()
            .where(reviews.c.state.in_(["running", "posting"]))
            .values(state="failed", error=error, ended_at=datetime.now(UTC))
        )
        await self._write(lambda connection: connection.execute(update).rowcount)

    async def list_reviews(
        self, *, repo_id: str | None = None, before: Place | None = None, limit: int = 100
    ) -> list[ReviewRecord]:
        """Newest first."""
        query = reviews.select().order_by(reviews.c.created_at.desc(), reviews.c.id.desc()).limit(limit)
        if repo_id is not None:
            query = query.where(reviews.c.repo_id == repo_id)
        if before is not None:
            place = sa.tuple_(reviews.c.created_at, reviews.c.id)
            query = query.where(place < sa.tuple_(sa.literal(before.created_at, reviews.c.created_at.type), before.id))
        return await self._read(lambda connection: [_review(row) for row in connection.execute(query).mappings()])


def _review(row: sa.RowMapping) -> ReviewRecord:
    return ReviewRecord(**row)
