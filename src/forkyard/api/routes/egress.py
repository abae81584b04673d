"""The egress log of a sandbox, and its rules."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Body, Query, Response

from forkyard.api.answers import answer
from forkyard.api.inputs import BoundedRoute, Control
from forkyard.api.problem import documented
from forkyard.api.streams import NdjsonStream, lines, opened
from forkyard.errors import HostFailure, InvalidRequest, NoCapacity, OperationTimeout, SandboxEnded, SandboxNotFound
from forkyard.models import Page, SandboxInfo
from forkyard.models.network import EgressRecord, EgressRule, EgressTotals, Verdict

router = APIRouter(prefix="/sandboxes/{sandbox_id}/egress", tags=["network"], route_class=BoundedRoute)


@router.get(
    "",
    response_model=Page[EgressRecord],
    summary="Read or follow what left a sandbox",
    responses=documented(SandboxNotFound, NoCapacity)
    | {
        200: {
            "description": "A page; with `follow`, one record per line, without end.",
            "content": {NdjsonStream.media_type: {"schema": {"type": "string"}}},
        }
    },
)
async def list_(
    sandbox_id: str,
    control: Control,
    exec_id: Annotated[str | None, Query(max_length=64, description="Only what this exec did.")] = None,
    kind: Annotated[Literal["tcp", "dns", "http"] | None, Query()] = None,
    verdict: Annotated[Verdict | None, Query()] = None,
    after: Annotated[
        int | None,
        Query(ge=0, le=2**63 - 1, description="Only records after this id. Default: all; with `follow`, from now on."),
    ] = None,
    tail: Annotated[
        int | None, Query(ge=1, le=1000, description="Begin with so many of the newest records; not with `after`.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Of one page; not with `follow`.")] = 100,
    follow: bool = False,
) -> Response:
    """Connections and DNS queries, each when it is over, oldest first; also of a sandbox that has ended. `next_cursor`
    of a page is the `after` of the next. The newest 10,000 are kept."""
    if tail is not None:
        if after is not None:
            raise InvalidRequest("give `after` or `tail`, not both", field="query.tail")
        after = await control.egress.before_newest(sandbox_id, tail)
    if not follow:
        found = await control.egress.page(
            sandbox_id, exec_id=exec_id, kind=kind, verdict=verdict, after=after or 0, limit=limit
        )
        return answer(found)
    following = control.egress.follow(sandbox_id, exec_id=exec_id, kind=kind, verdict=verdict, after=after)
    stack, rows = await opened(following)
    return NdjsonStream(stack, lines(rows))


@router.get(
    "/totals",
    response_model=EgressTotals,
    summary="How much left a sandbox",
    responses=documented(SandboxNotFound),
)
async def totals(sandbox_id: str, control: Control) -> Response:
    """Over its life, previews included."""
    return answer(await control.egress.totals(sandbox_id))


@router.post(
    "/rules",
    response_model=SandboxInfo,
    summary="Put a rule ahead of the others",
    responses=documented(SandboxNotFound, SandboxEnded, OperationTimeout, HostFailure),
)
async def add_rule(
    sandbox_id: str,
    control: Control,
    body: Annotated[EgressRule, Body(examples=[{"action": "allow", "domain": "*.example.com", "ports": [443]}])],
) -> Response:
    """In force when this answers, also for open connections. A rule for the same destination is replaced."""
    await control.networks.add_rule(sandbox_id, body)
    return answer(await control.sandboxes.get(sandbox_id))
