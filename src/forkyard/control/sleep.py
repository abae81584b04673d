"""Pause, resume, wake, cool.

Owns: the way into sleep and out of it. A pause keeps the memory where it is (hot); `cool` moves it to disk later. A
sandbox that is asked for while it sleeps is woken once, however many ask.
"""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from forkyard.control.ground import Ground, Hot, known, machine, refusal, sandbox_info, successor
from forkyard.control.removal import Removal
from forkyard.control.room import MIB, Room
from forkyard.control.turns import outcome
from forkyard.errors import ForkyardError, OperationTimeout
from forkyard.faults import reached
from forkyard.lifecycle import Cause, State
from forkyard.models import SandboxInfo
from forkyard.store.records import SandboxRecord

log = structlog.get_logger(__name__)

PAUSE_DEADLINE_S = 60.0
RESUME_DEADLINE_S = 600.0  # a boot from disk, on a busy host
COOL_DEADLINE_S = 600.0
#: Under way in another verb's turn: who asks for the guest waits for its outcome.
_COMING = frozenset({State.PAUSING, State.PAUSED, State.RESUMING, State.STARTING})


class Sleep:
    def __init__(self, ground: Ground, removal: Removal, room: Room) -> None:
        self._ground = ground
        self._removal = removal
        self._room = room
        self._waking: dict[str, asyncio.Task[SandboxRecord]] = {}

    # ── pause ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def pause(
        self,
        sandbox_id: str,
        cause: Cause = Cause.PAUSED_BY_USER,
        *,
        if_idle_for_s: float | None = None,
        durable: bool = False,
        hold_ttl: bool = False,
    ) -> SandboxInfo:
        """Pausing what is paused is fine. An ephemeral sandbox is deleted instead. `if_idle_for_s`: only if it has
        not been used for so long when its turn comes. `durable`: its memory is on disk when this returns; if it cannot
        be put there the sandbox is paused all the same. `hold_ttl`: its ttl stands still while it sleeps, and begins anew
        when it wakes."""
        work = partial(self._pause, sandbox_id, cause, if_idle_for_s, hold_ttl)
        paused = sandbox_info(await self._ground.turns.run(sandbox_id, "pause", work))
        if durable and paused.state is State.PAUSED:
            await self._ground.turns.run(sandbox_id, "cool", partial(self._cool, sandbox_id))
        return paused

    async def _pause(self, sandbox_id: str, cause: Cause, if_idle_for_s: float | None, hold_ttl: bool) -> SandboxRecord:
        ground = self._ground
        record = await ground.record(sandbox_id)
        if record.state is State.PAUSED:
            return record
        if record.state is not State.RUNNING:
            raise refusal(record, "only a running sandbox can be paused")
        if self._wanted(sandbox_id, if_idle_for_s):
            return record
        last_active_at = ground.activity.last_at(sandbox_id)
        # Not durable, this and what follows, while its memory is not on disk: a power cut ends it, paused or not.
        record = await ground.move(
            record, State.PAUSING, cause, last_active_at=last_active_at, durable=False, hold_ttl=hold_ttl
        )
        # A call counts itself before it reads the state. So one that still saw `running` is counted by now, and one
        # that is not counted yet will see `pausing` and wake it.
        if self._wanted(sandbox_id, if_idle_for_s):
            return await ground.move(record, State.RUNNING, Cause.WOKEN, "it was used just as it fell asleep")
        reached("pause.recorded")
        if record.persistence == "ephemeral":
            return await self._removal.end_in_turn(
                record, Cause.EPHEMERAL, f"it is ephemeral, and was paused ({cause})"
            )
        try:
            async with asyncio.timeout(PAUSE_DEADLINE_S):
                await ground.host.pause(machine(record))
        except TimeoutError:
            error = OperationTimeout(f"sandbox {sandbox_id} was not paused within {PAUSE_DEADLINE_S:.0f} s; it runs on")
            await ground.move_back(record, State.RUNNING, Cause.PAUSE_FAILED, error)
            raise error from None
        except Exception as error:
            await ground.move_back(record, State.RUNNING, Cause.PAUSE_FAILED, error)
            raise known(error, "pause", sandbox_id) from error
        record = await ground.move(record, State.PAUSED, cause, durable=False)
        self.note_hot(record)
        return record

    def _wanted(self, sandbox_id: str, if_idle_for_s: float | None) -> bool:
        return if_idle_for_s is not None and self._ground.activity.idle_s(sandbox_id) < if_idle_for_s

    def note_hot(self, record: SandboxRecord) -> None:
        self._ground.hot[record.id] = Hot(record.shape.memory_mib, self._ground.activity.clock())

    # ── resume ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def resume(self, sandbox_id: str, *, memory: bool = True, ttl_s: float | None = None) -> SandboxInfo:
        """Resuming what runs is fine. Without `memory`, what was in memory is dropped and its disk is booted. `ttl_s`: how
        long it lasts from then on."""
        with self._ground.activity.using(sandbox_id):
            work = partial(self._resume, sandbox_id, Cause.RESUMED_BY_USER, memory=memory, ttl_s=ttl_s)
            return sandbox_info(await self._ground.turns.run(sandbox_id, "resume", work))

    async def wake(self, sandbox_id: str, *, ttl_s: float | None = None) -> SandboxRecord:
        """Somebody wants in. All who ask while it wakes get the same outcome. `ttl_s`: how long it lasts from then on."""
        task = self._waking.get(sandbox_id)
        if task is None:
            work = partial(self._resume, sandbox_id, Cause.WOKEN, ttl_s=ttl_s)
            task = self._ground.turns.begin(sandbox_id, "wake", work)
            self._waking[sandbox_id] = task
            task.add_done_callback(lambda _: self._waking.pop(sandbox_id, None))
        return await outcome(task)

    async def awake(self, sandbox_id: str) -> SandboxRecord:
        """The record of a running sandbox, woken if need be."""
        record = await self._ground.record(sandbox_id)
        if record.state in _COMING:
            record = await self.wake(sandbox_id)
        if record.state is not State.RUNNING:
            raise refusal(record, "it is not running")
        return record

    async def _resume(
        self, sandbox_id: str, cause: Cause, *, memory: bool = True, ttl_s: float | None = None
    ) -> SandboxRecord:
        ground = self._ground
        record = await ground.record(sandbox_id)
        if record.state is State.RUNNING:
            return record
        if record.state is State.STOPPED:
            raise refusal(record, "nothing of its memory is kept", "start it to boot its disk")
        if record.state is not State.PAUSED:
            raise refusal(record, "only a paused sandbox can be resumed")
        paused = record
        admission = partial(ground.admission, record.shape.memory_mib, sandbox_id=sandbox_id)
        record = await self._room.in_memory(
            lambda: ground.move(paused, State.RESUMING, cause, admit=admission(), durable=False), cooler=self
        )
        reached("resume_hot.recorded")
        template = None
        try:
            async with asyncio.timeout(RESUME_DEADLINE_S):
                if memory:
                    network = await ground.network_of(record)
                    now = await ground.host.resume(machine(record), successor(record), network)
                else:
                    now = successor(record)
                    template = (await ground.host.boot(machine(record), now, await ground.spec_of(record))).template
                await ground.prepare(record, now)
        except TimeoutError:
            error = OperationTimeout(f"sandbox {sandbox_id} was not awake within {RESUME_DEADLINE_S:.0f} s")
            await ground.move_back(record, State.PAUSED, Cause.RESUME_FAILED, error)
            raise error from None
        except Exception as error:
            await ground.move_back(record, State.PAUSED, Cause.RESUME_FAILED, error)
            raise known(error, "resume", sandbox_id) from error
        reached("resume_cold.made")
        ground.hot.pop(sandbox_id, None)
        ground.activity.touch(sandbox_id)
        # The same machine goes on in memory, or another took its place: that one must not be forgotten.
        same = now == machine(record)
        return await ground.move(
            record, State.RUNNING, cause, next_incarnation=now.number, template=template, durable=not same, ttl_s=ttl_s
        )

    # ── cool ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def cool_if_free(self, sandbox_id: str) -> bool:
        """Move the memory of a sleeper to disk, unless some verb has its turn. False if it holds it still."""
        if self._ground.turns.busy(sandbox_id):
            return False
        try:
            return await self._ground.turns.run(sandbox_id, "cool", partial(self._cool, sandbox_id))
        except ForkyardError as error:
            log.warning("sandbox not cooled", sandbox=sandbox_id, error=error.message)
            return False

    async def _cool(self, sandbox_id: str) -> bool:
        ground = self._ground
        record = await ground.record(sandbox_id)
        if record.state is not State.PAUSED:
            ground.hot.pop(sandbox_id, None)
            return True
        await self._room.on_disk(record.shape.memory_mib * MIB, f"the memory of sandbox {sandbox_id}", spare=sandbox_id)
        try:
            async with asyncio.timeout(COOL_DEADLINE_S):
                await ground.store.sync()  # that it is paused: its memory will be found only by a record that says so
                await ground.host.cool(machine(record))
        except TimeoutError:
            raise OperationTimeout(f"it was not on disk within {COOL_DEADLINE_S:.0f} s") from None
        except Exception as error:
            raise known(error, "cool", sandbox_id) from error
        ground.hot.pop(sandbox_id, None)
        return True
