"""The verbs of a sandbox: create, get, list, delete, and the way to its guest.

Owns: the order of steps (record first, then the machine, then the state), and what two callers at once mean. Never
does: how a machine is made (`hosts`), or SQL (`store`).

A create and a delete run as tasks of their own: a client that goes away does not leave half of one, and a second caller
of the same thing waits for the first one's task.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import json
import secrets
import string
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta

import structlog

from forkyard.errors import (
    ForkyardError,
    GuestUnreachable,
    IdempotencyConflict,
    InternalError,
    InvalidRequest,
    OperationTimeout,
    SandboxEnded,
    SandboxNotFound,
    StateConflict,
    VmCrashed,
)
from forkyard.guest.base import Guest
from forkyard.hosts.base import Created, CreateSpec, Host, Incarnation
from forkyard.lifecycle import ENDED, Cause, State
from forkyard.models import Page, SandboxCreate, SandboxInfo, SandboxLogs
from forkyard.store.records import IdempotencyClaim, NewSandbox, Place, SandboxRecord
from forkyard.store.sql import Store
from forkyard.vmm.base import VmUsage

log = structlog.get_logger(__name__)

#: Also covers the first use of a shape, which builds its template. The host has tighter limits for each step.
CREATE_DEADLINE_S = 1800.0
DELETE_DEADLINE_S = 120.0

_ALPHABET = string.ascii_lowercase + string.digits
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def new_id() -> str:
    """Unguessable, and a legal host name: a letter, then 19 letters and digits (102 bits)."""
    return secrets.choice(string.ascii_lowercase) + "".join(secrets.choice(_ALPHABET) for _ in range(19))


class Sandboxes:
    def __init__(self, store: Store, host: Host) -> None:
        self._store = store
        self._host = host
        self._creating: dict[str, asyncio.Task[SandboxInfo]] = {}
        self._claims: dict[tuple[str, str], tuple[str, asyncio.Task[SandboxInfo]]] = {}
        self._deleting: dict[str, asyncio.Task[None]] = {}

    # ── create ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(
        self, request: SandboxCreate, *, api_key_id: str = "", idempotency_key: str | None = None
    ) -> SandboxInfo:
        """With an `idempotency_key`, a retry, also a concurrent one, gets the sandbox of the first call."""
        sandbox_id = new_id()
        if idempotency_key is None:
            return await _outcome(self._begin(sandbox_id, request, None))
        claim = IdempotencyClaim(api_key_id, idempotency_key, _request_hash(request))
        slot = (api_key_id, idempotency_key)
        under_way = self._claims.get(slot)
        if under_way is not None:
            first_hash, task = under_way
            if first_hash != claim.request_hash:
                raise IdempotencyConflict(
                    f"a different request with Idempotency-Key {idempotency_key!r} is under way; use a new key for "
                    "a new request"
                )
            return await _outcome(task)
        task = self._begin(sandbox_id, request, claim)
        self._claims[slot] = (claim.request_hash, task)
        task.add_done_callback(lambda _: self._claims.pop(slot, None))
        return await _outcome(task)

    def _begin(
        self, sandbox_id: str, request: SandboxCreate, claim: IdempotencyClaim | None
    ) -> asyncio.Task[SandboxInfo]:
        task = asyncio.create_task(self._create(sandbox_id, request, claim), name=f"create {sandbox_id}")
        self._creating[sandbox_id] = task
        task.add_done_callback(lambda done: self._created(sandbox_id, done))
        return task

    def _created(self, sandbox_id: str, task: asyncio.Task[SandboxInfo]) -> None:
        self._creating.pop(sandbox_id, None)
        if not task.cancelled():
            task.exception()  # seen here even if the caller went away

    async def _create(self, sandbox_id: str, request: SandboxCreate, claim: IdempotencyClaim | None) -> SandboxInfo:
        new = NewSandbox(sandbox_id, request.shape(), request.name, request.labels, request.env)
        record = await self._store.add_sandbox(new, claim)
        if record.id != sandbox_id:
            return sandbox_info(record)
        incarnation = Incarnation(record.id, record.incarnation)
        try:
            created = await self._make_machine(incarnation, CreateSpec(record.shape, record.env))
        except ForkyardError as error:
            await self._create_failed(incarnation, error.message)
            raise
        except Exception as error:
            log.exception("create failed", sandbox=sandbox_id)
            await self._create_failed(incarnation, "an unexpected error in the daemon; its log has the details")
            raise InternalError() from error
        return await self._announce(record, created)

    async def _make_machine(self, incarnation: Incarnation, spec: CreateSpec) -> Created:
        try:
            async with asyncio.timeout(CREATE_DEADLINE_S):
                return await self._host.create(incarnation, spec)
        except TimeoutError:
            raise OperationTimeout(f"the create did not finish within {CREATE_DEADLINE_S:.0f} s") from None

    async def _create_failed(self, incarnation: Incarnation, detail: str) -> None:
        """The host left nothing behind by contract; asking it again costs nothing and covers what came too late."""
        await self._destroy_quietly(incarnation)
        await self._store.transition(
            incarnation.sandbox_id,
            incarnation.number,
            State.CREATING,
            State.FAILED,
            Cause.CREATE_FAILED,
            detail,
        )

    async def _announce(self, record: SandboxRecord, created: Created) -> SandboxInfo:
        milestones = {milestone.name: milestone.at_ms for milestone in created.milestones}
        moved = await self._store.transition(
            record.id,
            record.incarnation,
            State.CREATING,
            State.RUNNING,
            Cause.READY,
            template=created.template,
            data={"template": created.template, "milestones_ms": milestones},
        )
        now = await self._record(record.id)
        if moved:
            return sandbox_info(now)
        await self._destroy_quietly(Incarnation(record.id, record.incarnation))
        if now.state is State.FAILED:
            raise VmCrashed(now.cause_detail or "the machine ended while it was being created", cause=now.cause)
        raise _deleted_meanwhile()

    async def _destroy_quietly(self, incarnation: Incarnation) -> None:
        try:
            async with asyncio.timeout(DELETE_DEADLINE_S):
                await self._host.destroy(incarnation)
        except Exception:
            log.exception("leftovers could not be removed", vm=str(incarnation))

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def get(self, sandbox_id: str) -> SandboxInfo:
        return sandbox_info(await self._record(sandbox_id))

    async def list(
        self,
        *,
        states: Collection[State] | None = None,
        labels: Mapping[str, str] | None = None,
        ended: bool = False,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[SandboxInfo]:
        """Newest first. Without `states`, those that have ended are left out unless `ended`."""
        if states is None and not ended:
            states = [state for state in State if state not in ENDED]
        before = None if cursor is None else _place(cursor)
        found = await self._store.list_sandboxes(states=states, labels=labels, before=before, limit=limit + 1)
        more = len(found) > limit
        found = found[:limit]
        return Page[SandboxInfo](
            items=[sandbox_info(record) for record in found], next_cursor=_cursor(found[-1]) if more else None
        )

    async def count_running(self) -> int:
        return await self._store.count_sandboxes(State.RUNNING)

    async def guest(self, sandbox_id: str) -> Guest:
        """The way into a running sandbox."""
        incarnation = await self._running(sandbox_id)
        try:
            return self._host.guest(incarnation)
        except SandboxNotFound:
            raise _just_ended(sandbox_id) from None

    async def usage(self, sandbox_id: str) -> VmUsage:
        incarnation = await self._running(sandbox_id)
        try:
            return await self._host.usage(incarnation)
        except SandboxNotFound:
            raise _just_ended(sandbox_id) from None

    async def logs(self, sandbox_id: str) -> SandboxLogs:
        """Also of a failed sandbox, until it is deleted."""
        record = await self._record(sandbox_id)
        if record.state is State.DELETED:
            raise _ended(record)
        try:
            return await self._host.logs(Incarnation(record.id, record.incarnation))
        except SandboxNotFound:  # not made yet, or its create failed: nothing was kept
            return SandboxLogs(template_boot=[], create=[], console="")

    # ── delete ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def delete(self, sandbox_id: str) -> None:
        """Returns when the machine and all it owned are gone. Deleting what is deleted is fine."""
        task = self._deleting.get(sandbox_id)
        if task is None:
            task = asyncio.create_task(self._delete(sandbox_id), name=f"delete {sandbox_id}")
            self._deleting[sandbox_id] = task
            task.add_done_callback(lambda done: self._deleted(sandbox_id, done))
        await asyncio.shield(task)

    def _deleted(self, sandbox_id: str, task: asyncio.Task[None]) -> None:
        self._deleting.pop(sandbox_id, None)
        if not task.cancelled():
            task.exception()

    async def _delete(self, sandbox_id: str) -> None:
        record = await self._record(sandbox_id)
        while record.state not in (State.DELETING, State.DELETED):
            await self._store.transition(
                record.id, record.incarnation, record.state, State.DELETING, Cause.DELETED_BY_USER
            )
            record = await self._record(sandbox_id)  # whoever was first, the record says where it is now
        if record.state is State.DELETED:
            return
        creating = self._creating.get(sandbox_id)
        if creating is not None:
            creating.cancel()
            await asyncio.wait({creating}, timeout=DELETE_DEADLINE_S)
        incarnation = Incarnation(record.id, record.incarnation)
        try:
            async with asyncio.timeout(DELETE_DEADLINE_S):
                await self._host.destroy(incarnation)
        except TimeoutError:
            raise OperationTimeout(
                f"the machine of sandbox {sandbox_id} was not gone within {DELETE_DEADLINE_S:.0f} s; delete it again"
            ) from None
        await self._store.transition(
            record.id, record.incarnation, State.DELETING, State.DELETED, Cause.DELETED_BY_USER
        )

    async def delete_all(self) -> None:
        """Every sandbox that has a machine; the daemon does so when it is asked to leave nothing behind."""
        records = await self._store.list_sandboxes(states=[state for state in State if state is not State.DELETED])
        for record in records:
            try:
                await self.delete(record.id)
            except ForkyardError as error:
                log.error("sandbox not deleted", sandbox=record.id, error=error.message)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def settle(self, timeout_s: float) -> None:
        """Let creates and deletes under way finish. Those that do not are left to the next start."""
        tasks = [*self._creating.values(), *self._deleting.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def _record(self, sandbox_id: str) -> SandboxRecord:
        record = await self._store.sandbox(sandbox_id)
        if record is None:
            raise SandboxNotFound(f"there is no sandbox {sandbox_id!r}; `forkyard ls --all` lists those there are")
        return record

    async def _running(self, sandbox_id: str) -> Incarnation:
        record = await self._record(sandbox_id)
        if record.state in ENDED:
            raise _ended(record)
        if record.state is not State.RUNNING:
            raise StateConflict(f"sandbox {sandbox_id} is {record.state}, not running", state=record.state)
        return Incarnation(record.id, record.incarnation)


async def _outcome(task: asyncio.Task[SandboxInfo]) -> SandboxInfo:
    """A caller that is cancelled leaves the create running; a create that is cancelled was cancelled by `delete`."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled():
            raise _deleted_meanwhile() from None
        raise


