"""Triggers of a repository, and the log of what they delivered. Each takes an API key."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Query, Request, Response
from starlette.responses import JSONResponse

from forkyard.api.access import By, Hosting, hosting_of
from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute
from forkyard.api.problem import documented
from forkyard.api.routes.git import RepoPath
from forkyard.errors import HostFailure, NotFound, RepoNotFound
from forkyard.models import Page
from forkyard.models.git_triggers import (
    Delivery,
    DeliveryInfo,
    DeliveryStatus,
    TriggerCreate,
    TriggerInfo,
    TriggerUpdate,
)

router = APIRouter(
    prefix="/git/repos/{repo}/triggers",
    tags=["git"],
    route_class=BoundedRoute,
    responses=documented(RepoNotFound, NotFound, HostFailure),
)

_EXAMPLE = {"events": ["push"], "branches": ["main"], "action": {"type": "webhook", "url": "https://example.com/hook"}}


async def jwks(request: Request) -> Response:
    """With what the signatures of webhooks are checked. At `/.well-known/jwks.json`, for everybody."""
    hosting = await hosting_of(request)
    signer = hosting.automation.signer
    assert signer is not None
    return JSONResponse(signer.jwks, headers={"cache-control": "public, max-age=300"})


@router.post("", status_code=201, response_model=TriggerInfo, summary="Create a trigger")
async def create(
    repo: RepoPath, hosting: Hosting, by: By, body: Annotated[TriggerCreate, Body(examples=[_EXAMPLE])]
) -> Response:
    """It hears of what happens from now on."""
    found = await hosting.repositories.get(repo)
    made = await hosting.triggers.create(found, body, by)
    await hosting.identities.record(by, "git.trigger.create", found.id, data={"trigger_id": made.id})
    return answer(made, 201)


@router.get("", response_model=Page[TriggerInfo], summary="List triggers")
async def list_(repo: RepoPath, hosting: Hosting) -> Response:
    found = await hosting.repositories.get(repo)
    return answer(Page[TriggerInfo](items=await hosting.triggers.list(found)))


@router.get("/{trigger_id}", response_model=TriggerInfo, summary="Get a trigger")
async def get(repo: RepoPath, trigger_id: str, hosting: Hosting) -> Response:
    return answer(await hosting.triggers.get(await hosting.repositories.get(repo), trigger_id))


@router.patch("/{trigger_id}", response_model=TriggerInfo, summary="Change a trigger")
async def update(
    repo: RepoPath,
    trigger_id: str,
    hosting: Hosting,
    by: By,
    body: Annotated[TriggerUpdate, Body(examples=[{"enabled": False}])],
) -> Response:
    found = await hosting.repositories.get(repo)
    changed = await hosting.triggers.update(found, trigger_id, body)
    await hosting.identities.record(by, "git.trigger.update", found.id, data={"trigger_id": trigger_id})
    return answer(changed)


@router.delete("/{trigger_id}", status_code=204, summary="Delete a trigger")
async def delete(repo: RepoPath, trigger_id: str, hosting: Hosting, by: By) -> Response:
    """With its log; what it had still to deliver is not delivered."""
    found = await hosting.repositories.get(repo)
    await hosting.triggers.delete(found, trigger_id)
    await hosting.identities.record(by, "git.trigger.delete", found.id, data={"trigger_id": trigger_id})
    return done()


@router.get("/{trigger_id}/deliveries", response_model=Page[DeliveryInfo], summary="What it delivered, newest first")
async def deliveries(
    repo: RepoPath,
    trigger_id: str,
    hosting: Hosting,
    status: DeliveryStatus | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    """Kept for 30 days."""
    found = await hosting.repositories.get(repo)
    return answer(await hosting.triggers.deliveries(found, trigger_id, status=status, limit=limit, cursor=cursor))


@router.get("/{trigger_id}/deliveries/{delivery_id}", response_model=Delivery, summary="One delivery, with its payload")
async def delivery(repo: RepoPath, trigger_id: str, delivery_id: str, hosting: Hosting) -> Response:
    return answer(await hosting.triggers.delivery(await hosting.repositories.get(repo), trigger_id, delivery_id))


@router.post(
    "/{trigger_id}/deliveries/{delivery_id}/redeliver",
    status_code=202,
    response_model=Delivery,
    summary="Deliver it again",
)
async def redeliver(repo: RepoPath, trigger_id: str, delivery_id: str, hosting: Hosting, by: By) -> Response:
    """With the same id and payload."""
    found = await hosting.repositories.get(repo)
    begun = await hosting.triggers.redeliver(found, trigger_id, delivery_id)
    await hosting.identities.record(by, "git.trigger.redeliver", found.id, data={"delivery_id": delivery_id})
    return answer(begun, 202)
