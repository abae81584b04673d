"""Runs: a script in a machine of its own, restored warm and used once. Now, or by a schedule."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request, Response

from forkyard.api.answers import answer, done
from forkyard.api.inputs import SpecRoute
from forkyard.api.problem import documented
from forkyard.builds.runs import RUNS_KEPT, Runs
from forkyard.builds.schedules import Schedules
from forkyard.errors import HostFailure, NotFound
from forkyard.models import Page
from forkyard.models.runs import RunCreate, RunInfo, ScheduleCreate, ScheduleInfo, ScheduleUpdate

router = APIRouter(tags=["runs"], route_class=SpecRoute)

_SCRIPT: dict[str, Any] = {"script": "export default ({ n }) => n + 1", "payload": {"n": 1}}
_Limit = Annotated[int, Query(ge=1, le=RUNS_KEPT)]


async def runs_of(request: Request) -> Runs:
    found: Runs | None = request.app.state.runs
    if found is None:
        raise HostFailure("this daemon runs no scripts")
    return found


async def schedules_of(request: Request) -> Schedules:
    found: Schedules | None = request.app.state.schedules
    if found is None:
        raise HostFailure("this daemon runs no scripts")
    return found


_Runs = Annotated[Runs, Depends(runs_of)]
_Schedules = Annotated[Schedules, Depends(schedules_of)]


@router.post(
    "/runs", status_code=201, response_model=RunInfo, summary="Run a script", responses=documented(HostFailure)
)
async def create(request: Request, runs: _Runs, body: Annotated[RunCreate, Body(examples=[_SCRIPT])]) -> Response:
    """Answers when it has ended. A script that fails is an outcome and no error."""
    return answer(await runs.create(body, key_id=request.state.api_key_id), 201)


@router.get("/runs", response_model=Page[RunInfo], summary="List runs", responses=documented(HostFailure))
async def list_(runs: _Runs, limit: _Limit = 100) -> Response:
    """Newest first, those of schedules too. The last 1000 are kept."""
    return answer(Page[RunInfo](items=(await runs.list(limit=limit))[0]))


@router.get("/runs/{run_id}", response_model=RunInfo, summary="Get a run", responses=documented(NotFound, HostFailure))
async def get(runs: _Runs, run_id: str) -> Response:
    return answer(await runs.get(run_id))


@router.post(
    "/cron",
    status_code=201,
    response_model=ScheduleInfo,
    summary="Run a script by the clock",
    responses=documented(HostFailure),
)
async def schedule(
    request: Request,
    schedules: _Schedules,
    body: Annotated[ScheduleCreate, Body(examples=[{"cron": "0 12 * * mon-fri", "run": _SCRIPT}])],
) -> Response:
    """Five fields of cron, in a time zone. Each time is used at most once; one that passed while no daemon ran is made up for
    once."""
    return answer(await schedules.create(body, key_id=request.state.api_key_id), 201)


@router.get("/cron", response_model=Page[ScheduleInfo], summary="List schedules", responses=documented(HostFailure))
async def list_schedules(schedules: _Schedules) -> Response:
    return answer(Page[ScheduleInfo](items=await schedules.list()))


@router.get(
    "/cron/{schedule_id}",
    response_model=ScheduleInfo,
    summary="Get a schedule",
    responses=documented(NotFound, HostFailure),
)
async def get_schedule(schedules: _Schedules, schedule_id: str) -> Response:
    return answer(await schedules.get(schedule_id))


@router.patch(
    "/cron/{schedule_id}",
    response_model=ScheduleInfo,
    summary="Change a schedule, or turn it off and on",
    responses=documented(NotFound, HostFailure),
)
async def update_schedule(
    schedules: _Schedules, schedule_id: str, body: Annotated[ScheduleUpdate, Body(examples=[{"active": False}])]
) -> Response:
    """Its next time is counted from now."""
    return answer(await schedules.update(schedule_id, body))


@router.delete(
    "/cron/{schedule_id}", status_code=204, summary="Delete a schedule", responses=documented(NotFound, HostFailure)
)
async def delete_schedule(schedules: _Schedules, schedule_id: str) -> Response:
    """With the runs it has made."""
    await schedules.delete(schedule_id)
    return done()


@router.get(
    "/cron/{schedule_id}/runs",
    response_model=Page[RunInfo],
    summary="List the runs of a schedule",
    responses=documented(NotFound, HostFailure),
)
async def schedule_runs(schedules: _Schedules, schedule_id: str, limit: _Limit = 100) -> Response:
    """Newest first."""
    found, _ = await schedules.runs(schedule_id, limit=limit)
    return answer(Page[RunInfo](items=list(found)))
