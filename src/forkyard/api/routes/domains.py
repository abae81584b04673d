"""Domains of users, mapped to a port of a sandbox."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Response

from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute, Control
from forkyard.api.problem import documented
from forkyard.errors import Conflict, DomainNotFound, DomainUnverified, OperationTimeout, SandboxNotFound
from forkyard.models import Page
from forkyard.models.network import DomainCreate, DomainInfo, DomainMap

router = APIRouter(prefix="/domains", tags=["previews"], route_class=BoundedRoute)

_Domain = Annotated[str, Path(max_length=253)]
_EXAMPLE = {
    "domain": "app.example.com",
    "sandbox_id": "q7m2v9x4k1c8b3n6d5f0",
    "port": 3000,
    "verified": False,
    "record_name": "_forkyard.app.example.com",
    "record_value": "forkyard-0f1e2d3c4b5a69788796a5b4c3d2e1f0",
    "created_at": "2026-01-01T12:00:00Z",
}
_SHOWN = {"content": {"application/json": {"example": _EXAMPLE}}}


@router.post(
    "",
    status_code=201,
    response_model=DomainInfo,
    summary="Add a domain",
    responses=documented(SandboxNotFound, Conflict) | {201: _SHOWN},
)
async def add(
    control: Control,
    body: Annotated[
        DomainCreate, Body(examples=[{"domain": "app.example.com", "sandbox_id": "q7m2v9x4k1c8b3n6d5f0", "port": 3000}])
    ],
) -> Response:
    """It serves once the TXT record of the answer is set and `verify` has seen it."""
    return answer(await control.domains.add(body), 201)


@router.get("", response_model=Page[DomainInfo], summary="List domains")
async def list_(control: Control) -> Response:
    return answer(Page[DomainInfo](items=await control.domains.list(), next_cursor=None))


@router.put(
    "/{domain}",
    response_model=DomainInfo,
    summary="Map a domain to another sandbox or port",
    responses=documented(DomainNotFound, SandboxNotFound) | {200: _SHOWN},
)
async def map_(
    domain: _Domain,
    control: Control,
    body: Annotated[DomainMap, Body(examples=[{"sandbox_id": "q7m2v9x4k1c8b3n6d5f0", "port": 3000}])],
) -> Response:
    """At once, and without a gap: requests under way end where they began."""
    return answer(await control.domains.map(domain, body))


@router.post(
    "/{domain}/verify",
    response_model=DomainInfo,
    summary="Look for the TXT record of a domain",
    responses=documented(DomainNotFound, DomainUnverified, OperationTimeout) | {200: _SHOWN},
)
async def verify(domain: _Domain, control: Control) -> Response:
    return answer(await control.domains.verify(domain))


@router.delete("/{domain}", status_code=204, summary="Remove a domain", responses=documented(DomainNotFound))
async def remove(domain: _Domain, control: Control) -> Response:
    await control.domains.remove(domain)
    return done()
