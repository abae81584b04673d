"""Keeps what should be (store) and what is (host) in step.

Owns: what becomes of each sandbox when the daemon starts, and when a machine ends by itself. Never does: anything a
user asked for (`sandboxes`).

A machine that ended by itself is not destroyed: its process and memory are gone, but its directory stays until the
sandbox is deleted, so that its logs can be read.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from forkyard.errors import ForkyardError
from forkyard.hosts.base import Ended, Host, Incarnation, Recovered
from forkyard.lifecycle import Cause, State
from forkyard.store.records import SandboxRecord
from forkyard.store.sql import Store
from forkyard.vmm.base import ExitKind

log = structlog.get_logger(__name__)

DESTROY_DEADLINE_S = 120.0

_CAUSE_OF = {
    ExitKind.PANIC: Cause.GUEST_PANIC,
    ExitKind.SHUTDOWN: Cause.GUEST_SHUTDOWN,
    ExitKind.CRASHED: Cause.VM_CRASHED,
    ExitKind.KILLED: Cause.VM_CRASHED,
}


@dataclass(frozen=True)
class Summary:
    """What a start found."""

    adopted: int
    failed: int
    deleted: int
    destroyed: int


class Reconciler:
    def __init__(self, store: Store, host: Host) -> None:
        self._store = store
        self._host = host

    async def recover(self) -> Summary:
        """Called once, before anything else may use the host."""
        records = await self._store.list_sandboxes(states=[state for state in State if state is not State.DELETED])
        found = await self._host.start()
        wanted: set[Incarnation] = set()
        adopted = failed = deleted = 0
        for record in records:
            incarnation = Incarnation(record.id, record.incarnation)
            if record.state is State.RUNNING and incarnation in found.adopted:
                wanted.add(incarnation)
                adopted += 1
                await self._store.add_event(
                    "sandbox.adopted", sandbox_id=record.id, cause=Cause.DAEMON_RESTARTED, detail="it kept running"
                )
            elif record.state is State.RUNNING:
                wanted.add(incarnation)
                failed += 1
                await self._fail(record, *_why_gone(incarnation, found))
            elif record.state is State.CREATING:
                failed += 1
                await self._destroy(incarnation)
                await self._fail(
                    record,
                    Cause.DAEMON_RESTARTED,
                    "the daemon was restarted while it was being created; create it again",
                )
            elif record.state is State.DELETING and await self._destroy(incarnation):
                deleted += 1
                await self._store.transition(
                    record.id, record.incarnation, State.DELETING, State.DELETED, Cause.DELETED_BY_USER
                )
            elif record.state is State.FAILED and incarnation in found.dead:
                wanted.add(incarnation)
        unwanted = (found.adopted | found.dead) - wanted
        for incarnation in unwanted:
            await self._destroy(incarnation)
        summary = Summary(adopted, failed, deleted, len(unwanted))
        log.info("recovered", adopted=adopted, failed=failed, deleted=deleted, destroyed=len(unwanted))
        return summary

    async def watch(self) -> None:
        """Runs as long as the daemon does: the only consumer of `Host.ended`."""
        async for ended in self._host.ended():
            try:
                await self.machine_ended(ended)
            except Exception:
                log.exception("the end of a machine could not be recorded", vm=str(ended.incarnation))

    async def machine_ended(self, ended: Ended) -> None:
        sandbox_id, number = ended.incarnation.sandbox_id, ended.incarnation.number
        cause = _CAUSE_OF[ended.exit.kind]
        # CREATING too: it can end between its first answer and the record of it. While DELETING its end is what was
        # asked.
        for state in (State.RUNNING, State.CREATING):
            if await self._store.transition(sandbox_id, number, state, State.FAILED, cause, ended.exit.detail):
                log.warning("sandbox failed", sandbox=sandbox_id, cause=cause, detail=ended.exit.detail)
                return

    async def _fail(self, record: SandboxRecord, cause: Cause, detail: str) -> None:
        await self._store.transition(record.id, record.incarnation, record.state, State.FAILED, cause, detail)

    async def _destroy(self, incarnation: Incarnation) -> bool:
        """A leftover that cannot be removed must not keep the daemon from starting; the next start tries again."""
        try:
            async with asyncio.timeout(DESTROY_DEADLINE_S):
                await self._host.destroy(incarnation)
        except (ForkyardError, OSError, TimeoutError):
            log.exception("leftovers could not be removed", vm=str(incarnation))
            return False
        return True


def _why_gone(incarnation: Incarnation, found: Recovered) -> tuple[Cause, str]:
    if found.rebooted:
        return Cause.HOST_RESTARTED, "the host was restarted, and what was in the machine's memory is lost"
    if incarnation in found.dead:
        return Cause.VM_CRASHED, "the machine ended while no daemon was running; `forkyard logs` shows its console"
    return (
        Cause.DAEMON_RESTARTED,
        "after its restart the daemon found no trace of the machine; was the state or run directory removed?",
    )
