"""Schedules: runs that begin by the clock.

Owns: when. A run is on record, and its schedule has moved on, before it begins; so each time is used at most once, and a
daemon that starts anew goes on with what was begun. A time that passed while no daemon ran is made up for once. Never does:
what a run is (`runs`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import structlog

from forkyard.builds.cron import Cron
from forkyard.builds.runs import RUNS_KEPT, Runs, new_record, run_info
from forkyard.control.ground import new_id
from forkyard.control.plane import ControlPlane
from forkyard.errors import NotFound
from forkyard.models.runs import RunCreate, RunInfo, RunOutcome, ScheduleCreate, ScheduleInfo, ScheduleUpdate
from forkyard.store.runs import RunRecord, ScheduleRecord

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 30.0
AT_ONCE = 4
#: Before the second, third … try.
BACKOFF_S = 5.0


@dataclass(frozen=True)
class _Attempt:
    schedule_id: str | None
    task: asyncio.Task[None]


class Schedules:
    def __init__(self, control: ControlPlane, runs: Runs) -> None:
        self._store = control.ground.store
        self._runs = runs
        self._news = asyncio.Event()
        self._room = asyncio.Semaphore(AT_ONCE)
        self._under_way: dict[str, _Attempt] = {}  # by run
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        for record in await self._store.list_runs(states=["running"]):  # of a daemon that ended in the middle
            if record.schedule_id is not None:
                await self._attempted(record, RunOutcome(ok=False, error="the daemon was restarted", kind="host"))
        self._loop = asyncio.create_task(self._run(), name="schedules")

    async def stop(self) -> None:
        await _cancelled([*(one.task for one in self._under_way.values()), *([self._loop] if self._loop else [])])

    # ── schedules ────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(self, request: ScheduleCreate, *, key_id: str = "") -> ScheduleInfo:
        now = datetime.now(UTC)
        record = ScheduleRecord(
            id="sch-" + new_id(),
            key_id=key_id,
            name=request.name,
            cron=request.cron,
            timezone=request.timezone,
            retries=request.retries,
            request=request.run.model_dump(mode="json"),
            active=True,
            next_at=Cron.parse(request.cron, request.timezone).after(now),
            created_at=now,
            updated_at=now,
        )
        await self._store.add_schedule(record)
        self._news.set()
        return _info(record)

    async def get(self, schedule_id: str) -> ScheduleInfo:
        return _info(await self._found(schedule_id))

    async def list(self) -> list[ScheduleInfo]:
        return [_info(record) for record in await self._store.list_schedules()]

    async def update(self, schedule_id: str, request: ScheduleUpdate) -> ScheduleInfo:
        """Its next time is counted from now."""
        record = await self._found(schedule_id)
        values = {name: value for name, value in request.model_dump(exclude={"run"}).items() if value is not None}
        if request.run is not None:
            values["request"] = request.run.model_dump(mode="json")
        cron = Cron.parse(request.cron or record.cron, request.timezone or record.timezone)
        active = record.active if request.active is None else request.active
        values["next_at"] = cron.after(datetime.now(UTC)) if active else None
        await self._store.change_schedule(schedule_id, **values)
        self._news.set()
        return await self.get(schedule_id)

    async def delete(self, schedule_id: str) -> None:
        """With its history; what it had begun is ended."""
        if not await self._store.remove_schedule(schedule_id):
            raise _missing(schedule_id)
        await _cancelled([one.task for one in self._under_way.values() if one.schedule_id == schedule_id])

    async def runs(self, schedule_id: str, *, limit: int = 100, offset: int = 0) -> tuple[Sequence[RunInfo], int]:
        """Newest first, and how many there are."""
        await self._found(schedule_id)
        found = await self._store.list_runs(schedule_id=schedule_id, limit=limit, offset=offset)
        return [run_info(record) for record in found], await self._store.count_runs(schedule_id)

    async def _found(self, schedule_id: str) -> ScheduleRecord:
        record = await self._store.schedule(schedule_id)
        if record is None:
            raise _missing(schedule_id)
        return record

    # ── the clock ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self) -> None:
        while True:
            try:
                wait_s = await self._look(datetime.now(UTC))
            except Exception:
                log.exception("schedules were not looked at")
                wait_s = LOOK_EVERY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            self._news.clear()

    async def _look(self, now: datetime) -> float:
        """Begins what is due; returns how long nothing else will be."""
        times = []
        for schedule in await self._store.list_schedules():
            if not schedule.active or schedule.next_at is None:
                continue
            next_at = schedule.next_at
            if next_at <= now:
                next_at = Cron.parse(schedule.cron, schedule.timezone).after(now)
                run = new_record(
                    RunCreate.model_validate(schedule.request),
                    schedule.key_id,
                    now,
                    state="queued",
                    schedule_id=schedule.id,
                    tries=schedule.retries + 1,
                )
                await self._store.fire(schedule, next_at, run)
            times.append(next_at)
        for record in await self._store.list_runs(states=["queued", "retry"]):
            if record.next_at is None or record.next_at <= now:
                self._begin(record)
            else:
                times.append(record.next_at)
        await self._store.forget_runs(RUNS_KEPT)
        soonest = min(((at - now).total_seconds() for at in times), default=LOOK_EVERY_S)
        return min(max(soonest, 0.05), LOOK_EVERY_S)

    def _begin(self, record: RunRecord) -> None:
        if record.id not in self._under_way:
            task = asyncio.create_task(self._attempt(record), name=f"run {record.id}")
            self._under_way[record.id] = _Attempt(record.schedule_id, task)
            task.add_done_callback(lambda _: self._under_way.pop(record.id, None))

    async def _attempt(self, record: RunRecord) -> None:
        async with self._room:
            # What was read as due may have been begun and ended by another attempt while it was read.
            if not await self._store.begin_run(record, datetime.now(UTC)):
                return
            request = RunCreate.model_validate(record.request)
            await self._attempted(record, await self._runs.perform(record.id, request, record.key_id))

    async def _attempted(self, record: RunRecord, outcome: RunOutcome) -> None:
        now, attempts = datetime.now(UTC), record.attempts + 1
        again = not outcome.ok and attempts < record.max_attempts
        await self._store.change_run(
            record.id,
            state="succeeded" if outcome.ok else "retry" if again else "failed",
            attempts=attempts,
            outcome=outcome.model_dump(mode="json"),
            next_at=now + timedelta(seconds=BACKOFF_S * 2 ** (attempts - 1)) if again else None,
            finished_at=None if again else now,
        )
        self._news.set()


async def _cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _info(record: ScheduleRecord) -> ScheduleInfo:
    fields = {name: value for name, value in vars(record).items() if name not in ("request", "key_id")}
    return ScheduleInfo.model_validate({**fields, "run": record.request})


def _missing(schedule_id: str) -> NotFound:
    return NotFound(f"there is no schedule {schedule_id!r}")
