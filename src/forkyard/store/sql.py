"""Every query of the daemon.

Owns: the truth about what should be. `transition` is the only writer of a sandbox's state: one conditional UPDATE, with
its event row in the same transaction. Never does: decisions, or anything on the host.

A transaction is one plain function that runs in a thread. (With an async driver every statement is several hops between
threads: measured, a create's first commit took 4.4 ms instead of 1.6.)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from forkyard.errors import HostFailure, IdempotencyConflict, StateConflict
from forkyard.lifecycle import ENDED, Cause, State, allowed
from forkyard.models import Shape
from forkyard.store import sqlite
from forkyard.store.migrate import migrate
from forkyard.store.records import EventRecord, IdempotencyClaim, KeyRecord, NewSandbox, Place, SandboxRecord
from forkyard.store.tables import events, idempotency, keys, sandboxes

IDEMPOTENCY_LIFETIME = timedelta(hours=24)
READERS = 2

T = TypeVar("T")


class Store:
    """Open with `Store.open`. One thread writes (SQLite has one writer anyway), a few read."""

    def __init__(self, writer: sa.Engine, reader: sa.Engine) -> None:
        self._writer = writer
        self._reader = reader
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._reading = ThreadPoolExecutor(READERS, thread_name_prefix="store-read")
        self._news = asyncio.Event()

    @classmethod
    async def open(cls, database: Path) -> Store:
        await asyncio.to_thread(_prepare, database)
        url = sa.URL.create("sqlite", database=str(database))
        writer = sa.create_engine(url, pool_size=1, max_overflow=0)
        reader = sa.create_engine(url, pool_size=READERS, max_overflow=0)
        sqlite.configure(writer, "BEGIN IMMEDIATE")
        sqlite.configure(reader, "BEGIN")
        return cls(writer, reader)

    async def close(self) -> None:
        """Waits for transactions under way."""
        for executor, engine in ((self._writing, self._writer), (self._reading, self._reader)):
            await asyncio.to_thread(executor.shutdown)
            engine.dispose()

    # ── sandboxes ────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_sandbox(self, new: NewSandbox, claim: IdempotencyClaim | None = None) -> SandboxRecord:
        """A new sandbox in CREATING. If `claim` was made before, the sandbox it made then is returned instead; the same
        key with another request is an `IdempotencyConflict`."""
        now = _now()
        row: dict[str, Any] = {
            "id": new.id,
            "name": new.name,
            "state": State.CREATING,
            "cause": Cause.REQUESTED,
            "cause_detail": None,
            "incarnation": 1,
            **new.shape.model_dump(),
            "labels": dict(new.labels),
            "env": dict(new.env),
            "template": None,
            "created_at": now,
            "updated_at": now,
            "ended_at": None,
        }

        def work(connection: sa.Connection) -> SandboxRecord:
            if claim is not None and (earlier := _claimed(connection, claim, now)) is not None:
                return earlier
            connection.execute(sandboxes.insert(), row)
            if claim is not None:
                values = {
                    "api_key_id": claim.api_key_id,
                    "key": claim.key,
                    "request_hash": claim.request_hash,
                    "sandbox_id": new.id,
                    "expires_at": now + IDEMPOTENCY_LIFETIME,
                }
                connection.execute(idempotency.insert(), values)
            _add_event(connection, now, new.id, f"sandbox.{State.CREATING}", Cause.REQUESTED)
            return _sandbox(row)

        return await self._write(work)

    async def transition(
        self,
        sandbox_id: str,
        incarnation: int,
        from_: State,
        to: State,
        cause: Cause,
        detail: str | None = None,
        *,
        template: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> bool:
        """Move a sandbox from one state to another. False if it was not in `from_`, or not in this incarnation:
        somebody else was first. A change that the table of `lifecycle` does not know is a `StateConflict`."""
        if not allowed(from_, to):
            raise StateConflict(f"a sandbox cannot go from {from_} to {to}", sandbox_id=sandbox_id)
        now = _now()
        changes: dict[str, Any] = {"state": to, "cause": cause, "cause_detail": detail, "updated_at": now}
        if template is not None:
            changes["template"] = template
        if to in ENDED:
            # A sandbox ends once: deleting a failed one later does not change when it ended.
            changes["ended_at"] = sa.func.coalesce(sandboxes.c.ended_at, now)
        update = (
            sandboxes.update()
            .where(
                sandboxes.c.id == sandbox_id,
                sandboxes.c.incarnation == incarnation,
                sandboxes.c.state == from_,
            )
            .values(changes)
        )

        def work(connection: sa.Connection) -> bool:
            if connection.execute(update).rowcount != 1:
                return False
            if from_ is State.CREATING and to is not State.RUNNING:
                # A create that came to nothing frees its Idempotency-Key, so that a retry tries again.
                connection.execute(idempotency.delete().where(idempotency.c.sandbox_id == sandbox_id))
            _add_event(connection, now, sandbox_id, f"sandbox.{to}", cause, detail, data)
            return True

        return await self._write(work)

    async def sandbox(self, sandbox_id: str) -> SandboxRecord | None:
        query = sandboxes.select().where(sandboxes.c.id == sandbox_id)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else _sandbox(found)

    async def list_sandboxes(
        self,
        *,
        states: Collection[State] | None = None,
        labels: Mapping[str, str] | None = None,
        before: Place | None = None,
        limit: int | None = None,
    ) -> list[SandboxRecord]:
        """Newest first, from the one after `before` on."""
        table = sandboxes.c
        query = sandboxes.select().order_by(table.created_at.desc(), table.id.desc()).limit(limit)
        if states is not None:
            query = query.where(table.state.in_(list(states)))
        for key, value in (labels or {}).items():
            query = query.where(table.labels[key].as_string() == value)
        if before is not None:
            query = query.where(
                sa.or_(
                    table.created_at < before.created_at,
                    sa.and_(table.created_at == before.created_at, table.id < before.id),
                )
            )
        return await self._read(lambda connection: [_sandbox(row) for row in connection.execute(query).mappings()])

    async def count_sandboxes(self, state: State) -> int:
        query = sa.select(sa.func.count()).select_from(sandboxes).where(sandboxes.c.state == state)
        return await self._read(lambda connection: connection.execute(query).scalar_one())

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_event(
        self,
        kind: str,
        *,
        sandbox_id: str | None = None,
        cause: Cause | None = None,
        detail: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """History that is no change of state."""
        await self._write(lambda connection: _add_event(connection, _now(), sandbox_id, kind, cause, detail, data))

    async def list_events(
        self, *, sandbox_id: str | None = None, after: int = 0, limit: int | None = None
    ) -> list[EventRecord]:
        """Oldest first."""
        query = events.select().where(events.c.id > after).order_by(events.c.id).limit(limit)
        if sandbox_id is not None:
            query = query.where(events.c.sandbox_id == sandbox_id)
        return await self._read(lambda connection: [_event(row) for row in connection.execute(query).mappings()])

    async def last_event_id(self) -> int:
        query = sa.select(sa.func.max(events.c.id))
        return await self._read(lambda connection: connection.execute(query).scalar_one()) or 0

    @property
    def news(self) -> asyncio.Event:
        """Set after the next commit. Take it *before* reading rows and wait on it after: then nothing is missed."""
        return self._news

    # ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_key(self, key_id: str, name: str, key_hash: str, prefix: str) -> KeyRecord:
        now = _now()

        def work(connection: sa.Connection) -> KeyRecord:
            row = {"id": key_id, "name": name, "hash": key_hash, "prefix": prefix, "created_at": now}
            connection.execute(keys.insert(), row)
            _add_event(connection, now, None, "key.created", data={"key_id": key_id, "name": name})
            return KeyRecord(key_id, name, prefix, now, None)

        return await self._write(work)

    async def key_by_hash(self, key_hash: str) -> KeyRecord | None:
        query = keys.select().where(keys.c.hash == key_hash)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else _key(found)

    async def list_keys(self) -> list[KeyRecord]:
        query = keys.select().order_by(keys.c.created_at, keys.c.id)
        return await self._read(lambda connection: [_key(row) for row in connection.execute(query).mappings()])

    async def remove_key(self, key_id: str) -> bool:
        """False if there is none such, or it is the last one: without a key nobody could make another."""
        others = keys.alias()
        delete = keys.delete().where(
            keys.c.id == key_id, sa.exists(sa.select(others.c.id).where(others.c.id != key_id))
        )

        def work(connection: sa.Connection) -> bool:
            if connection.execute(delete).rowcount != 1:
                return False
            _add_event(connection, _now(), None, "key.deleted", data={"key_id": key_id})
            return True

        return await self._write(work)

    async def touch_key(self, key_id: str) -> None:
        update = keys.update().where(keys.c.id == key_id).values(last_used_at=_now())
        await self._write(lambda connection: connection.execute(update).rowcount)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _write(self, work: Callable[[sa.Connection], T]) -> T:
        def transaction() -> T:
            with self._writer.begin() as connection:
                return work(connection)

        future = asyncio.get_running_loop().run_in_executor(self._writing, _translating(transaction))
        # Shielded: a caller that is cancelled leaves a whole transaction behind, and it still wakes those who follow.
        future.add_done_callback(lambda _: self._wake())
        return await asyncio.shield(future)

    async def _read(self, work: Callable[[sa.Connection], T]) -> T:
        def query() -> T:
            with self._reader.connect() as connection:
                return work(connection)

        return await asyncio.get_running_loop().run_in_executor(self._reading, _translating(query))

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _translating(work: Callable[[], T]) -> Callable[[], T]:
    def run() -> T:
        try:
            return work()
        except sa.exc.SQLAlchemyError as error:
            reason = getattr(error, "orig", None) or error
            raise HostFailure(
                f"the database failed: {reason}; check that the disk of the state directory is writable and not full"
            ) from error

    return run


def _prepare(database: Path) -> None:
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        # Environments and key hashes are nobody else's business; SQLite gives its WAL the same mode.
        os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise HostFailure(f"the database {database} cannot be opened: {error}") from error
    migrate(database)


def _now() -> datetime:
    return datetime.now(UTC)


def _claimed(connection: sa.Connection, claim: IdempotencyClaim, now: datetime) -> SandboxRecord | None:
    connection.execute(idempotency.delete().where(idempotency.c.expires_at <= now))
    query = (
        sa.select(sandboxes, idempotency.c.request_hash)
        .join(idempotency, idempotency.c.sandbox_id == sandboxes.c.id)
        .where(idempotency.c.api_key_id == claim.api_key_id, idempotency.c.key == claim.key)
    )
    row = connection.execute(query).mappings().first()
    if row is None:
        return None
    if row["request_hash"] != claim.request_hash:
        raise IdempotencyConflict(
            f"Idempotency-Key {claim.key!r} was used before with a different request (it made sandbox {row['id']}); "
            "use a new key for a new request",
            sandbox_id=row["id"],
        )
    return _sandbox(row)


def _add_event(
    connection: sa.Connection,
    at: datetime,
    sandbox_id: str | None,
    kind: str,
    cause: Cause | None = None,
    detail: str | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    row = {"at": at, "sandbox_id": sandbox_id, "kind": kind, "cause": cause, "detail": detail, "data": dict(data or {})}
    connection.execute(events.insert(), row)


def _sandbox(row: Mapping[str, Any] | sa.RowMapping) -> SandboxRecord:
    return SandboxRecord(
        id=row["id"],
        name=row["name"],
        state=State(row["state"]),
        cause=Cause(row["cause"]),
        cause_detail=row["cause_detail"],
        incarnation=row["incarnation"],
        shape=Shape(vcpus=row["vcpus"], memory_mib=row["memory_mib"], disk_gib=row["disk_gib"]),
        labels=row["labels"],
        env=row["env"],
        template=row["template"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        ended_at=row["ended_at"],
    )


def _event(row: sa.RowMapping) -> EventRecord:
    return EventRecord(
        id=row["id"],
        at=row["at"],
        sandbox_id=row["sandbox_id"],
        kind=row["kind"],
        cause=None if row["cause"] is None else Cause(row["cause"]),
        detail=row["detail"],
        data=row["data"],
    )


def _key(row: sa.RowMapping) -> KeyRecord:
    return KeyRecord(row["id"], row["name"], row["prefix"], row["created_at"], row["last_used_at"])
