"""Builds: a spec becomes layers, each a snapshot of a machine that runs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request, Response

from forkyard.api.answers import answer, done
from forkyard.api.inputs import SpecRoute
from forkyard.api.problem import documented
from forkyard.api.streams import NdjsonStream, lines, opened
from forkyard.builds.builds import Builds
from forkyard.errors import BuildNotFound, HostFailure, NoCapacity, OperationTimeout
from forkyard.models import Page
from forkyard.models.builds import BuildCreate, BuildInfo, BuildPlan, Pruned

router = APIRouter(prefix="/builds", tags=["builds"], route_class=SpecRoute)

_EXAMPLE: dict[str, Any] = {
    "spec": {
        "steps": [
            {"apt": ["ripgrep"]},
            {"files": {"/srv/index.html": "hello"}},
            {"layer": {}},
            {
                "service": {
                    "name": "web",
                    "exec": "python3 -m http.server 3000 -d /srv",
                    "ready": "curl -sf localhost:3000",
                }
            },
        ]
    }
}


async def builds_of(request: Request) -> Builds:
    found: Builds | None = request.app.state.builds
    if found is None:
        raise HostFailure("this daemon builds nothing")
    return found


Workshop = Annotated[Builds, Depends(builds_of)]


@router.post(
    "",
    status_code=201,
    response_model=BuildInfo,
    summary="Begin a build",
    responses=documented(NoCapacity, HostFailure),
)
async def create(
    request: Request, builds: Workshop, body: Annotated[BuildCreate, Body(examples=[_EXAMPLE])]
) -> Response:
    """Answers when it has begun. It goes on without the client; `/logs?follow=true` shows how."""
    return answer(await builds.create(body, key_id=request.state.api_key_id), 201)


@router.post(
    "/explain",
    response_model=BuildPlan,
    summary="Say what is in the cache, and why the rest is not",
    responses=documented(HostFailure, OperationTimeout),
)
async def explain(builds: Workshop, body: Annotated[BuildCreate, Body(examples=[_EXAMPLE])]) -> Response:
    """Builds nothing."""
    return answer(await builds.plan(body))


@router.post(
    "/prune",
    response_model=Pruned,
    summary="Remove all layers that no build works on",
    responses=documented(HostFailure),
)
async def prune(builds: Workshop) -> Response:
    """Sandboxes that were made from them are not affected."""
    return answer(await builds.prune())


@router.get("", response_model=Page[BuildInfo], summary="List builds, newest first")
async def list_(
    builds: Workshop,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    return answer(await builds.list(limit=limit, cursor=cursor))


@router.get("/{build_id}", response_model=BuildInfo, summary="Get a build", responses=documented(BuildNotFound))
async def get(build_id: str, builds: Workshop) -> Response:
    return answer(await builds.get(build_id))


@router.get(
    "/{build_id}/logs",
    summary="Read or follow what a build does",
    response_class=NdjsonStream,
    responses=documented(BuildNotFound)
    | {
        200: {
            "description": "One `BuildEvent` per line; the last is of type `end` if the build has ended.",
            "content": {NdjsonStream.media_type: {"schema": {"type": "string"}}},
        }
    },
)
async def logs(
    build_id: str,
    builds: Workshop,
    follow: Annotated[bool, Query(description="Go on until it ends.")] = False,
    after: Annotated[int, Query(ge=0, le=2**63 - 1, description="Only lines after this `n`.")] = 0,
) -> Response:
    stack, events = await opened(builds.logs(build_id, after=after, follow=follow))
    return NdjsonStream(stack, lines(events))


@router.delete(
    "/{build_id}", status_code=204, summary="End and forget a build", responses=documented(BuildNotFound, HostFailure)
)
async def delete(build_id: str, builds: Workshop) -> Response:
    """Layers it has made stay in the cache. The snapshot that a failed build kept for debugging is removed."""
    await builds.delete(build_id)
    return done()
