"""Every query of the daemon.

Owns: the truth about what should be. `transition` is the only writer of a sandbox's state: one conditional UPDATE, with
its event row in the same transaction. Never does: decisions, or anything on the host.

Snapshots have a file of their own (`snapshots.py`); how a transaction runs is in `database.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from forkyard.errors import IdempotencyConflict, NoCapacity, StateConflict
from forkyard.lifecycle import ENDED, LIVE, Cause, State, allowed
from forkyard.models import DEFAULT_ACTIVITY_BYTES, Shape
from forkyard.models.network import NetworkPolicy
from forkyard.models.volumes import SandboxVolume
from forkyard.net.base import Traffic
from forkyard.store.builds import BuildQueries
from forkyard.store.database import record_event
from forkyard.store.dev_servers import DevServerQueries
from forkyard.store.domains import PreviewQueries
from forkyard.store.egress import EgressQueries
from forkyard.store.git import GitQueries
from forkyard.store.identities import IdentityQueries
from forkyard.store.records import (
    Admit,
    EventRecord,
    IdempotencyClaim,
    KeyRecord,
    Load,
    NewSandbox,
    Place,
    SandboxRecord,
    SealedSecret,
)
from forkyard.store.remotes import RemoteQueries
from forkyard.store.retention import Retention
from forkyard.store.reviews import ReviewQueries
from forkyard.store.runs import RunQueries
from forkyard.store.secrets import SecretQueries
from forkyard.store.snapshots import SnapshotQueries
from forkyard.store.ssh import SshQueries
from forkyard.store.tables import events, idempotency, keys, sandboxes
from forkyard.store.templates import TemplateQueries
from forkyard.store.triggers import TriggerQueries
from forkyard.store.volumes import VolumeQueries, give_back_volumes, take_volumes

IDEMPOTENCY_LIFETIME = timedelta(hours=24)
CREATES_WINDOW = timedelta(minutes=1)

# Made once: to put such a statement together costs more than to run it, and these are what every verb waits for.
_BY_ID = sandboxes.select().where(sandboxes.c.id == sa.bindparam("at_id"))
_HERE = (
    sandboxes.c.id == sa.bindparam("at_id"),
    sandboxes.c.incarnation == sa.bindparam("at_incarnation"),
    sandboxes.c.state == sa.bindparam("at_state"),
)
_KEY_OF = sa.select(sandboxes.c.key_id).where(*_HERE)
_MOVE = sandboxes.update().where(*_HERE).returning(sandboxes)
# A sandbox ends once: deleting a failed one later does not change when it ended.
_END = _MOVE.values(
    ended_at=sa.func.coalesce(sandboxes.c.ended_at, sa.bindparam("at_now", type_=sandboxes.c.ended_at.type))
)


_SUM_MIB = sa.func.coalesce(sa.func.sum(sandboxes.c.memory_mib), 0)
_LIVE = sa.and_(sandboxes.c.state.in_(list(LIVE)), sandboxes.c.id != sa.bindparam("but_id"))
_MINE = sandboxes.c.key_id.is_not_distinct_from(sa.bindparam("of_key"))
_MEMORY = sa.select(_SUM_MIB).where(_LIVE)
_MEMORY_OF_KEY = sa.select(sa.func.count(), _SUM_MIB).select_from(sandboxes).where(_LIVE, _MINE)
_CREATES_OF_KEY = (
    sa.select(sa.func.count(), sa.func.min(sandboxes.c.created_at))
    .select_from(sandboxes)
    .where(_MINE, sandboxes.c.created_at > sa.bindparam("since"))
)


class Store(
    SnapshotQueries,
    EgressQueries,
    SecretQueries,
    SshQueries,
    PreviewQueries,
    GitQueries,
    IdentityQueries,
    BuildQueries,
    TemplateQueries,
    TriggerQueries,
    RemoteQueries,
    ReviewQueries,
    VolumeQueries,
    RunQueries,
    Retention,
    DevServerQueries,
):
    """Open with `Store.open`."""

    # ── sandboxes ────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_sandbox(
        self, new: NewSandbox, claim: IdempotencyClaim | None = None, *, admit: Admit | None = None
    ) -> SandboxRecord:
        """A new sandbox in CREATING. If `claim` was made before, the sandbox it made then is returned instead; the same
        key with another request is an `IdempotencyConflict`."""
        now = _now()

        def work(connection: sa.Connection) -> SandboxRecord:
            if claim is not None and (earlier := _claimed(connection, claim, now)) is not None:
                return earlier
            record = _insert(connection, new, now, admit)
            if claim is not None:
                values = {
                    "api_key_id": claim.api_key_id,
                    "key": claim.key,
                    "request_hash": claim.request_hash,
                    "sandbox_id": new.id,
                    "expires_at": now + IDEMPOTENCY_LIFETIME,
                }
                connection.execute(idempotency.insert(), values)
            return record

        # Not durable, here and below: until its machine is there too, a sandbox is nothing that could be lost.
        return await self._write(work, durable=False)

    async def add_sandboxes(
        self, new: Sequence[NewSandbox], *, admit: Admit | None = None
    ) -> list[SandboxRecord | NoCapacity]:
        """Several in one transaction; in place of those that are not admitted, why not."""
        now = _now()

        def work(connection: sa.Connection) -> list[SandboxRecord | NoCapacity]:
            made: list[SandboxRecord | NoCapacity] = []
            for one in new:
                try:
                    made.append(_insert(connection, one, now, admit))
                except NoCapacity as refusal:
                    made.append(refusal)
            return made

        return await self._write(work, durable=False)

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
        next_incarnation: int | None = None,
        shape: Shape | None = None,
        snapshot_id: str | None = None,
        last_active_at: datetime | None = None,
        unchanged: SandboxRecord | None = None,
        admit: Admit | None = None,
        durable: bool = True,
        ttl_s: float | None = None,
        hold_ttl: bool = False,
    ) -> SandboxRecord | None:
        """Move a sandbox from one state to another: what it is now. None if it was not in `from_`, or not in this
        incarnation: somebody else was first. A change that the table of `lifecycle` does not know is a `StateConflict`.

        `next_incarnation`: from now on the sandbox is this machine. `unchanged`: only if its record is still this one, in
        all that `update_sandbox` changes. `admit` is asked first, in the same transaction. Not
        `durable`: a power cut may undo it, a crash of the daemon does not (a change that a power cut undoes anyway need
        not wait for the disk).

        `ttl_s`: how long it lasts from now on. `hold_ttl`: its ttl stands still. One that stood still, or has passed and did
        not delete, begins anew when the sandbox runs again, whoever woke it."""
        if not allowed(from_, to):
            raise StateConflict(f"a sandbox cannot go from {from_} to {to}", sandbox_id=sandbox_id)
        now = _now()
        given = {
            "template": template,
            "incarnation": next_incarnation,
            "snapshot_id": snapshot_id,
            "last_active_at": last_active_at,
            "ttl_s": ttl_s,
            "expires_at": None if ttl_s is None else now + timedelta(seconds=ttl_s),
            **(shape.model_dump() if shape is not None else {}),
        }
        changes: dict[str, Any] = {"state": to, "cause": cause, "cause_detail": detail, "updated_at": now}
        changes |= {name: value for name, value in given.items() if value is not None}
        if hold_ttl:
            changes["expires_at"] = None
        if from_ is State.FAILED and to not in ENDED and to is not State.DELETING:
            changes["ended_at"] = None
        here = {"at_id": sandbox_id, "at_incarnation": incarnation, "at_state": from_}

        def work(connection: sa.Connection) -> SandboxRecord | None:
            if unchanged is not None:
                here_now = sa.select(sandboxes.c.updated_at).where(sandboxes.c.id == sandbox_id)
                if connection.execute(here_now).scalar() != unchanged.updated_at:
                    return None
            if admit is not None:
                key = connection.execute(_KEY_OF, here).first()
                if key is None:
                    return None
                admit(_load(connection, key.key_id, now, without=sandbox_id))
            move, values = (_END, {"at_now": now, **changes}) if to in ENDED else (_MOVE, changes)
            row = connection.execute(move, {**here, **values}).mappings().first()
            if row is None:
                return None
            if to is State.RUNNING and _ttl_begins(row, now):
                again = {"expires_at": now + timedelta(seconds=row["ttl_s"])}
                there = {"at_id": sandbox_id, "at_incarnation": row["incarnation"], "at_state": to}
                row = connection.execute(_MOVE, {**there, **again}).mappings().one()
            if from_ is State.CREATING and to is not State.RUNNING:
                # A create that came to nothing frees its Idempotency-Key, so that a retry tries again.
                connection.execute(idempotency.delete().where(idempotency.c.sandbox_id == sandbox_id))
            if to is State.DELETED or cause is Cause.CREATE_FAILED:
                give_back_volumes(connection, sandbox_id)
            record_event(connection, now, sandbox_id, f"sandbox.{to}", cause, detail, data)
            return _sandbox(row)

        return await self._write(work, durable=durable)

    async def update_sandbox(
        self, sandbox_id: str, changes: Mapping[str, Any], *, states: Collection[State] | None = None
    ) -> bool:
        """Change what is not its state. False if it is in none of `states`."""
        now = _now()
        update = sandboxes.update().where(sandboxes.c.id == sandbox_id).values({**changes, "updated_at": now})
        if states is not None:
            update = update.where(sandboxes.c.state.in_(list(states)))

        def work(connection: sa.Connection) -> bool:
            if connection.execute(update).rowcount != 1:
                return False
            record_event(connection, now, sandbox_id, "sandbox.updated", data={"fields": sorted(changes)})
            return True

        return await self._write(work)

    async def touch_sandbox(self, sandbox_id: str, last_active_at: datetime) -> None:
        """No event: this is no history."""
        update = sandboxes.update().where(sandboxes.c.id == sandbox_id).values(last_active_at=last_active_at)
        await self._write(lambda connection: connection.execute(update).rowcount)

    async def sandbox(self, sandbox_id: str) -> SandboxRecord | None:
        at = {"at_id": sandbox_id}
        found = await self._read(lambda connection: connection.execute(_BY_ID, at).mappings().first())
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

    async def list_unfinished(self) -> list[SandboxRecord]:
        """Those that time can do something to: not what is deleted, nor what has failed and has no ttl."""
        table = sandboxes.c
        states = [state for state in State if state not in ENDED]
        failed = sa.and_(table.state == State.FAILED, table.expires_at.is_not(None))
        query = sandboxes.select().where(sa.or_(table.state.in_(states), failed))
        return await self._read(lambda connection: [_sandbox(row) for row in connection.execute(query).mappings()])

    async def count_by_state(self) -> dict[State, int]:
        query = sa.select(sandboxes.c.state, sa.func.count()).group_by(sandboxes.c.state)
        return await self._read(lambda connection: {State(row[0]): row[1] for row in connection.execute(query)})

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
        durable: bool = True,
    ) -> None:
        """History that is no change of state. Not `durable`: a power cut may undo it, a crash of the daemon does not."""
        await self._write(
            lambda connection: record_event(connection, _now(), sandbox_id, kind, cause, detail, data), durable=durable
        )

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

    async def event_before_newest(self, count: int, *, sandbox_id: str | None = None) -> int:
        """The id after which the `count` newest events follow."""
        query = sa.select(events.c.id).order_by(events.c.id.desc()).offset(count).limit(1)
        if sandbox_id is not None:
            query = query.where(events.c.sandbox_id == sandbox_id)
        return await self._read(lambda connection: connection.execute(query).scalar()) or 0

    # ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_key(self, key_id: str, name: str, key_hash: str, prefix: str) -> KeyRecord:
        now = _now()

        def work(connection: sa.Connection) -> KeyRecord:
            row = {"id": key_id, "name": name, "hash": key_hash, "prefix": prefix, "created_at": now}
            connection.execute(keys.insert(), row)
            record_event(connection, now, None, "key.created", data={"key_id": key_id, "name": name})
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
            record_event(connection, _now(), None, "key.deleted", data={"key_id": key_id})
            return True

        return await self._write(work)

    async def touch_key(self, key_id: str) -> None:
        update = keys.update().where(keys.c.id == key_id).values(last_used_at=_now())
        await self._write(lambda connection: connection.execute(update).rowcount)


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


def _insert(connection: sa.Connection, new: NewSandbox, now: datetime, admit: Admit | None) -> SandboxRecord:
    if admit is not None:
        admit(_load(connection, new.key_id, now))
    take_volumes(connection, new.id, new.volumes)
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
        "key_id": new.key_id,
        "parent_id": new.parent_id,
        "snapshot_id": new.snapshot_id,
        "persistence": new.persistence,
        "priority": new.priority,
        "idle_timeout_s": new.idle_timeout_s,
        "ttl_s": new.ttl_s,
        "checkpoint_every_s": new.checkpoint_every_s,
        "checkpoints_kept": new.checkpoints_kept,
        "expires_at": None if new.ttl_s is None else now + timedelta(seconds=new.ttl_s),
        "last_active_at": now,
        "network": new.network.model_dump(mode="json"),
        "secrets": {name: asdict(secret) for name, secret in new.secrets.items()},
        "trusts_ca": new.trusts_ca,
        "activity_threshold_bytes": new.activity_threshold_bytes,
        "identity_id": new.identity_id,
        "on_ttl": new.on_ttl,
        "annotations": dict(new.annotations),
        "volumes": [one.model_dump() for one in new.volumes],
        "public_env": dict(new.public_env),
        **asdict(Traffic()),
        "created_at": now,
        "updated_at": now,
        "ended_at": None,
    }
    connection.execute(sandboxes.insert(), row)
    data = {"parent_id": new.parent_id, "snapshot_id": new.snapshot_id}
    record_event(
        connection,
        now,
        new.id,
        f"sandbox.{State.CREATING}",
        Cause.REQUESTED,
        data={name: value for name, value in data.items() if value is not None},
    )
    return _sandbox(row)


def _load(connection: sa.Connection, key_id: str | None, now: datetime, *, without: str | None = None) -> Load:
    asked = {"but_id": without or "", "of_key": key_id, "since": now - CREATES_WINDOW}
    total = connection.execute(_MEMORY, asked).scalar_one()
    running, mine = connection.execute(_MEMORY_OF_KEY, asked).one()
    creates, oldest = connection.execute(_CREATES_OF_KEY, asked).one()
    age_s = 0.0 if oldest is None else (now - oldest).total_seconds()
    return Load(int(total), int(running), int(mine), int(creates), age_s)


def _ttl_begins(row: sa.RowMapping, now: datetime) -> bool:
    """It stood still while the sandbox did not run; or it has passed, and only made it sleep."""
    if row["ttl_s"] is None:
        return False
    return row["expires_at"] is None or (row["on_ttl"] not in (None, "delete") and row["expires_at"] <= now)


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
        key_id=row["key_id"],
        parent_id=row["parent_id"],
        snapshot_id=row["snapshot_id"],
        # Rows of an older version have none of these.
        persistence=row["persistence"] or "sticky",
        priority=5 if row["priority"] is None else row["priority"],
        idle_timeout_s=row["idle_timeout_s"],
        ttl_s=row["ttl_s"],
        checkpoint_every_s=row["checkpoint_every_s"],
        checkpoints_kept=row["checkpoints_kept"] or 5,
        expires_at=row["expires_at"],
        last_active_at=row["last_active_at"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        ended_at=row["ended_at"],
        network=NetworkPolicy() if row["network"] is None else NetworkPolicy.model_validate(row["network"]),
        secrets={
            name: SealedSecret(**{**one, "hosts": tuple(one["hosts"])}) for name, one in (row["secrets"] or {}).items()
        },
        identity_id=row["identity_id"],
        trusts_ca=row["trusts_ca"],
        activity_threshold_bytes=(
            DEFAULT_ACTIVITY_BYTES if row["activity_threshold_bytes"] is None else row["activity_threshold_bytes"]
        ),
        on_ttl=row["on_ttl"] or "delete",
        annotations=row["annotations"] or {},
        volumes=tuple(SandboxVolume.model_validate(one) for one in row["volumes"] or ()),
        public_env=row["public_env"] or {},
        traffic=Traffic(*(row[each.name] or 0 for each in fields(Traffic))),
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
