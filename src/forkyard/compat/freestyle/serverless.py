"""Scripts: run once, or by a schedule. Deployments are not served."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pydantic import Field
from starlette.responses import Response

from forkyard.builds.runs import Runs
from forkyard.builds.schedules import Schedules
from forkyard.compat.freestyle.calls import ACCOUNT, Body, Call, done, ours, time_of
from forkyard.compat.freestyle.errors import Refused, not_served
from forkyard.errors import NotFound
from forkyard.models.runs import RunCreate, RunInfo, RunOutcome, ScheduleCreate, ScheduleInfo, ScheduleUpdate

MOST = 1000
_STATES = {
    "queued": "starting",
    "running": "running",
    "retry": "running",
    "succeeded": "complete",
    "failed": "complete",
}


class _Config(Body):
    env: dict[str, str] | None = Field(None, alias="envVars")
    node_modules: dict[str, str] | None = Field(None, alias="nodeModules")
    timeout_s: float | None = Field(None, alias="timeout")
    permissions: list[Any] | None = Field(None, alias="networkPermissions")
    egress: dict[str, Any] | None = None
    proxy: Any = None
    headers: dict[str, Any] | None = Field(None, alias="customHeaders")
    forget: bool | None = Field(None, alias="zeroRetention")


class _Script(Body):
    script: str
    config: _Config | None = None


class _Run(_Config):
    """Of a schedule: the configuration, with the script beside it under one of these names."""

    code: str | None = None
    script: str | None = None


class _NewSchedule(Body):
    deployment: str | None = Field(None, alias="deploymentId")
    run: _Run | None = None
    name: str | None = None
    cron: str | None = None
    timezone: str | None = None
    retries: int | None = None
    payload: Any = None
    active: bool | None = None


class Serverless:
    def __init__(self, runs: Runs, schedules: Schedules) -> None:
        self._runs = runs
        self._schedules = schedules

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, call: Call) -> Response:
        body = await call.body(_Script)
        wanted = _wanted(body.script, body.config or _Config())
        keep = not (body.config and body.config.forget)
        made = await self._runs.create(wanted, key_id=call.who.id, keep=keep)
        outcome = made.outcome
        assert outcome is not None
        logs = [one.model_dump() for one in outcome.logs]
        if outcome.ok:
            return done({"result": outcome.result, "logs": logs, **({"runId": made.id} if keep else {})})
        message = outcome.error or "it failed"
        if outcome.kind == "syntax":
            raise Refused(400, "SYNTAX_ERROR", message, logs=logs)
        if outcome.kind == "host":
            raise Refused(500, "EXECUTE_INTERNAL_ERROR", message)
        raise Refused(500, "RUNTIME_ERROR", message, logs=logs, stack=outcome.stack)

    async def listed(self, call: Call) -> Response:
        limit, offset = call.number("limit", 50, 1, MOST), call.number("offset", 0)
        found, total = await self._runs.list(limit=limit, offset=offset)
        rows = [_entry(one, await self._runs.asked(one.id)) for one in found]
        return done({"entries": rows, "total": total, "offset": offset + len(found)})

    async def get(self, call: Call) -> Response:
        found = await self._found(call)
        asked = await self._runs.asked(found.id)
        code = {"code": asked.script, "nodeModules": asked.node_modules}
        return done({"metadata": _entry(found, asked), "code": code})

    async def output(self, call: Call) -> Response:
        found = await self._found(call)
        outcome = found.outcome or RunOutcome(ok=False)
        logs = [one.model_dump() for one in outcome.logs]
        return done({"status": _STATES[found.state], "result": outcome.result, "error": outcome.error, "logs": logs})

    async def _found(self, call: Call) -> RunInfo:
        try:
            return await self._runs.get(call.path["id"])
        except NotFound as error:
            raise Refused(404, "RUN_NOT_FOUND", error.message) from error

    # ── schedules ────────────────────────────────────────────────────────────────────────────────────────────────

    async def schedules(self, call: Call) -> Response:
        """Those of a deployment are none."""
        found = [] if call.query("deploymentId") is not None else await self._schedules.list()
        return done({"schedules": [await self._row(one, figures=True) for one in found]})

    async def create_schedule(self, call: Call) -> Response:
        body = await call.body(_NewSchedule)
        if body.deployment is not None:
            raise not_served("a schedule of a deployment")
        if body.run is None or body.cron is None:
            raise Refused(400, "INVALID_REQUEST", "run and cron are needed")
        run = _scheduled(body.run, body.payload)
        with ours():
            wanted = ScheduleCreate(
                name=body.name, cron=body.cron, timezone=body.timezone or "UTC", retries=body.retries or 0, run=run
            )
        return done({"schedule": await self._row(await self._schedules.create(wanted, key_id=call.who.id))})

    async def schedule(self, call: Call) -> Response:
        return done({"schedule": await self._row(await self._schedule(call))})

    async def update_schedule(self, call: Call) -> Response:
        body = await call.body(_NewSchedule)
        before = await self._schedule(call)
        run = None if body.run is None else _scheduled(body.run, body.payload)
        if run is None and body.payload is not None:
            run = before.run.model_copy(update={"payload": body.payload})
        with ours():
            change = ScheduleUpdate(
                name=body.name,
                cron=body.cron,
                timezone=body.timezone,
                retries=body.retries,
                run=run,
                active=body.active,
            )
        await self._schedules.update(before.id, change)
        return done({"success": True})

    async def delete_schedule(self, call: Call) -> Response:
        await self._schedules.delete((await self._schedule(call)).id)
        return done({"success": True})

    async def executions(self, call: Call) -> Response:
        limit, offset = call.number("limit", 50, 1, MOST), call.number("offset", 0)
        schedule = await self._schedule(call)
        found, total = await self._schedules.runs(schedule.id, limit=limit, offset=offset)
        rows = [_execution(one) for one in found]
        return done({"executions": rows, "total": total, "offset": offset + len(found), "limit": limit})

    async def success_rate(self, call: Call) -> Response:
        found, start, end = await self._between(call)
        return done({**_figures(found), "start": time_of(start), "end": time_of(end)})

    async def timeline(self, call: Call) -> Response:
        """By the hour."""
        found, start, end = await self._between(call)
        hours: dict[datetime, list[RunInfo]] = {}
        for one in sorted(found, key=lambda one: one.run_at):
            hours.setdefault(one.run_at.replace(minute=0, second=0, microsecond=0), []).append(one)
        points = [_point(at, some) for at, some in hours.items()]
        schedule_id = call.path["id"]
        return done({"scheduleId": schedule_id, "dataPoints": points, "start": time_of(start), "end": time_of(end)})

    async def _between(self, call: Call) -> tuple[list[RunInfo], datetime, datetime]:
        """Runs of a schedule that have ended, and of which time."""
        schedule = await self._schedule(call)
        start = _instant(call.query("start")) or schedule.created_at
        end = _instant(call.query("end")) or datetime.now(UTC)
        return [one for one in await self._ended(schedule.id) if start <= one.run_at <= end], start, end

    async def _ended(self, schedule_id: str) -> list[RunInfo]:
        found, _ = await self._schedules.runs(schedule_id, limit=MOST)
        return [one for one in found if one.state in ("succeeded", "failed")]

    async def _schedule(self, call: Call) -> ScheduleInfo:
        try:
            return await self._schedules.get(call.path["id"])
        except NotFound as error:
            raise Refused(404, "SCHEDULE_NOT_FOUND", error.message) from error

    async def _row(self, info: ScheduleInfo, *, figures: bool = False) -> dict[str, Any]:
        row = {
            "id": info.id,
            "accountId": ACCOUNT,
            "deploymentId": None,
            "name": info.name,
            "cron": info.cron,
            "timezone": info.timezone,
            "retries": info.retries,
            "payload": info.run.payload if info.run.payload is not None else {},
            "active": info.active,
            "createdAt": time_of(info.created_at),
            "updatedAt": time_of(info.updated_at),
            "runConfig": {"code": info.run.script, "envVars": info.run.env, "nodeModules": info.run.node_modules},
        }
        if figures:
            found = _figures(await self._ended(info.id))
            row |= {"successRate": found["successRate"], "executionCount": found["total"]}
        return row


def _wanted(script: str, config: _Config, payload: Any = None) -> RunCreate:
    if config.permissions or config.egress or config.proxy or config.headers:
        raise not_served("rules for the network of a script")
    with ours():
        return RunCreate(
            script=script,
            env=config.env or {},
            node_modules=config.node_modules or {},
            payload=payload,
            **({} if config.timeout_s is None else {"timeout_s": config.timeout_s}),
        )
    raise AssertionError("unreachable")


def _scheduled(run: _Run, payload: Any) -> RunCreate:
    script = run.code or run.script
    if script is None:
        raise Refused(400, "INVALID_REQUEST", "run.code is needed")
    return _wanted(script, run, payload)


def _entry(info: RunInfo, asked: RunCreate) -> dict[str, Any]:
    taken_s = _taken_s(info)
    return {
        "deployment": info.id,
        "accountId": ACCOUNT,
        "state": _STATES[info.state],
        "provisionedAt": time_of(info.run_at),
        "startedAt": time_of(info.started_at),
        "duration": None if taken_s is None else f"{taken_s:.3f}s",
        "envVars": asked.env,
    }


def _taken_s(info: RunInfo) -> float | None:
    if info.started_at is None or info.finished_at is None:
        return None
    return (info.finished_at - info.started_at).total_seconds()


def _point(at: datetime, ended: list[RunInfo]) -> dict[str, Any]:
    good = [one for one in ended if one.state == "succeeded"]
    bad = [one for one in ended if one.state != "succeeded"]
    row: dict[str, Any] = {
        "timestamp": time_of(at),
        "executionCount": len(ended),
        "succeededCount": len(good),
        "succeededOnFirstTryCount": sum(one.attempts <= 1 for one in good),
        "succeededOnRetryCount": sum(one.attempts > 1 for one in good),
        "failedCount": len(bad),
    }
    for name, some in (("average", ended), ("averageSuccess", good), ("averageFailure", bad)):
        taken_ms = _latencies_ms(some)
        row[f"{name}LatencyMs"] = sum(taken_ms) / len(taken_ms) if taken_ms else None
    taken_ms = _latencies_ms(good)
    for percent in (50, 90, 99):
        row[f"p{percent}SuccessLatencyMs"] = taken_ms[(len(taken_ms) - 1) * percent // 100] if taken_ms else None
    return row


def _latencies_ms(some: list[RunInfo]) -> list[float]:
    return sorted(taken_s * 1000 for one in some if (taken_s := _taken_s(one)) is not None)


def _execution(info: RunInfo) -> dict[str, Any]:
    error = None if info.outcome is None else info.outcome.error
    row = {
        "status": info.state,
        "startedAt": time_of(info.started_at),
        "completedAt": time_of(info.finished_at),
        "createdAt": time_of(info.run_at),
        "updatedAt": time_of(info.finished_at or info.started_at or info.run_at),
    }
    last = {**row, "id": f"{info.id}-{info.attempts}", "executionId": info.id, "attemptNumber": info.attempts}
    return {
        **row,
        "id": info.id,
        "scheduleId": info.schedule_id,
        "runAt": time_of(info.run_at),
        "nextRetryAt": time_of(info.next_at),
        "attempts": info.attempts,
        "maxAttempts": info.max_attempts,
        "lastError": error,
        "attemptHistory": [{**last, "error": error}] if info.attempts else [],
    }


def _figures(ended: list[RunInfo]) -> dict[str, Any]:
    succeeded = sum(one.state == "succeeded" for one in ended)
    rate = succeeded / len(ended) if ended else 0.0
    return {"total": len(ended), "succeeded": succeeded, "failed": len(ended) - succeeded, "successRate": rate}


def _instant(given: str | None) -> datetime | None:
    if given is None:
        return None
    try:
        at = datetime.fromisoformat(given.replace(" ", "+"))
    except (ValueError, OverflowError):
        raise Refused(
            400, "INVALID_REQUEST", f"{given[:40]!r} is no time; one looks like 2030-01-31T12:00:00Z"
        ) from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
