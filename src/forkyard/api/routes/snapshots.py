"""Snapshots: take, list, get, delete."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Response

from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute, Control
from forkyard.api.problem import documented
from forkyard.errors import (
    Conflict,
    HostFailure,
    NoCapacity,
    OperationTimeout,
    SandboxEnded,
    SandboxNotFound,
    SnapshotFailed,
    SnapshotNotFound,
    StateConflict,
)
from forkyard.models import Page, SnapshotCreate, SnapshotInfo

router = APIRouter(tags=["snapshots"], route_class=BoundedRoute)

_EXAMPLE = {
    "id": "sc-q7m2v9x4k1c8b3n6d5f0",
    "name": "ready",
    "sandbox_id": "q7m2v9x4k1c8b3n6d5f0",
    "automatic": False,
    "shape": {"vcpus": 1, "memory_mib": 512, "disk_gib": 8},
    "size_bytes": 41943040,
    "paused_ms": 12.5,
    "created_at": "2026-01-01T12:00:00Z",
}
_SHOWN = {"content": {"application/json": {"example": _EXAMPLE}}}
_Snapshot = Annotated[str, Path(description="Id or name of a snapshot.")]


@router.post(
    "/sandboxes/{sandbox_id}/snapshots",
    status_code=201,
    response_model=SnapshotInfo,
    summary="Take a snapshot",
    responses=documented(
        SandboxNotFound,
        SandboxEnded,
        StateConflict,
        Conflict,
        NoCapacity,
        OperationTimeout,
        HostFailure,
        SnapshotFailed,
    )
    | {201: {"description": "It is saved.", **_SHOWN}},
)
async def create(
    sandbox_id: str,
    control: Control,
    body: Annotated[SnapshotCreate, Body(examples=[{"name": "ready"}])] = SnapshotCreate(),  # noqa: B008
) -> Response:
    """Of a running or paused sandbox, which goes on as it was. A snapshot outlives its sandbox."""
    return answer(await control.snapshots.create(sandbox_id, body.name), 201)


@router.get("/snapshots", response_model=Page[SnapshotInfo], summary="List snapshots, newest first")
async def list_(
    control: Control,
    sandbox_id: Annotated[str | None, Query(max_length=64)] = None,
    automatic: Annotated[bool | None, Query(description="Only checkpoints, or only others.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    return answer(await control.snapshots.list(sandbox_id=sandbox_id, automatic=automatic, limit=limit, cursor=cursor))


@router.get(
    "/snapshots/{snapshot}",
    response_model=SnapshotInfo,
    summary="Get a snapshot",
    responses=documented(SnapshotNotFound) | {200: _SHOWN},
)
async def get(snapshot: _Snapshot, control: Control) -> Response:
    return answer(await control.snapshots.get(snapshot))


@router.delete(
    "/snapshots/{snapshot}",
    status_code=204,
    summary="Delete a snapshot",
    responses=documented(SnapshotNotFound, HostFailure),
)
async def delete(snapshot: _Snapshot, control: Control) -> Response:
    """Sandboxes that were made from it are not affected."""
    await control.snapshots.delete(snapshot)
    return done()
