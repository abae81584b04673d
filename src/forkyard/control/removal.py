"""The end of a sandbox that was asked for: by a user, its ttl, its policy, or for want of room.

Owns: delete. It goes ahead of every other verb: the state says so first, the verb under way is interrupted or waited
for, and then all that is left of the machine, and of one that was about to replace it, is removed.
"""

from __future__ import annotations

import asyncio

import structlog

from forkyard.control.ground import DESTROY_DEADLINE_S, Ground, machine
from forkyard.errors import ForkyardError, OperationTimeout
from forkyard.faults import reached
from forkyard.hosts.base import Incarnation
from forkyard.lifecycle import Cause, State
from forkyard.store.records import SandboxRecord

log = structlog.get_logger(__name__)

_GOING = (State.DELETING, State.DELETED)


class Removal:
    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def delete(self, sandbox_id: str, cause: Cause = Cause.DELETED_BY_USER, detail: str | None = None) -> None:
        """Returns when the machine and all it owned are gone. Deleting what is deleted is fine."""
        task = self._under_way.get(sandbox_id)
        if task is None:
            task = asyncio.create_task(self._delete(sandbox_id, cause, detail), name=f"delete {sandbox_id}")
            self._under_way[sandbox_id] = self._ground.turns.keep(task)
            task.add_done_callback(lambda _: self._under_way.pop(sandbox_id, None))
        await asyncio.shield(task)

    async def _delete(self, sandbox_id: str, cause: Cause, detail: str | None) -> None:
        ground = self._ground
        record = await ground.record(sandbox_id)
        while record.state not in _GOING:
            await ground.store.transition(record.id, record.incarnation, record.state, State.DELETING, cause, detail)
            record = await ground.record(sandbox_id)  # whoever was first, the record says where it is now
        if record.state is State.DELETED:
            return
        ground.last_look(machine(record))
        ground.turns.interrupt(sandbox_id)
        async with ground.turns.take(sandbox_id):
            await self.finish(record)

    async def expire(self, record: SandboxRecord, cause: Cause, detail: str) -> None:
        """Only if it is as it was when that was decided: whoever gives it a new ttl meanwhile keeps it."""
        moved = await self._ground.store.transition(
            record.id, record.incarnation, record.state, State.DELETING, cause, detail, unchanged=record
        )
        if moved:
            await self.delete(record.id)

    async def evict(self, record: SandboxRecord, detail: str) -> bool:
        """Only if nobody has taken it up meanwhile."""
        ground = self._ground
        if ground.turns.busy(record.id) or ground.activity.in_use(record.id):
            return False
        async with ground.turns.take(record.id):  # free, so there is no waiting
            moved = await ground.store.transition(
                record.id, record.incarnation, record.state, State.DELETING, Cause.EVICTED, detail
            )
            if not moved:
                return False
            reached("evict.recorded")
            await self.finish(await ground.record(record.id))
        await ground.store.add_event("sandbox.evicted", sandbox_id=record.id, cause=Cause.EVICTED, detail=detail)
        return True

    async def end_in_turn(self, record: SandboxRecord, cause: Cause, detail: str) -> SandboxRecord:
        """For a verb that has the turn already."""
        await self.finish(await self._ground.move(record, State.DELETING, cause, detail))
        return await self._ground.record(record.id)

    async def finish(self, record: SandboxRecord) -> None:
        """Remove what is left of a sandbox in DELETING. In its turn."""
        ground = self._ground
        try:
            async with asyncio.timeout(DESTROY_DEADLINE_S):
                # The one before it too: a verb that was interrupted may not have come to that.
                for number in range(max(1, record.incarnation - 1), record.incarnation + 2):
                    await ground.host.destroy(Incarnation(record.id, number))
                await self._drop_checkpoints(record.id)
        except TimeoutError:
            raise OperationTimeout(
                f"the machine of sandbox {record.id} was not gone within {DESTROY_DEADLINE_S:.0f} s; delete it again"
            ) from None
        reached("evict.destroyed")
        await ground.store.transition(
            record.id, record.incarnation, State.DELETING, State.DELETED, record.cause, record.cause_detail
        )
        ground.hot.pop(record.id, None)

    async def _drop_checkpoints(self, sandbox_id: str) -> None:
        """Nobody asked for automatic snapshots by name; those a user made outlive their sandbox."""
        for snapshot in await self._ground.store.list_snapshots(sandbox_id=sandbox_id, automatic=True):
            await self.drop_snapshot(snapshot.id)

    async def drop_snapshot(self, snapshot_id: str) -> bool:
        """False if somebody else has."""
        if not await self._ground.store.retire_snapshot(snapshot_id):
            return False
        await self._ground.host.delete_snapshot(snapshot_id)
        await self._ground.store.forget_snapshot(snapshot_id)
        return True

    async def delete_all(self) -> None:
        """Every sandbox that has a machine; the daemon does so when it is asked to leave nothing behind."""
        states = [state for state in State if state is not State.DELETED]
        for record in await self._ground.store.list_sandboxes(states=states):
            try:
                await self.delete(record.id)
            except ForkyardError as error:
                log.error("sandbox not deleted", sandbox=record.id, error=error.message)
