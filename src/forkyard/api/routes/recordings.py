"""Recordings of HTTP exchanges: list, show, delete."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute, Control
from forkyard.api.problem import documented
from forkyard.control.plane import ControlPlane
from forkyard.errors import NotFound
from forkyard.models import Page
from forkyard.models.network import RecordedExchange, RecordingInfo
from forkyard.net.recordings import Recordings

router = APIRouter(prefix="/recordings", tags=["network"], route_class=BoundedRoute)

_Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


@router.get("", response_model=Page[RecordingInfo], summary="List recordings", responses=documented(NotFound))
async def list_(control: Control) -> Response:
    return answer(Page[RecordingInfo](items=await _recordings(control).list()))


@router.get(
    "/{name}",
    response_model=Page[RecordedExchange],
    summary="What a recording has",
    responses=documented(NotFound),
)
async def get(name: _Name, control: Control) -> Response:
    return answer(Page[RecordedExchange](items=await _recordings(control).exchanges(name)))


@router.delete("/{name}", status_code=204, summary="Delete a recording", responses=documented(NotFound))
async def delete(name: _Name, control: Control) -> Response:
    """Sandboxes that replay it get no answers any more; one that records under this name begins anew."""
    await _recordings(control).delete(name)
    return done()


def _recordings(control: ControlPlane) -> Recordings:
    if control.recordings is None:
        raise NotFound("this daemon keeps no recordings")
    return control.recordings
