"""Units of systemd in a VM. Those that were made through an API of ours; what the system brought is its own."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from pydantic import Field, TypeAdapter
from starlette.responses import Response

from forkyard.compat.freestyle import models
from forkyard.compat.freestyle.calls import Body, Call, done, ours, time_of
from forkyard.compat.freestyle.errors import Refused
from forkyard.compat.freestyle.specs import bare, service_fields
from forkyard.compat.freestyle.vms import Vms
from forkyard.control.plane import ControlPlane
from forkyard.control.services import Verb
from forkyard.errors import ForkyardError, ServiceNotReady
from forkyard.models.specs import Service
from forkyard.models.texts import ServiceName

#: `2026-01-31T12:00:00+00:00 host program[12]: what it said`
_LINE = re.compile(r"(\S+) \S+ ([^:]+): ?(.*)")
_NAME = TypeAdapter(ServiceName)
MAX_NAME = 128


class _Wanted(Body):
    id: str


class _Turned(Body):
    services: list[_Wanted] = Field(max_length=100)


class Systemd:
    def __init__(self, control: ControlPlane, vms: Vms) -> None:
        self._control = control
        self._vms = vms

    async def listed(self, call: Call) -> Response:
        vm = (await self._vms.living(call)).id
        return done({"services": [{"name": info.name} for info in await self._control.services.list(vm)]})

    async def create(self, call: Call) -> Response:
        unit = await call.body(models.Unit)
        name = _checked(unit.name)
        with ours():
            service = Service.model_validate(service_fields(unit))
        vm = (await self._vms.living(call)).id
        if any(info.name == name for info in await self._control.services.list(vm)):
            raise Refused(409, "SERVICE_ALREADY_EXISTS", f"there is a service {name} already; delete it first")
        try:
            await self._control.services.add(vm, service)
        except ServiceNotReady as error:
            return done({"success": False, "message": error.message, "serviceName": name})
        return done({"success": True, "message": f"{name} was made and started", "serviceName": name})

    async def delete(self, call: Call) -> Response:
        vm, name = (await self._vms.living(call)).id, _checked(call.path["service"])
        await self._control.services.remove(vm, name)
        return done({"success": True, "message": f"{name} was stopped and removed"})

    async def status(self, call: Call) -> Response:
        vm, name = (await self._vms.living(call)).id, _checked(call.path["service"])
        info = await self._control.services.get(vm, name)
        return done(
            {
                "name": info.name,
                "activeState": info.active,
                "subState": info.sub,
                "loadState": "loaded",
                "description": info.name,
            }
        )

    async def logs(self, call: Call) -> Response:
        vm, name = (await self._vms.living(call)).id, _checked(call.path["service"])
        lines, since = call.number("lines", 100, 1, 10_000), _instant(call.query("since"))
        journal = (await self._control.services.logs(vm, name, lines)).log
        found = entries(journal, name)
        return done({"logs": [one for one in found if since is None or _instant(one["timestamp"]) >= since]})  # type: ignore[operator]

    async def start(self, call: Call) -> Response:
        return await self._turn(call, "start")

    async def stop(self, call: Call) -> Response:
        return await self._turn(call, "stop")

    async def restart(self, call: Call) -> Response:
        return await self._turn(call, "restart")

    async def _turn(self, call: Call, verb: Verb) -> Response:
        body = await call.body(_Turned)
        vm = (await self._vms.living(call)).id
        results = []
        for wanted in body.services:
            problem = await _problem_of(lambda name=wanted.id: self._control.services.turn(vm, _checked(name), verb))  # type: ignore[misc]
            results.append({"serviceId": wanted.id, "success": problem is None, "message": problem or f"{verb}: done"})
        return done({"results": results})


async def _problem_of(work: Callable[[], Awaitable[object]]) -> str | None:
    try:
        await work()
    except (ForkyardError, Refused) as error:
        return error.message
    return None


def _checked(name: str) -> str:
    short = bare(name)
    if not short:
        raise Refused(400, "SERVICE_NAME_EMPTY", "a service has a name")
    if len(short) > MAX_NAME:
        raise Refused(400, "SERVICE_NAME_TOO_LONG", f"the name of a service has at most {MAX_NAME} characters")
    with ours("SERVICE_NAME_INVALID_CHARS"):
        _NAME.validate_python(short)
    return short


def entries(journal: str, name: str) -> list[dict[str, Any]]:
    """The lines of the journal of this service. What has no time of its own belongs to the line before."""
    found: list[dict[str, Any]] = []
    last = datetime.fromtimestamp(0, UTC)
    for line in journal.splitlines():
        parts = _LINE.fullmatch(line)
        at = None if parts is None else _instant(parts[1])
        last = at or last
        message = line if parts is None or at is None else parts[3]
        found.append({"message": message, "timestamp": time_of(last), "unit": f"{name}.service"})
    return found


def _instant(given: str | None) -> datetime | None:
    if given is None:
        return None
    try:
        at = datetime.fromisoformat(given.replace(" ", "+") if "T" in given else given)
    except (ValueError, OverflowError):
        return None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
