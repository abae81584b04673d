"""Keeps what should be (store) and what is (host) in step.

Owns: what becomes of each sandbox when the daemon starts (by the table in `recovery`), and when a machine ends by
itself. Never does: anything a user asked for.

A machine that ended by itself is not destroyed: its process and memory are gone, but its disk and its logs stay until
the sandbox is deleted, so that it can be started again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from forkyard.control.ground import DESTROY_DEADLINE_S, Ground, Hot, machine, successor
from forkyard.control.recovery import SUCCEEDED, Found, decide, find
from forkyard.errors import ForkyardError
from forkyard.hosts.base import Ended, Incarnation, Recovered
from forkyard.lifecycle import Cause, State
from forkyard.store.records import SandboxRecord
from forkyard.vmm.base import ExitKind

log = structlog.get_logger(__name__)

_CAUSE_OF = {
    ExitKind.PANIC: Cause.GUEST_PANIC,
    ExitKind.OUT_OF_MEMORY: Cause.GUEST_OUT_OF_MEMORY,
    ExitKind.SHUTDOWN: Cause.GUEST_SHUTDOWN,
    ExitKind.CRASHED: Cause.VM_CRASHED,
    ExitKind.KILLED: Cause.VM_CRASHED,
}
#: With a machine that can end. While DELETING its end is what was asked; while STARTING there is none to end yet.
_CAN_END = frozenset({State.RUNNING, State.PAUSING, State.PAUSED, State.RESUMING, State.STOPPING})


@dataclass(frozen=True)
class Summary:
    """What a start found."""

    adopted: int
    paused: int
    stopped: int
    failed: int
    deleted: int
    destroyed: int
    #: They should run, and stand still: a fork or a snapshot of them was cut off.
    to_wake: tuple[str, ...]


class Reconciler:
    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._store = ground.store
        self._host = ground.host

    # ── the start of the daemon ──────────────────────────────────────────────────────────────────────────────────

    async def recover(self) -> Summary:
        """Called once, before anything else may use the host."""
        records = await self._store.list_sandboxes(states=[state for state in State if state is not State.DELETED])
        found = await self._host.start()
        wanted: set[Incarnation] = set()
        counts = dict.fromkeys(State, 0)
        to_wake: list[str] = []
        for record in records:
            if record.state is State.CREATING:
                await self._undo_create(record)
                counts[State.FAILED] += 1
            elif record.state is State.DELETING:
                counts[State.DELETED] += await self._finish_delete(record)
            else:
                kept, state = await self._settle(record, found)
                wanted |= kept
                counts[state] += state is not State.FAILED or record.state is not State.FAILED
                if record.state is State.RUNNING and state is State.PAUSED:
                    to_wake.append(record.id)
        unwanted = (found.adopted | found.paused | found.stopped | found.dead) - wanted
        for incarnation in unwanted:
            await self._destroy(incarnation)
        await self._clear_half_snapshots()
        summary = Summary(
            counts[State.RUNNING],
            counts[State.PAUSED],
            counts[State.STOPPED],
            counts[State.FAILED],
            counts[State.DELETED],
            len(unwanted),
            tuple(to_wake),
        )
        log.info("recovered", **{str(state): count for state, count in counts.items() if count}, removed=len(unwanted))
        return summary

    async def _undo_create(self, record: SandboxRecord) -> None:
        await self._destroy(machine(record))
        await self._store.transition(
            record.id,
            record.incarnation,
            State.CREATING,
            State.FAILED,
            Cause.CREATE_FAILED,
            "the daemon was restarted while it was being created; create it again",
        )

    async def _finish_delete(self, record: SandboxRecord) -> bool:
        if not (await self._destroy(machine(record)) and await self._destroy(successor(record))):
            return False
        for snapshot in await self._store.list_snapshots(sandbox_id=record.id, automatic=True):
            await self._store.retire_snapshot(snapshot.id)  # cleared away with the half-made ones
        moved = await self._store.transition(
            record.id, record.incarnation, State.DELETING, State.DELETED, record.cause, record.cause_detail
        )
        return moved is not None

    async def _settle(self, record: SandboxRecord, found: Recovered) -> tuple[set[Incarnation], State]:
        """The machines to keep, and the state it is in now."""
        incarnation = machine(record)
        if record.state in SUCCEEDED:
            following = find(successor(record), found)
            if following is Found.RUNNING or (
                following is not Found.NOTHING and find(incarnation, found) is Found.NOTHING
            ):
                incarnation = successor(record)
        there = find(incarnation, found)
        if record.state is State.FAILED:
            return await self._keep_disk(record, there), State.FAILED
        verdict = decide(record.state, there, rebooted=found.rebooted)
        state: State = verdict.state or record.state
        if verdict.state is not None:
            at: State = record.state
            if verdict.via is not None:
                await self._store.transition(
                    record.id, record.incarnation, at, verdict.via, verdict.cause, verdict.detail
                )
                at = verdict.via
            await self._store.transition(
                record.id,
                record.incarnation,
                at,
                state,
                verdict.cause,
                verdict.detail,
                next_incarnation=incarnation.number if incarnation != machine(record) else None,
            )
        if state is State.RUNNING:
            await self._store.add_event(
                "sandbox.adopted", sandbox_id=record.id, cause=Cause.DAEMON_RESTARTED, detail="it kept running"
            )
        elif state is State.PAUSED:  # perhaps on disk already: to move it there again costs nothing
            self._ground.hot[record.id] = Hot(record.shape.memory_mib, self._ground.activity.clock())
        return {incarnation}, state

    async def _keep_disk(self, record: SandboxRecord, there: Found) -> set[Incarnation]:
        """A failed sandbox has no running machine, but perhaps a disk to start again."""
        if record.cause is Cause.CREATE_FAILED:
            return set()
        if there in (Found.RUNNING, Found.PAUSED):
            try:
                await self._host.power_off(machine(record))
            except (ForkyardError, OSError):
                log.exception("a machine that should not run could not be stopped", vm=str(machine(record)))
        return {machine(record)}

    async def _clear_half_snapshots(self) -> None:
        for snapshot in await self._store.list_snapshots(ready=False):
            try:
                await self._host.delete_snapshot(snapshot.id)
                await self._store.forget_snapshot(snapshot.id)
            except (ForkyardError, OSError):
                log.exception("half a snapshot could not be removed", snapshot=snapshot.id)

    async def _destroy(self, incarnation: Incarnation) -> bool:
        """A leftover that cannot be removed must not keep the daemon from starting; the next start tries again."""
        try:
            async with asyncio.timeout(DESTROY_DEADLINE_S):
                await self._host.destroy(incarnation)
        except (ForkyardError, OSError, TimeoutError):
            log.exception("leftovers could not be removed", vm=str(incarnation))
            return False
        return True

    # ── a machine ends ───────────────────────────────────────────────────────────────────────────────────────────

    async def watch(self) -> None:
        """Runs as long as the daemon does: the only consumer of `Host.ended`."""
        async for ended in self._host.ended():
            self._ground.turns.keep(asyncio.create_task(self._note(ended), name=f"end of {ended.incarnation}"))

    async def _note(self, ended: Ended) -> None:
        try:
            await self.machine_ended(ended)
        except Exception:
            log.exception("the end of a machine could not be recorded", vm=str(ended.incarnation))

    async def machine_ended(self, ended: Ended) -> None:
        sandbox_id, number = ended.incarnation.sandbox_id, ended.incarnation.number
        cause, detail = _CAUSE_OF[ended.exit.kind], ended.exit.detail
        # It can end between its first answer and the record of it. The create then finds it failed.
        if await self._store.transition(sandbox_id, number, State.CREATING, State.FAILED, cause, detail):
            return
        # A verb under way knows best what its machine should be, and may be about to record a new one: after it.
        async with self._ground.turns.take(sandbox_id):
            record = await self._store.sandbox(sandbox_id)
            if record is None or record.incarnation != number or record.state not in _CAN_END:
                return
            to = State.STOPPED if ended.exit.kind is ExitKind.SHUTDOWN else State.FAILED
            if await self._store.transition(sandbox_id, number, record.state, to, cause, detail):
                self._ground.hot.pop(sandbox_id, None)
                log.warning(f"sandbox {to}", sandbox=sandbox_id, cause=cause, detail=detail)
