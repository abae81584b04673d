"""Reviews of branches that are hosted here and of pull requests on GitHub."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Query, Response

from forkyard.api.access import By, Hosting
from forkyard.api.answers import answer
from forkyard.api.inputs import BoundedRoute
from forkyard.api.problem import documented
from forkyard.errors import Conflict, HostFailure, NotFound, OperationTimeout, RepoNotFound, RevisionNotFound
from forkyard.models import Page
from forkyard.models.reviews import Dossier, ReviewCreate, ReviewInfo, ReviewVerdict


class ReviewRoute(BoundedRoute):
    """Verdicts with many comments."""

    max_body_bytes = 8 * 2**20


router = APIRouter(
    prefix="/git/reviews",
    tags=["git"],
    route_class=ReviewRoute,
    responses=documented(NotFound, RepoNotFound, RevisionNotFound, Conflict, HostFailure, OperationTimeout),
)
_EXAMPLE = {
    "target": {"type": "hosted", "repo": "app", "head": "fix"},
    "steps": [{"name": "test", "command": "make test"}],
}


@router.post("", status_code=202, response_model=ReviewInfo, summary="Review a branch or a pull request")
async def create(body: Annotated[ReviewCreate, Body(examples=[_EXAMPLE])], hosting: Hosting, by: By) -> Response:
    """It goes on by itself. Asking again for the same head gives the same review; if that failed, it is tried again."""
    return answer(await hosting.reviews.request(body, by), 202)


@router.get("", response_model=Page[ReviewInfo], summary="List reviews, newest first")
async def list_(
    hosting: Hosting,
    repo: Annotated[str | None, Query(max_length=100, description="Of this hosted repository.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    return answer(await hosting.reviews.list(repo=repo, limit=limit, cursor=cursor))


@router.get("/{review_id}", response_model=ReviewInfo, summary="Get a review")
async def get(
    review_id: str,
    hosting: Hosting,
    wait_s: Annotated[float, Query(ge=0, le=30, description="Answer earlier only if it no longer runs.")] = 0.0,
) -> Response:
    return answer(await hosting.reviews.get(review_id, wait_s=wait_s))


@router.get("/{review_id}/dossier", response_model=Dossier, summary="What its reviewer is handed")
async def dossier(review_id: str, hosting: Hosting) -> Response:
    return answer(await hosting.reviews.dossier(review_id))


@router.post("/{review_id}/verdict", response_model=ReviewInfo, summary="Give the verdict of a client")
async def verdict(
    review_id: str, body: Annotated[ReviewVerdict, Body(examples=[{"event": "APPROVE"}])], hosting: Hosting
) -> Response:
    """Of a review whose reviewer is `client`, when it is `waiting`."""
    return answer(await hosting.reviews.give(review_id, body))
