"""Sandboxes: create, list, get, change, delete, logs, usage."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Request, Response
from pydantic import AwareDatetime

from forkyard.api.answers import answer, done
from forkyard.api.inputs import Control, SpecRoute, checked_env
from forkyard.api.problem import documented
from forkyard.api.routes.builds import builds_of
from forkyard.errors import (
    BuildFailed,
    HostFailure,
    IdempotencyConflict,
    InvalidRequest,
    InvalidShape,
    NoCapacity,
    OperationTimeout,
    QuotaExceeded,
    SandboxEnded,
    SandboxNotFound,
    SnapshotNotFound,
    StateConflict,
)
from forkyard.lifecycle import State
from forkyard.models import Page, SandboxCreate, SandboxInfo, SandboxLogs, SandboxUpdate, SandboxUsage, UsageHistory

router = APIRouter(prefix="/sandboxes", tags=["sandboxes"], route_class=SpecRoute)

_EXAMPLE: dict[str, Any] = {
    "id": "q7m2v9x4k1c8b3n6d5f0",
    "name": "tests",
    "state": "running",
    "cause": "ready",
    "cause_detail": None,
    "incarnation": 1,
    "shape": {"vcpus": 1, "memory_mib": 512, "disk_gib": 8},
    "labels": {"team": "search"},
    "template": "9f2c1d",
    "parent_id": None,
    "snapshot_id": None,
    "persistence": "sticky",
    "priority": 5,
    "idle_timeout_s": 300.0,
    "checkpoint_every_s": None,
    "checkpoints_kept": 5,
    "network": {"egress": {"preset": "coding"}},
    "secret_names": [],
    "expires_at": None,
    "last_active_at": "2026-01-01T12:00:00.150Z",
    "created_at": "2026-01-01T12:00:00Z",
    "updated_at": "2026-01-01T12:00:00.150Z",
    "ended_at": None,
}
SHOWN: dict[str, Any] = {"content": {"application/json": {"example": _EXAMPLE}}}


@router.post(
    "",
    status_code=201,
    response_model=SandboxInfo,
    summary="Create a sandbox",
    responses=documented(
        InvalidShape,
        BuildFailed,
        IdempotencyConflict,
        SnapshotNotFound,
        SandboxEnded,
        QuotaExceeded,
        NoCapacity,
        OperationTimeout,
        HostFailure,
    )
    | {201: {"description": "It runs, and its agent has answered.", **SHOWN}},
)
async def create(
    request: Request,
    control: Control,
    body: Annotated[
        SandboxCreate,
        Body(
            openapi_examples={
                "default": {"summary": "The default shape", "value": {}},
                "larger": {
                    "summary": "Larger, with labels and environment",
                    "value": {
                        "name": "tests",
                        "vcpus": 2,
                        "memory_mib": 1024,
                        "labels": {"team": "search"},
                        "env": {"CI": "1"},
                    },
                },
                "snapshot": {
                    "summary": "From a snapshot, kept until it is deleted, asleep after a minute",
                    "value": {"snapshot": "ready", "persistence": "persistent", "idle_timeout_s": 60},
                },
            }
        ),
    ],
    idempotency_key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            pattern=r"^[\x21-\x7e]{1,255}$",
            description="A retry with the same key and body returns the same sandbox, for 24 hours.",
        ),
    ] = None,
) -> Response:
    """Restore a machine from a snapshot, or from the template of this shape. The first use of a new shape builds its
    template first."""
    checked_env(body.env)
    key_id: str = request.state.api_key_id
    if body.spec is not None:
        builds = await builds_of(request)
        return answer(await builds.sandbox(body, api_key_id=key_id, idempotency_key=idempotency_key), 201)
    if body.registry is not None:
        raise InvalidRequest(
            "a registry is asked for the images of a spec; give a spec, or leave it out", field="registry"
        )
    return answer(await control.sandboxes.create(body, api_key_id=key_id, idempotency_key=idempotency_key), 201)


@router.get("", response_model=Page[SandboxInfo], summary="List sandboxes, newest first")
async def list_(
    control: Control,
    state: Annotated[list[State] | None, Query(description="Only in this state; repeatable.")] = None,
    label: Annotated[
        list[str] | None, Query(description="Only with this label, `key=value`; repeatable, all must match.")
    ] = None,
    all_: Annotated[bool, Query(alias="all", description="Those that have ended, too.")] = False,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    labels = dict(_label(item) for item in label or [])
    return answer(await control.sandboxes.list(states=state, labels=labels, ended=all_, limit=limit, cursor=cursor))


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidRequest(f"label {text!r} is not of the form key=value", field="query.label")
    return key, value


@router.get(
    "/{sandbox_id}",
    response_model=SandboxInfo,
    summary="Get a sandbox",
    responses=documented(SandboxNotFound) | {200: SHOWN},
)
async def get(sandbox_id: str, control: Control) -> Response:
    return answer(await control.sandboxes.get(sandbox_id))


@router.patch(
    "/{sandbox_id}",
    response_model=SandboxInfo,
    summary="Change a sandbox",
    responses=documented(SandboxNotFound, SandboxEnded) | {200: SHOWN},
)
async def update(
    sandbox_id: str,
    control: Control,
    body: Annotated[SandboxUpdate, Body(examples=[{"idle_timeout_s": None, "labels": {"team": "search"}}])],
) -> Response:
    """Its name, labels and policies. Fields that are absent stay as they are; a new `ttl_s` counts from now."""
    return answer(await control.sandboxes.update(sandbox_id, body))


@router.delete(
    "/{sandbox_id}",
    status_code=204,
    summary="Delete a sandbox",
    responses=documented(SandboxNotFound, HostFailure, OperationTimeout),
)
async def delete(sandbox_id: str, control: Control) -> Response:
    """Answers when the machine and all it owned are gone. Deleting a deleted one is fine. Snapshots of it stay, but
    for automatic ones."""
    await control.sandboxes.delete(sandbox_id)
    return done()


@router.get(
    "/{sandbox_id}/logs",
    response_model=SandboxLogs,
    summary="Boot milestones and the end of the console",
    responses=documented(SandboxNotFound, SandboxEnded),
)
async def logs(sandbox_id: str, control: Control) -> Response:
    """A failed sandbox keeps its logs until it is deleted."""
    return answer(await control.sandboxes.logs(sandbox_id))


@router.get(
    "/{sandbox_id}/usage",
    response_model=SandboxUsage,
    summary="Memory, processor time and traffic",
    responses=documented(SandboxNotFound, SandboxEnded, StateConflict),
)
async def usage(sandbox_id: str, control: Control) -> Response:
    used = await control.sandboxes.usage(sandbox_id)
    moved = await control.networks.moved(sandbox_id)
    return answer(
        SandboxUsage(
            pss_mib=used.pss_mib,
            cpu_s=used.cpu_s,
            bytes_out=moved.bytes_out,
            bytes_in=moved.bytes_in,
            ingress_bytes_in=moved.ingress_bytes_in,
            ingress_bytes_out=moved.ingress_bytes_out,
        )
    )


@router.get(
    "/{sandbox_id}/usage/history",
    response_model=UsageHistory,
    summary="Processor, memory and disk of the last hour",
    responses=documented(SandboxNotFound),
)
async def usage_history(
    sandbox_id: str,
    control: Control,
    start: Annotated[AwareDatetime | None, Query(description="Default: the oldest there is.")] = None,
    end: Annotated[AwareDatetime | None, Query(description="Default: now.")] = None,
) -> Response:
    """A sample every ten seconds while it runs, taken by the host: it wakes nothing and costs the guest nothing. With `end`
    left out the last one is of now. What an earlier daemon saw is not known."""
    return answer(UsageHistory(samples=await control.history.of(sandbox_id, start, end)))