def sandbox_info(record: SandboxRecord) -> SandboxInfo:
    return SandboxInfo(
        id=record.id,
        name=record.name,
        state=record.state,
        cause=record.cause,
        cause_detail=record.cause_detail,
        incarnation=record.incarnation,
        shape=record.shape,
        labels=dict(record.labels),
        template=record.template,
        created_at=record.created_at,
        updated_at=record.updated_at,
        ended_at=record.ended_at,
    )


def _ended(record: SandboxRecord) -> SandboxEnded:
    why = f": {record.cause_detail}" if record.cause_detail else ""
    return SandboxEnded(f"sandbox {record.id} has ended ({record.cause}){why}", state=record.state, cause=record.cause)


def _deleted_meanwhile() -> SandboxEnded:
    return SandboxEnded("the sandbox was deleted while it was being created", cause=Cause.DELETED_BY_USER)


def _just_ended(sandbox_id: str) -> GuestUnreachable:
    return GuestUnreachable(f"the machine of sandbox {sandbox_id} is gone; its state will say why in a moment")


def _request_hash(request: SandboxCreate) -> str:
    return hashlib.sha256(json.dumps(request.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _cursor(record: SandboxRecord) -> str:
    at_us = (record.created_at - _EPOCH) // _MICROSECOND
    return base64.urlsafe_b64encode(f"{at_us}:{record.id}".encode()).decode().rstrip("=")


def _place(cursor: str) -> Place:
    with contextlib.suppress(ValueError, binascii.Error, OverflowError):
        at_us, sandbox_id = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode().split(":")
        return Place(_EPOCH + _MICROSECOND * int(at_us), sandbox_id)
    raise InvalidRequest(f"{cursor!r} is no cursor; use `next_cursor` of the page before, or none", field="cursor")
