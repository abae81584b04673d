"""Stop, start, resize.

Owns: what happens to a machine without its memory. A stop leaves the disk; a start boots it, also that of a sandbox
that failed. A new size takes effect by a boot.
"""

from __future__ import annotations

import asyncio
from functools import partial

from forkyard.control.ground import Ground, known, machine, refusal, sandbox_info, successor
from forkyard.control.removal import Removal
from forkyard.control.room import Room
from forkyard.control.sleep import Sleep
from forkyard.errors import InvalidShape, OperationTimeout, SandboxNotFound, StateConflict
from forkyard.lifecycle import Cause, State
from forkyard.models import SandboxInfo, SandboxResize, Shape
from forkyard.store.records import SandboxRecord

STOP_DEADLINE_S = 120.0
BOOT_DEADLINE_S = 600.0


class Power:
    def __init__(self, ground: Ground, removal: Removal, room: Room, sleep: Sleep) -> None:
        self._ground = ground
        self._removal = removal
        self._room = room
        self._sleep = sleep

    # ── stop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def stop(
        self, sandbox_id: str, cause: Cause = Cause.STOPPED_BY_USER, *, hold_ttl: bool = False
    ) -> SandboxInfo:
        """Shut it down; only its disk remains. Stopping what is stopped is fine. One that does not outlast it is deleted.
        `hold_ttl`: its ttl stands still until it is started."""
        work = partial(self._stop, sandbox_id, cause, hold_ttl)
        return sandbox_info(await self._ground.turns.run(sandbox_id, "stop", work))

    async def _stop(self, sandbox_id: str, cause: Cause, hold_ttl: bool) -> SandboxRecord:
        ground = self._ground
        before = await ground.record(sandbox_id)
        if before.state is State.STOPPED:
            return before
        if before.state not in (State.RUNNING, State.PAUSED):
            raise refusal(before, "only a running or paused sandbox can be stopped")
        record = await ground.move(before, State.STOPPING, cause, hold_ttl=hold_ttl)
        if record.persistence in ("ephemeral", "until-stopped"):
            return await self._removal.end_in_turn(
                record, Cause.EPHEMERAL, f"it is {record.persistence}, and was stopped"
            )
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await ground.host.power_off(machine(record))
        except TimeoutError:
            error = OperationTimeout(f"sandbox {sandbox_id} did not stop within {STOP_DEADLINE_S:.0f} s")
            await ground.move_back(record, before.state, Cause.STOP_FAILED, error)
            raise error from None
        except Exception as error:
            await ground.move_back(record, before.state, Cause.STOP_FAILED, error)
            raise known(error, "stop", sandbox_id) from error
        ground.hot.pop(sandbox_id, None)
        return await ground.move(record, State.STOPPED, cause)

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, sandbox_id: str, *, ttl_s: float | None = None) -> SandboxInfo:
        """Boot it from its disk. Starting what runs is fine. `ttl_s`: how long it lasts from then on."""
        with self._ground.activity.using(sandbox_id):
            work = partial(self._start, sandbox_id, ttl_s)
            return sandbox_info(await self._ground.turns.run(sandbox_id, "start", work))

    async def _start(self, sandbox_id: str, ttl_s: float | None) -> SandboxRecord:
        ground = self._ground
        before = await ground.record(sandbox_id)
        if before.state is State.RUNNING:
            return before
        if before.state not in (State.STOPPED, State.FAILED):
            raise refusal(before, "only a stopped or failed sandbox can be started")
        admission = partial(ground.admission, before.shape.memory_mib)
        record = await self._room.in_memory(
            lambda: ground.move(before, State.STARTING, Cause.STARTED_BY_USER, admit=admission()), cooler=self._sleep
        )
        try:
            async with asyncio.timeout(BOOT_DEADLINE_S):
                spec = await ground.spec_of(record)
                created = await ground.host.boot(machine(record), successor(record), spec)
                await ground.prepare(record, successor(record))
        except TimeoutError:
            error = OperationTimeout(f"sandbox {sandbox_id} did not boot within {BOOT_DEADLINE_S:.0f} s")
            await ground.move_back(record, before.state, Cause.START_FAILED, error)
            raise error from None
        except SandboxNotFound:
            await ground.store.transition(
                record.id, record.incarnation, State.STARTING, State.FAILED, before.cause, before.cause_detail
            )
            raise StateConflict(
                f"nothing of sandbox {sandbox_id} is left to start ({before.cause}); create a new one",
                state=State.FAILED,
            ) from None
        except Exception as error:
            await ground.move_back(record, before.state, Cause.START_FAILED, error)
            raise known(error, "start", sandbox_id) from error
        ground.activity.touch(sandbox_id)
        return await ground.move(
            record,
            State.RUNNING,
            Cause.STARTED_BY_USER,
            next_incarnation=record.incarnation + 1,
            template=created.template,
            ttl_s=ttl_s,
            data={"milestones_ms": {milestone.name: milestone.at_ms for milestone in created.milestones}},
        )

    # ── resize ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def resize(self, sandbox_id: str, request: SandboxResize) -> SandboxInfo:
        """A new size takes effect at the next boot from disk. Of a paused sandbox only the disk may grow: it is to be
        resumed with the processors and the memory it was paused with."""
        work = partial(self._resize, sandbox_id, request)
        return sandbox_info(await self._ground.turns.run(sandbox_id, "resize", work))

    async def _resize(self, sandbox_id: str, request: SandboxResize) -> SandboxRecord:
        ground = self._ground
        record = await ground.record(sandbox_id)
        if record.state not in (State.STOPPED, State.FAILED, State.PAUSED):
            raise refusal(record, "it can be resized when it is stopped", "stop it first")
        wanted = {**record.shape.model_dump(), **request.model_dump(exclude_none=True)}
        shape = Shape.model_validate(wanted)
        if shape.disk_gib < record.shape.disk_gib:
            raise InvalidShape(
                f"the disk of sandbox {sandbox_id} has {record.shape.disk_gib} GiB; a disk only grows, not to "
                f"{shape.disk_gib}"
            )
        if record.state is State.PAUSED and shape != record.shape.model_copy(update={"disk_gib": shape.disk_gib}):
            raise refusal(
                record,
                "other processors or memory need a boot, which would drop what is in its memory",
                "stop it first, then resize and start it",
            )
        await ground.store.update_sandbox(sandbox_id, shape.model_dump(), states=[record.state])
        return await ground.record(sandbox_id)
