"""Previews: the address of a port, who may open it, and its token."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from forkyard.api.answers import answer
from forkyard.api.inputs import BoundedRoute, Control
from forkyard.api.problem import documented
from forkyard.errors import SandboxEnded, SandboxNotFound
from forkyard.models.network import PreviewInfo

router = APIRouter(prefix="/sandboxes/{sandbox_id}/previews", tags=["previews"], route_class=BoundedRoute)

_Port = Annotated[int, Path(ge=1, le=65535)]
_EXAMPLE = {
    "url": "http://3000-q7m2v9x4k1c8b3n6d5f0.localhost:7070",
    "access": "public",
    "token": None,
    "link": None,
}
_ANSWERS = documented(SandboxNotFound, SandboxEnded) | {200: {"content": {"application/json": {"example": _EXAMPLE}}}}


@router.get("/{port}", response_model=PreviewInfo, summary="The address of a port", responses=_ANSWERS)
async def get(sandbox_id: str, port: _Port, request: Request, control: Control) -> Response:
    """Does not wake the sandbox, and does not look whether something listens. Every answer has a new one-time link."""
    return answer(await control.previews.info(sandbox_id, port, origin=_origin(request)))


@router.post("/{port}/rotate", response_model=PreviewInfo, summary="Replace the token of a port", responses=_ANSWERS)
async def rotate(sandbox_id: str, port: _Port, request: Request, control: Control) -> Response:
    """The old token, its cookies and its links open nothing from now on."""
    return answer(await control.previews.rotate(sandbox_id, port, origin=_origin(request)))


def _origin(request: Request) -> str | None:
    """Where the daemon is for whoever asks by an address from elsewhere: names below `localhost` do not lead here."""
    try:
        elsewhere = not ipaddress.ip_address(request.url.hostname or "").is_loopback
    except ValueError:
        return None
    return f"{request.url.scheme}://{request.url.netloc}" if elsewhere else None
