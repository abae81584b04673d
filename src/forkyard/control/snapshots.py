"""Snapshots: made, listed, deleted; rollback; the ring of automatic checkpoints.

Owns: the names of snapshots and what they may be used for. A snapshot outlives its sandbox; machines that were started
from it do not need it any more, so it may always be deleted. Checkpoints go with their sandbox.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import partial

import structlog

from forkyard.control.ground import Ground, known, machine, new_snapshot_id, refusal, sandbox_info, successor
from forkyard.control.pages import cursor_after, place_of
from forkyard.control.removal import Removal
from forkyard.control.room import MIB, Room
from forkyard.control.sleep import Sleep
from forkyard.errors import InvalidRequest, OperationTimeout, SandboxEnded, SnapshotNotFound
from forkyard.faults import reached
from forkyard.lifecycle import LIVE, Cause, State
from forkyard.models import Page, SandboxInfo, SnapshotInfo
from forkyard.store.records import SandboxRecord, SnapshotRecord

log = structlog.get_logger(__name__)

SNAPSHOT_DEADLINE_S = 600.0
ROLLBACK_DEADLINE_S = 600.0
_ID = re.compile(r"^sc-[a-z0-9]{20}$")
_NAME = re.compile(r"[^/\x00-\x1f\x7f]{1,128}")
#: States a rollback can begin in; if it fails the sandbox returns there.
_SETTLED = (State.RUNNING, State.PAUSED, State.STOPPED, State.FAILED)


class Snapshots:
    def __init__(self, ground: Ground, removal: Removal, room: Room, sleep: Sleep) -> None:
        self._ground = ground
        self._removal = removal
        self._room = room
        self._sleep = sleep

    # ── make ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(
        self,
        sandbox_id: str,
        name: str | None = None,
        *,
        automatic: bool = False,
        annotations: Mapping[str, str] | None = None,
    ) -> SnapshotInfo:
        """Of a running or paused sandbox, which goes on as it was. `annotations`: besides those of the sandbox."""
        check_name(name)
        work = partial(self._create, sandbox_id, name, automatic, annotations or {})
        # Not interruptible: a delete waits for it, for what it makes outlives the sandbox.
        return await self._ground.turns.run(sandbox_id, "snapshot", work, interruptible=False)

    async def _create(
        self, sandbox_id: str, name: str | None, automatic: bool, annotations: Mapping[str, str]
    ) -> SnapshotInfo:
        ground = self._ground
        record = await ground.record(sandbox_id)
        if record.state not in (State.RUNNING, State.PAUSED):
            raise refusal(record, "a snapshot is taken of a running or paused sandbox")
        need_bytes = record.shape.memory_mib * MIB
        await self._room.on_disk(need_bytes, f"a snapshot of sandbox {sandbox_id}", spare=sandbox_id)
        snapshot_id = new_snapshot_id()
        await ground.store.add_snapshot(
            snapshot_id,
            sandbox_id,
            record.shape,
            name=name,
            automatic=automatic,
            trusts_ca=record.trusts_ca,
            annotations={**record.annotations, **annotations},
        )
        reached("snapshot.recorded")
        try:
            async with asyncio.timeout(SNAPSHOT_DEADLINE_S):
                made = await ground.host.snapshot(machine(record), snapshot_id)
        except TimeoutError:
            await self._discard(snapshot_id)
            raise OperationTimeout(
                f"the snapshot of sandbox {sandbox_id} was not saved within {SNAPSHOT_DEADLINE_S:.0f} s"
            ) from None
        except Exception as error:
            await self._discard(snapshot_id)
            raise known(error, "snapshot", sandbox_id) from error
        finished = await ground.store.finish_snapshot(snapshot_id, size_bytes=made.size_bytes, paused_ms=made.paused_ms)
        if finished is None:
            raise SandboxEnded(f"sandbox {sandbox_id} was deleted while a snapshot of it was taken")
        return snapshot_info(finished)

    async def secrets_in(self, snapshot_id: str, known: Mapping[str, bytes], *, parent: str | None = None) -> list[str]:
        """The names of those whose value is in its memory, or in files that were written since `parent`."""
        names = list(known)
        if not names:
            return []
        found = await self._ground.host.find_in_snapshot(snapshot_id, list(known.values()), parent=parent)
        return sorted(names[index] for index in found)

    async def _discard(self, snapshot_id: str) -> None:
        """Half of a snapshot. What cannot be removed now is removed at the next start."""
        try:
            await self._ground.host.delete_snapshot(snapshot_id)
            await self._ground.store.forget_snapshot(snapshot_id)
        except Exception:
            log.exception("half a snapshot could not be removed", snapshot=snapshot_id)

    async def checkpoint(self, sandbox_id: str) -> None:
        """Take an automatic snapshot, and drop the oldest if there are too many."""
        await self.create(sandbox_id, automatic=True)
        kept = (await self._ground.record(sandbox_id)).checkpoints_kept
        for old in (await self._ground.store.list_snapshots(sandbox_id=sandbox_id, automatic=True))[kept:]:
            await self._removal.drop_snapshot(old.id)

    # ── look, delete ─────────────────────────────────────────────────────────────────────────────────────────────

    async def find(self, id_or_name: str) -> SnapshotRecord:
        found = await self._ground.store.snapshot(id_or_name)
        if found is None:
            raise SnapshotNotFound(
                f"there is no snapshot {id_or_name!r}; `forkyard snapshots ls` lists those there are"
            )
        return found

    async def get(self, id_or_name: str) -> SnapshotInfo:
        return snapshot_info(await self.find(id_or_name))

    async def list(
        self,
        *,
        sandbox_id: str | None = None,
        automatic: bool | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[SnapshotInfo]:
        """Newest first."""
        found = await self._ground.store.list_snapshots(
            sandbox_id=sandbox_id, automatic=automatic, before=place_of(cursor), limit=limit + 1
        )
        more = len(found) > limit
        found = found[:limit]
        return Page[SnapshotInfo](
            items=[snapshot_info(record) for record in found], next_cursor=cursor_after(found[-1]) if more else None
        )

    async def was_deleted(self, snapshot_id: str) -> bool:
        return await self._ground.store.snapshot_was_deleted(snapshot_id)

    async def rename(self, snapshot_id: str, name: str, *, take: bool = False) -> SnapshotInfo:
        """`take`: also if another one has this name, which has none then."""
        check_name(name)
        renamed = await self._ground.store.rename_snapshot(snapshot_id, name, take=take)
        if renamed is None:
            raise SnapshotNotFound(f"there is no snapshot {snapshot_id!r}")
        return snapshot_info(renamed)

    async def delete(self, id_or_name: str) -> None:
        found = await self.find(id_or_name)
        await self._removal.drop_snapshot(found.id)

    # ── rollback ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def rollback(self, sandbox_id: str, id_or_name: str) -> SandboxInfo:
        """The sandbox runs as it did when the snapshot was taken. If it fails, nothing has changed."""
        with self._ground.activity.using(sandbox_id):
            work = partial(self._rollback, sandbox_id, id_or_name)
            return sandbox_info(await self._ground.turns.run(sandbox_id, "rollback", work))

    async def _rollback(self, sandbox_id: str, id_or_name: str) -> SandboxRecord:
        ground = self._ground
        before = await ground.record(sandbox_id)
        if before.state not in _SETTLED:
            raise refusal(before, "it cannot be rolled back now")
        snapshot = await self.find(id_or_name)
        if snapshot.sandbox_id != sandbox_id:
            raise InvalidRequest(
                f"snapshot {id_or_name!r} is of sandbox {snapshot.sandbox_id}, not of {sandbox_id}; create a new "
                "sandbox from it instead",
                field="snapshot",
            )
        admission = partial(ground.admission, snapshot.shape.memory_mib, sandbox_id=sandbox_id)
        if before.state in LIVE:  # it has its room already
            record = await ground.move(before, State.RESUMING, Cause.ROLLED_BACK)
        else:
            record = await self._room.in_memory(
                lambda: ground.move(before, State.RESUMING, Cause.ROLLED_BACK, admit=admission()), cooler=self._sleep
            )
        reached("rollback.recorded")
        try:
            async with asyncio.timeout(ROLLBACK_DEADLINE_S):
                spec = await ground.spec_of(record, shape=snapshot.shape, snapshot_id=snapshot.id)
                created = await ground.host.rollback(machine(record), successor(record), spec)
                await ground.prepare(record, successor(record), unsure=True)
        except TimeoutError:
            error = OperationTimeout(f"sandbox {sandbox_id} was not rolled back within {ROLLBACK_DEADLINE_S:.0f} s")
            await self._as_before(before, record)
            raise error from None
        except Exception as error:
            await self._as_before(before, record)
            raise known(error, "rollback", sandbox_id) from error
        reached("rollback.made")
        ground.hot.pop(sandbox_id, None)
        ground.activity.touch(sandbox_id)
        return await ground.move(
            record,
            State.RUNNING,
            Cause.ROLLED_BACK,
            next_incarnation=record.incarnation + 1,
            template=created.template,
            shape=snapshot.shape,
            snapshot_id=snapshot.id,
            data={"snapshot_id": snapshot.id},
        )

    async def _as_before(self, before: SandboxRecord, record: SandboxRecord) -> None:
        await self._ground.store.transition(
            record.id, record.incarnation, record.state, before.state, before.cause, before.cause_detail
        )


def check_name(name: str | None) -> None:
    """InvalidRequest if a snapshot cannot be called so."""
    if name is not None and _ID.match(name):
        raise InvalidRequest(f"{name!r} looks like the id of a snapshot; choose another name", field="name")
    if name is not None and _NAME.fullmatch(name) is None:
        raise InvalidRequest("the name of a snapshot has no `/` and no control characters", field="name")


def snapshot_info(record: SnapshotRecord) -> SnapshotInfo:
    return SnapshotInfo(
        id=record.id,
        name=record.name,
        sandbox_id=record.sandbox_id,
        automatic=record.automatic,
        shape=record.shape,
        size_bytes=record.size_bytes,
        paused_ms=record.paused_ms,
        created_at=record.created_at,
    )
