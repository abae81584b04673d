"""Who asks, and what was logged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from forkyard.builds.builds import Builds
from forkyard.builds.runs import Runs
from forkyard.compat.freestyle.background import Background
from forkyard.compat.freestyle.calls import ACCOUNT, Call, done, time_of
from forkyard.compat.freestyle.errors import Refused
from forkyard.compat.freestyle.systemd import entries
from forkyard.control.plane import ControlPlane
from forkyard.errors import NotFound
from forkyard.models.builds import BuildOutput, BuildPhase

MOST = 1000
#: What is asked for by these is of one thing, and not of the account.
OF_ONE = ("requestId", "deploymentId", "instanceId", "domain")


class Account:
    def __init__(self, control: ControlPlane, builds: Builds, runs: Runs, background: Background) -> None:
        self._control = control
        self._builds = builds
        self._runs = runs
        self._background = background

    async def whoami(self, call: Call) -> Response:
        identity = None if call.who.admin else call.who.id
        return done({"accountId": ACCOUNT, "identityId": identity})

    async def logs(self, call: Call) -> Response:
        """Of one VM, service, build, run or request in the background, or of all VMs. The newest page comes first; in each,
        lines are by time. Those of a journal are told to the second."""
        size, before = call.number("pageSize", 100, 1, MOST), call.number("pageToken", 10**9)
        search, since, until = call.query("search"), _instant(call, "startTime"), _instant(call, "endTime")
        found = [
            line
            async for line in self._lines(call)
            if (search is None or search.lower() in line["message"].lower())
            and (since is None or _time(line) >= (since.replace(microsecond=0) if "vmService" in line else since))
            and (until is None or _time(line) <= until)
        ]
        found = sorted(found, key=_time)[:before]
        left = max(len(found) - size, 0)
        return done({"logs": found[left:], "nextPageToken": str(left) if left else None})

    async def _lines(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        if (vm := call.query("vmId")) is not None:
            async for line in self._of_vm(vm, call.query("vmService")):
                yield line
        elif (build_id := self._build_of(call)) is not None:
            async for line in self._of_build(build_id):
                yield line
        elif (run_id := call.query("runId")) is not None:
            async for line in self._of_run(run_id):
                yield line
        elif not any(map(call.query, OF_ONE)) and call.query("resourceType") in (None, "vm"):
            async for line in self._events(None):
                yield line

    async def _of_vm(self, vm: str, service: str | None) -> AsyncIterator[dict[str, Any]]:
        if service is not None:
            journal = (await self._control.services.logs(vm, service.removesuffix(".service"), MOST)).log
            for told in entries(journal, service.removesuffix(".service")):
                yield {**told, "resourceType": "vm", "resourceId": vm, "vmService": service}
            return
        info = await self._control.sandboxes.get(vm)
        async for event in self._events(vm):
            yield event
        # Lines of the console have no time of their own.
        for line in (await self._control.sandboxes.logs(vm)).console.splitlines():
            yield {**_line(info.created_at, line, vm, "vm"), "source": "console"}

    async def _events(self, vm: str | None) -> AsyncIterator[dict[str, Any]]:
        """The newest of one VM, or of all."""
        events = self._control.events
        after = await events.before_newest(MOST, sandbox_id=vm)
        for event in (await events.page(sandbox_id=vm, after=after, limit=MOST)).items:
            if event.sandbox_id is not None:
                message = f"{event.kind}: {event.detail}" if event.detail else event.kind
                yield _line(event.at, message, event.sandbox_id, "vm")

    def _build_of(self, call: Call) -> str | None:
        request_id = call.query("requestId")
        if request_id is None:
            return call.query("buildId")
        progress = self._background.progress(request_id, call.who.id)
        return None if progress is None else progress.build_id

    async def _of_build(self, build_id: str) -> AsyncIterator[dict[str, Any]]:
        async with self._builds.logs(build_id) as events:
            async for event in events:
                if isinstance(event, BuildPhase | BuildOutput):
                    for line in event.text.splitlines():
                        yield {**_line(event.at, line, build_id, "build"), "buildId": build_id}

    async def _of_run(self, run_id: str) -> AsyncIterator[dict[str, Any]]:
        try:
            info = await self._runs.get(run_id)
        except NotFound as error:
            raise Refused(404, "RUN_NOT_FOUND", error.message) from error
        for one in info.outcome.logs if info.outcome is not None else ():
            yield {**_line(info.run_at, one.message, run_id, "run"), "level": one.type}


def _line(at: datetime, message: str, resource_id: str, kind: str) -> dict[str, Any]:
    return {"timestamp": time_of(at), "message": message, "resourceType": kind, "resourceId": resource_id}


def _time(line: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(line["timestamp"])


def _instant(call: Call, name: str) -> datetime | None:
    given = call.query(name)
    if given is None:
        return None
    try:
        at = datetime.fromisoformat(given.replace(" ", "+"))
    except (ValueError, OverflowError):
        raise Refused(400, "INVALID_QUERY", f"{name} is a time such as 2030-01-31T12:00:00Z") from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
