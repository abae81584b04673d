"""Events: history in pages, or as it happens."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from forkyard.api.answers import answer
from forkyard.api.inputs import BoundedRoute, Control
from forkyard.api.problem import documented
from forkyard.api.streams import NdjsonStream, lines, opened
from forkyard.errors import InvalidRequest, NoCapacity
from forkyard.models import EventInfo, Page

router = APIRouter(prefix="/events", tags=["events"], route_class=BoundedRoute)


@router.get(
    "",
    response_model=Page[EventInfo],
    summary="Read or follow events",
    responses=documented(NoCapacity)
    | {
        200: {
            "description": "A page; with `follow`, one event per line, without end.",
            "content": {NdjsonStream.media_type: {"schema": {"type": "string"}}},
        }
    },
)
async def events(
    control: Control,
    sandbox_id: Annotated[str | None, Query(max_length=64)] = None,
    after: Annotated[
        int | None,
        Query(ge=0, le=2**63 - 1, description="Only events after this id. Default: all; with `follow`, from now on."),
    ] = None,
    tail: Annotated[
        int | None, Query(ge=1, le=1000, description="Begin with so many of the newest events; not with `after`.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Of one page; not with `follow` or `tail`.")] = 100,
    follow: bool = False,
) -> Response:
    """Oldest first. `next_cursor` of a page is the `after` of the next."""
    if tail is not None:
        if after is not None:
            raise InvalidRequest("give `after` or `tail`, not both", field="query.tail")
        after, limit = await control.events.before_newest(tail, sandbox_id=sandbox_id), tail
    if not follow:
        return answer(await control.events.page(sandbox_id=sandbox_id, after=after or 0, limit=limit))
    stack, rows = await opened(control.events.follow(sandbox_id=sandbox_id, after=after))
    return NdjsonStream(stack, lines(rows))
