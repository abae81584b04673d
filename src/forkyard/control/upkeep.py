"""What happens with time: ttl, idle sleep, cooling, checkpoints.

Owns: one task that looks at every living sandbox once a second, and starts what is due. Never does: the verbs (`sleep`,
`removal`, `snapshots`); it calls them as a user would, one at a time per sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial

import structlog

from forkyard.control.ground import Ground, Hot
from forkyard.control.idle import Idle
from forkyard.control.network import Networks
from forkyard.control.power import Power
from forkyard.control.removal import Removal
from forkyard.control.sleep import Sleep
from forkyard.control.snapshots import Snapshots
from forkyard.errors import ForkyardError
from forkyard.lifecycle import Cause, State
from forkyard.store.records import SandboxRecord

log = structlog.get_logger(__name__)

TICK_S = 1.0
#: `last_active_at` is this precise in the database while a sandbox runs.
PERSIST_EVERY = timedelta(seconds=30)
#: A sleeper that could not be moved to disk is left alone for this long.
COOL_RETRY_S = 30.0
#: A delete that failed is tried again this often: whoever asked for it may be gone.
DELETE_RETRY_S = 30.0

#: How often it is looked for records that are old enough to be forgotten.
FORGET_EVERY_S = 3600.0

Work = Callable[[], Awaitable[None]]
_ENDS_IN = {"ephemeral": (State.PAUSED, State.STOPPED), "until-stopped": (State.STOPPED,)}


class Upkeep:
    def __init__(
        self, ground: Ground, removal: Removal, sleep: Sleep, power: Power, snapshots: Snapshots, networks: Networks
    ) -> None:
        self._ground = ground
        self._networks = networks
        self._removal = removal
        self._sleep = sleep
        self._power = power
        self._snapshots = snapshots
        self._idle = Idle(ground)
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._checkpointed: dict[str, float] = {}  # when its newest checkpoint began
        self._seen_deleting: dict[str, float] = {}
        self._forgot_at: float | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.tick()
            except Exception:
                log.exception("upkeep failed; it goes on")

    async def stop(self) -> None:
        jobs = list(self._jobs.values())
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    async def tick(self) -> None:
        """Look at all; what takes time goes on after this returns (`settle` waits for it)."""
        records = await self._ground.store.list_unfinished()
        known = {record.id for record in records}
        self._ground.activity.keep_only(known)
        self._idle.keep_only(known)
        for times in (self._checkpointed, self._seen_deleting):
            for sandbox_id in times.keys() - known:
                del times[sandbox_id]
        for record in records:
            if record.id not in self._jobs:
                work = self._due(record)
                if work is not None:
                    self._begin(record.id, work)
        await self._networks.look(records)
        await self._forget()

    async def _forget(self) -> None:
        """What was deleted long ago."""
        now = self._ground.activity.clock()
        if self._forgot_at is not None and now - self._forgot_at < FORGET_EVERY_S:
            return
        self._forgot_at = now
        before = datetime.now(UTC) - timedelta(seconds=self._ground.limits.retention_s)
        while await self._ground.store.forget_ended(before):
            pass

    async def settle(self) -> None:
        """Wait for what the ticks so far have begun."""
        while self._jobs:
            await asyncio.wait(list(self._jobs.values()))

    def _begin(self, sandbox_id: str, work: Work) -> None:
        job = asyncio.create_task(self._job(sandbox_id, work), name=f"upkeep {sandbox_id}")
        self._jobs[sandbox_id] = job
        job.add_done_callback(lambda _: self._jobs.pop(sandbox_id, None))

    async def _job(self, sandbox_id: str, work: Work) -> None:
        try:
            await work()
        except ForkyardError as error:
            log.warning("upkeep of a sandbox failed", sandbox=sandbox_id, error=error.message)
        except Exception:
            log.exception("upkeep of a sandbox failed", sandbox=sandbox_id)

    def _due(self, record: SandboxRecord) -> Work | None:
        now = self._ground.activity.clock()
        if record.state is State.DELETING:
            return partial(self._delete_again, record) if self._delete_is_stuck(record, now) else None
        if record.expires_at is not None and record.expires_at <= datetime.now(UTC) and self._ttl_matters(record):
            if record.on_ttl == "pause":
                return partial(self._pause_at_ttl, record.id)
            if record.on_ttl == "stop":
                return partial(self._stop_at_ttl, record.id)
            return partial(self._removal.expire, record, Cause.TTL, f"its ttl of {record.ttl_s:g} s has passed")
        if record.state in _ENDS_IN.get(record.persistence, ()):
            detail = f"it is {record.persistence}, and {record.state}"
            return partial(self._removal.expire, record, Cause.EPHEMERAL, detail)
        if record.state is State.RUNNING:
            return partial(self._look_after, record)
        hot = self._ground.hot.get(record.id)
        if record.state is State.PAUSED and hot is not None and now - hot.since >= self._ground.limits.cool_after_s:
            return partial(self._cool, record.id, hot)
        return None

    @staticmethod
    def _ttl_matters(record: SandboxRecord) -> bool:
        return record.on_ttl == "delete" or record.state is State.RUNNING

    async def _pause_at_ttl(self, sandbox_id: str) -> None:
        await self._sleep.pause(sandbox_id, Cause.TTL)

    async def _stop_at_ttl(self, sandbox_id: str) -> None:
        await self._power.stop(sandbox_id, Cause.TTL)

    def _delete_is_stuck(self, record: SandboxRecord, now: float) -> bool:
        if self._ground.turns.busy(record.id):
            return False
        return now - self._seen_deleting.setdefault(record.id, now) >= DELETE_RETRY_S

    async def _delete_again(self, record: SandboxRecord) -> None:
        self._seen_deleting[record.id] = self._ground.activity.clock()
        await self._removal.delete(record.id)

    async def _look_after(self, record: SandboxRecord) -> None:
        if await self._idle.is_due(record):
            await self._sleep.pause(record.id, Cause.IDLE, if_idle_for_s=record.idle_timeout_s)
            return
        if self._checkpoint_is_due(record):
            await self._checkpoint(record)
        last_active_at = self._ground.activity.last_at(record.id)
        if record.last_active_at is None or last_active_at - record.last_active_at >= PERSIST_EVERY:
            await self._ground.store.touch_sandbox(record.id, last_active_at)

    async def _cool(self, sandbox_id: str, hot: Hot) -> None:
        cooled = await self._sleep.cool_if_free(sandbox_id)
        if not cooled and self._ground.hot.get(sandbox_id) is hot:
            wait_s = max(COOL_RETRY_S - self._ground.limits.cool_after_s, 0.0)
            self._ground.hot[sandbox_id] = Hot(hot.memory_mib, self._ground.activity.clock() + wait_s)

    def _checkpoint_is_due(self, record: SandboxRecord) -> bool:
        if record.checkpoint_every_s is None:
            return False
        now = self._ground.activity.clock()
        return now - self._checkpointed.setdefault(record.id, now) >= record.checkpoint_every_s

    async def _checkpoint(self, record: SandboxRecord) -> None:
        """Only if something can have changed since the last one."""
        await self._idle.look(record)
        now = self._ground.activity.clock()
        if self._ground.activity.idle_s(record.id) <= now - self._checkpointed[record.id]:
            self._checkpointed[record.id] = now
            await self._snapshots.checkpoint(record.id)
