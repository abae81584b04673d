"""Stored secrets, and the certificate of the authority that puts them in. A value goes in and never comes out."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Response

from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute, Control
from forkyard.api.problem import documented
from forkyard.errors import NotFound
from forkyard.models import Page
from forkyard.models.network import SecretInfo, SecretPut

router = APIRouter(tags=["network"], route_class=BoundedRoute)

_Name = Annotated[str, Path(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$", description="As the variable in a sandbox.")]


@router.get("/secrets", response_model=Page[SecretInfo], summary="List stored secrets, without their values")
async def list_(control: Control) -> Response:
    return answer(Page[SecretInfo](items=await control.secrets.list()))


@router.put("/secrets/{name}", response_model=SecretInfo, summary="Store a secret, or change it")
async def put(
    name: _Name, control: Control, body: Annotated[SecretPut, Body(examples=[{"value": "a-token"}])]
) -> Response:
    """Encrypted at rest. Sandboxes that use the stored secret of this name send the new value from now on."""
    return answer(await control.secrets.put(name, body.value))


@router.get(
    "/secrets/{name}",
    response_model=SecretInfo,
    summary="Get a stored secret, without its value",
    responses=documented(NotFound),
)
async def get(name: _Name, control: Control) -> Response:
    return answer(await control.secrets.get(name))


@router.delete("/secrets/{name}", status_code=204, summary="Delete a stored secret", responses=documented(NotFound))
async def delete(name: _Name, control: Control) -> Response:
    """Sandboxes that use it send their placeholder from now on."""
    await control.secrets.delete(name)
    return done()


@router.get(
    "/ca",
    response_class=Response,
    summary="The certificate of this installation's authority",
    responses=documented(NotFound) | {200: {"content": {"application/x-pem-file": {"schema": {"type": "string"}}}}},
)
async def certificate(control: Control) -> Response:
    """PEM. Trust it to open previews over HTTPS. Sandboxes with secrets, `record` or `replay` trust it by themselves."""
    if control.authority is None:
        raise NotFound("this daemon has no certificate authority")
    return Response(control.authority.certificate_pem, media_type="application/x-pem-file")
