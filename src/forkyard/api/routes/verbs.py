"""What can be done with a sandbox: fork, pause, resume, stop, start, resize, roll back."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from forkyard.api.answers import answer
from forkyard.api.inputs import BoundedRoute, Control
from forkyard.api.problem import documented
from forkyard.api.routes.sandboxes import SHOWN
from forkyard.errors import (
    HostFailure,
    InvalidShape,
    NoCapacity,
    OperationTimeout,
    QuotaExceeded,
    SandboxEnded,
    SandboxNotFound,
    SnapshotCorrupt,
    SnapshotFailed,
    SnapshotNotFound,
    StateConflict,
)
from forkyard.models import (
    ForkResult,
    SandboxFork,
    SandboxInfo,
    SandboxPause,
    SandboxResize,
    SandboxResume,
    SandboxRollback,
)

router = APIRouter(
    prefix="/sandboxes/{sandbox_id}",
    tags=["sandboxes"],
    route_class=BoundedRoute,
    responses=documented(SandboxNotFound, SandboxEnded, StateConflict, OperationTimeout, HostFailure),
)
_STARTS = documented(QuotaExceeded, NoCapacity)
_SHOWN: dict[int | str, dict[str, Any]] = {200: SHOWN}


@router.post("/fork", status_code=201, response_model=ForkResult, summary="Fork a sandbox", responses=_STARTS)
async def fork(
    request: Request,
    sandbox_id: str,
    control: Control,
    body: Annotated[
        SandboxFork,
        Body(
            openapi_examples={
                "one": {"summary": "One copy", "value": {}},
                "three": {"summary": "Three, with a label", "value": {"count": 3, "labels": {"role": "try"}}},
            }
        ),
    ] = SandboxFork(),  # noqa: B008
) -> Response:
    """Running copies of a sandbox that runs or is paused: memory, processes and disk as they are now. Each child has
    its own result; if none came to life, the answer is the error of the first."""
    key_id: str = request.state.api_key_id
    return answer(await control.forks.fork(sandbox_id, body, api_key_id=key_id), 201)


@router.post(
    "/pause",
    response_model=SandboxInfo,
    summary="Pause a sandbox",
    responses=documented(SnapshotFailed, NoCapacity) | _SHOWN,
)
async def pause(
    sandbox_id: str,
    control: Control,
    body: Annotated[SandboxPause, Body(examples=[{"durable": False}])] = SandboxPause(),  # noqa: B008
) -> Response:
    """It keeps its memory and uses no processor; any call wakes it. Pausing a paused one is fine. An ephemeral one is
    deleted."""
    return answer(await control.sleep.pause(sandbox_id, durable=body.durable))


@router.post(
    "/resume",
    response_model=SandboxInfo,
    summary="Resume a paused sandbox",
    responses=_STARTS | documented(HostFailure, SnapshotCorrupt) | _SHOWN,
)
async def resume(
    sandbox_id: str,
    control: Control,
    body: Annotated[SandboxResume, Body(examples=[{"memory": True}])] = SandboxResume(),  # noqa: B008
) -> Response:
    """It goes on where it was. Resuming a running one is fine. If its saved memory is damaged, `memory: false` boots
    its disk."""
    return answer(await control.sleep.resume(sandbox_id, memory=body.memory))


@router.post("/stop", response_model=SandboxInfo, summary="Shut a sandbox down", responses=_SHOWN)
async def stop(sandbox_id: str, control: Control) -> Response:
    """Only its disk remains. Stopping a stopped one is fine. An ephemeral one is deleted,
    and so is one that lasts until it is stopped."""
    return answer(await control.power.stop(sandbox_id))


@router.post("/start", response_model=SandboxInfo, summary="Boot a stopped sandbox", responses=_STARTS | _SHOWN)
async def start(sandbox_id: str, control: Control) -> Response:
    """From its disk; also one that has failed. Starting a running one is fine."""
    return answer(await control.power.start(sandbox_id))


@router.post(
    "/resize", response_model=SandboxInfo, summary="Resize a sandbox", responses=documented(InvalidShape) | _SHOWN
)
async def resize(
    sandbox_id: str,
    control: Control,
    body: Annotated[SandboxResize, Body(examples=[{"vcpus": 2, "memory_mib": 1024}])],
) -> Response:
    """Of a stopped one; of a paused one only the disk. A disk only grows. It takes effect at the next start."""
    return answer(await control.power.resize(sandbox_id, body))


@router.post(
    "/rollback",
    response_model=SandboxInfo,
    summary="Return a sandbox to a snapshot",
    responses=_STARTS | documented(SandboxNotFound, SnapshotNotFound) | _SHOWN,
)
async def rollback(
    sandbox_id: str, control: Control, body: Annotated[SandboxRollback, Body(examples=[{"snapshot": "ready"}])]
) -> Response:
    """It runs as it did when that snapshot of it was taken; what came after is lost. If it fails, nothing changes."""
    return answer(await control.snapshots.rollback(sandbox_id, body.snapshot))
