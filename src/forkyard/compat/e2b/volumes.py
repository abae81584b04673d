"""E2B's volumes: ours, by id or name. What is in one is reached from a sandbox that has it, or by its token
(`volume_files`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forkyard.compat.e2b import models
from forkyard.compat.e2b.errors import Refused
from forkyard.control.plane import ControlPlane
from forkyard.errors import VolumeNotFound
from forkyard.models.volumes import VolumeCreate, VolumeInfo


class VolumeRoutes:
    def __init__(self, control: ControlPlane, token_of: Callable[[str], str]) -> None:
        self._volumes = control.volumes
        self._token_of = token_of

    async def create(self, request: Request) -> Response:
        body = await models.read(request, models.NewVolume)
        try:
            wanted = VolumeCreate.model_validate({"name": body.name})
        except ValidationError:
            raise Refused(400, "the name of a volume has up to 63 letters, digits and any of . _ -") from None
        made = await self._volumes.create(wanted, key_id=request.state.principal.id)
        return JSONResponse(self._told(made), 201)

    async def listed(self, _request: Request) -> Response:
        return JSONResponse([{"volumeID": one.id, "name": one.name} for one in await self._volumes.list()])

    async def info(self, request: Request) -> Response:
        return JSONResponse(self._told(await self._found(request)))

    async def delete(self, request: Request) -> Response:
        await self._volumes.delete((await self._found(request)).id)
        return Response(status_code=204)

    async def _found(self, request: Request) -> VolumeInfo:
        given = str(request.path_params["volume_id"])
        try:
            return await self._volumes.get(given)
        except VolumeNotFound:
            raise Refused(404, f"volume '{given[:128]}' not found") from None

    def _told(self, info: VolumeInfo) -> dict[str, Any]:
        return {"volumeID": info.id, "name": info.name, "token": self._token_of(info.id)}
