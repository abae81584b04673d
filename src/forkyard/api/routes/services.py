"""Services of a sandbox: systemd units."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query, Response

from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute, Control
from forkyard.api.problem import documented
from forkyard.control.services import Verb
from forkyard.errors import (
    Conflict,
    GuestFailure,
    GuestUnreachable,
    OperationTimeout,
    SandboxEnded,
    SandboxNotFound,
    ServiceNotFound,
    ServiceNotReady,
)
from forkyard.models import Page
from forkyard.models.builds import ServiceCreate, ServiceInfo, ServiceLogs
from forkyard.models.texts import ServiceName

_ERRORS: dict[int | str, dict[str, Any]] = documented(
    SandboxNotFound,
    ServiceNotFound,
    SandboxEnded,
    Conflict,
    GuestFailure,
    GuestUnreachable,
    OperationTimeout,
    ServiceNotReady,
)
router = APIRouter(
    prefix="/sandboxes/{sandbox_id}/services", tags=["services"], route_class=BoundedRoute, responses=_ERRORS
)

_EXAMPLE = {"name": "web", "exec": "python3 -m http.server 3000", "ready": "curl -sf localhost:3000"}
_Name = Annotated[ServiceName, Path()]


@router.get("", response_model=Page[ServiceInfo], summary="List services")
async def list_(sandbox_id: str, control: Control) -> Response:
    return answer(Page[ServiceInfo](items=await control.services.list(sandbox_id)))


@router.post("", status_code=201, response_model=ServiceInfo, summary="Add a service and start it")
async def add(sandbox_id: str, control: Control, body: Annotated[ServiceCreate, Body(examples=[_EXAMPLE])]) -> Response:
    """One of the same name is replaced. Answers when it is ready, unless `wait` is false."""
    return answer(await control.services.add(sandbox_id, body.service(), wait=body.wait), 201)


@router.get("/{name}", response_model=ServiceInfo, summary="Get a service")
async def get(sandbox_id: str, name: _Name, control: Control) -> Response:
    return answer(await control.services.get(sandbox_id, name))


@router.delete("/{name}", status_code=204, summary="Stop and remove a service")
async def remove(sandbox_id: str, name: _Name, control: Control) -> Response:
    await control.services.remove(sandbox_id, name)
    return done()


@router.get("/{name}/logs", response_model=ServiceLogs, summary="The end of a service's journal")
async def logs(
    sandbox_id: str, name: _Name, control: Control, lines: Annotated[int, Query(ge=1, le=10000)] = 100
) -> Response:
    return answer(await control.services.logs(sandbox_id, name, lines))


@router.post("/{name}/{verb}", response_model=ServiceInfo, summary="Start, stop or restart a service")
async def turn(sandbox_id: str, name: _Name, verb: Verb, control: Control) -> Response:
    """A service that was started is ready when this answers."""
    return answer(await control.services.turn(sandbox_id, name, verb))
