"""API keys: create (shown once), list, delete."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Response

from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute, Control
from forkyard.api.problem import documented
from forkyard.errors import Conflict, NotFound
from forkyard.models import KeyCreate, KeyCreated, KeyInfo, Page

router = APIRouter(prefix="/keys", tags=["keys"], route_class=BoundedRoute)


@router.get("", response_model=Page[KeyInfo], summary="List API keys")
async def list_(control: Control) -> Response:
    return answer(Page[KeyInfo](items=await control.keys.list()))


@router.post("", status_code=201, response_model=KeyCreated, summary="Create an API key")
async def create(body: Annotated[KeyCreate, Body(examples=[{"name": "ci"}])], control: Control) -> Response:
    """The answer shows the key this once; only its hash is kept."""
    return answer(await control.keys.create(body.name, body.format), 201)


@router.delete("/{key_id}", status_code=204, summary="Delete an API key", responses=documented(NotFound, Conflict))
async def delete(key_id: str, control: Control) -> Response:
    """The last one cannot be deleted."""
    await control.keys.delete(key_id)
    return done()
