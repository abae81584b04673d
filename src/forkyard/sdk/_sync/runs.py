# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""Runs: a script in a machine of its own. Now, or by a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forkyard.models import Page
from forkyard.models.runs import RunCreate, RunInfo, ScheduleInfo
from forkyard.sdk import validation, wire
from forkyard.sdk._sync.transport import Transport


class Runs:
    """Scripts for Node.js, each in a machine of its own, restored warm and used once."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        script: str,
        *,
        payload: Any = None,
        env: Mapping[str, str] | None = None,
        node_modules: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> RunInfo:
        """Run a module: its default export is called with `payload`, and what it returns is the result. `node_modules`:
        packages of npm by version, installed once for all runs that want the same. Returns when it has ended; a script
        that fails is an outcome and no error."""
        request = _request(script, payload, env, node_modules, timeout_s)
        answer = self._transport.request(
            "POST", "/runs", body=request.model_dump(mode="json"), timeout_s=timeout_s + wire.CREATE_S
        )
        return wire.parse(RunInfo, answer.content)

    def get(self, run_id: str) -> RunInfo:
        answer = self._transport.request("GET", f"/runs/{wire.segment(run_id)}")
        return wire.parse(RunInfo, answer.content)

    def list(self, *, limit: int = 100) -> list[RunInfo]:
        """Newest first, those of schedules too. The last 1000 are kept."""
        answer = self._transport.request("GET", "/runs", params={"limit": limit})
        return wire.parse(Page[RunInfo], answer.content).items


class Cron:
    """Runs that begin by the clock."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        cron: str,
        script: str,
        *,
        name: str | None = None,
        timezone: str = "UTC",
        retries: int = 0,
        payload: Any = None,
        env: Mapping[str, str] | None = None,
        node_modules: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> ScheduleInfo:
        """Five fields of cron, in a time zone. One that fails is tried `retries` times more. Each time is used at most
        once; one that passed while no daemon ran is made up for once."""
        request = validation.schedule_create(
            name=name,
            cron=cron,
            timezone=timezone,
            retries=retries,
            run=_request(script, payload, env, node_modules, timeout_s),
        )
        answer = self._transport.request("POST", "/cron", body=request.model_dump(mode="json"))
        return wire.parse(ScheduleInfo, answer.content)

    def get(self, schedule_id: str) -> ScheduleInfo:
        answer = self._transport.request("GET", _path(schedule_id))
        return wire.parse(ScheduleInfo, answer.content)

    def update(
        self,
        schedule_id: str,
        *,
        name: str | None = None,
        cron: str | None = None,
        timezone: str | None = None,
        retries: int | None = None,
        active: bool | None = None,
        run: RunCreate | None = None,
    ) -> ScheduleInfo:
        """What is not given stays. `active`: whether it begins anything. Its next time is counted from now."""
        request = validation.schedule_update(
            name=name, cron=cron, timezone=timezone, retries=retries, active=active, run=run
        )
        body = request.model_dump(mode="json", exclude_none=True)
        answer = self._transport.request("PATCH", _path(schedule_id), body=body, again=True)
        return wire.parse(ScheduleInfo, answer.content)

    def runs(self, schedule_id: str, *, limit: int = 100) -> list[RunInfo]:
        """Newest first."""
        answer = self._transport.request("GET", f"{_path(schedule_id)}/runs", params={"limit": limit})
        return wire.parse(Page[RunInfo], answer.content).items

    def delete(self, schedule_id: str) -> None:
        """With the runs it has made."""
        self._transport.request("DELETE", _path(schedule_id))

    def list(self) -> list[ScheduleInfo]:
        answer = self._transport.request("GET", "/cron")
        return wire.parse(Page[ScheduleInfo], answer.content).items


def _path(schedule_id: str) -> str:
    return f"/cron/{wire.segment(schedule_id)}"


def _request(
    script: str,
    payload: Any,
    env: Mapping[str, str] | None,
    node_modules: Mapping[str, str] | None,
    timeout_s: float,
) -> RunCreate:
    return validation.run_create(
        script=script,
        payload=payload,
        env=dict(env or {}),
        node_modules=dict(node_modules or {}),
        timeout_s=timeout_s,
    )
