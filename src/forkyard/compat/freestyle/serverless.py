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
from forkyard.models.runs import RunCreate, RunInfo, ScheduleCreate, ScheduleInfo, ScheduleUpdate

MOST = 1000


class _Config(Body):
    env: dict[str, str] | None = Field(None, alias="envVars")
    node_modules: dict[str, str] | None = Field(None, alias="nodeModules")
    timeout_s: float | None = Field(None, alias="timeout")
    permissions: list[Any] | None = Field(None, alias="networkPermissions")
    egress: dict[str, Any] | None = None
    proxy: Any = None


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
        made = await self._runs.create(wanted, key_id=call.who.id)
        outcome = made.outcome
        assert outcome is not None
        logs = [one.model_dump() for one in outcome.logs]
        if outcome.ok:
            return done({"result": outcome.result, "logs": logs, "runId": made.id})
        message = outcome.error or "it failed"
        if outcome.kind == "syntax":
            raise Refused(400, "SYNTAX_ERROR", message, logs=logs)
        if outcome.kind == "host":
            raise Refused(500, "EXECUTE_INTERNAL_ERROR", message)
        raise Refused(500, "RUNTIME_ERROR", message, logs=logs, stack=outcome.stack)

    async def listed(self, call: Call) -> Response:
        limit, offset = call.number("limit", 50, 1, MOST), call.number("offset", 0)
        found, total = await self._runs.list(limit=limit, offset=offset)
        return done({"entries": [_entry(one) for one in found], "total": total, "offset": offset + len(found)})

    async def get(self, call: Call) -> Response:
        return done(_entry(await self._found(call)))

    async def output(self, call: Call) -> Response:
        outcome = (await self._found(call)).outcome
        return done({"output": None if outcome is None else outcome.model_dump(mode="json")})

    async def _found(self, call: Call) -> RunInfo:
        try:
            return await self._runs.get(call.path["id"])
        except NotFound as error:
            raise Refused(404, "RUN_NOT_FOUND", error.message) from error

    # ── schedules ────────────────────────────────────────────────────────────────────────────────────────────────

    async def schedules(self, _: Call) -> Response:
        return done({"schedules": [await self._row(one, figures=True) for one in await self._schedules.list()]})

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
        schedule = await self._schedule(call)
        start, end = _instant(call.query("start")), _instant(call.query("end"))
        found = [
            one
            for one in await self._ended(schedule.id)
            if (start is None or one.run_at >= start) and (end is None or one.run_at <= end)
        ]
        return done({**_figures(found), "start": call.query("start"), "end": call.query("end")})

    async def timeline(self, call: Call) -> Response:
        schedule = await self._schedule(call)
        return done({"scheduleId": schedule.id, "points": [_execution(one) for one in await self._ended(schedule.id)]})

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
    if config.permissions or config.egress or config.proxy:
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


def _entry(info: RunInfo) -> dict[str, Any]:
    return {
        "deployment": info.id,
        "state": info.state,
        "provisionedAt": time_of(info.run_at),
        "startedAt": time_of(info.started_at),
    }


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
