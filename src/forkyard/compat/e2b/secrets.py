"""E2B's secrets: ours, by name. A value goes in and never comes out."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forkyard.compat.e2b import models
from forkyard.compat.e2b.errors import Refused
from forkyard.control.plane import ControlPlane
from forkyard.errors import NotFound
from forkyard.models.network import SecretInfo

MAX_PAGE = 100


class SecretRoutes:
    def __init__(self, control: ControlPlane) -> None:
        self._secrets = control.secrets

    async def create(self, request: Request) -> Response:
        body = await models.read(request, models.NewSecret)
        try:
            await self._secrets.get(body.name)
        except NotFound:
            return JSONResponse(_secret(await self._secrets.put(body.name, body.value, body.metadata or {})), 201)
        raise Refused(409, f"secret '{body.name[:128]}' already exists")

    async def update(self, request: Request) -> Response:
        body = await models.read(request, models.SecretUpdate)
        found = await self._found(request)
        return JSONResponse(_secret(await self._secrets.put(found.name, body.value, body.metadata)))

    async def info(self, request: Request) -> Response:
        return JSONResponse(_secret(await self._found(request)))

    async def listed(self, request: Request) -> Response:
        """By name; the token of a page is the last name of the one before."""
        limit = models.number(request.query_params.get("limit"), "limit", 1, 10_000) or MAX_PAGE
        after = unquote(request.query_params.get("nextToken", ""))
        found = [one for one in await self._secrets.list() if one.name > after]
        page = found[: min(limit, MAX_PAGE)]
        headers = {"x-next-token": quote(page[-1].name)} if len(found) > len(page) else {}
        return JSONResponse([_secret(one) for one in page], headers=headers)

    async def delete(self, request: Request) -> Response:
        await self._secrets.delete((await self._found(request)).name)
        return Response(status_code=204)

    async def _found(self, request: Request) -> SecretInfo:
        name = str(request.path_params["secret_id"])
        try:
            return await self._secrets.get(name)
        except NotFound:
            raise Refused(404, f"secret '{name[:128]}' not found") from None


def _secret(info: SecretInfo) -> dict[str, Any]:
    return {
        "secretID": info.name,
        "name": info.name,
        "currentVersion": info.version,
        "metadata": info.metadata,
        "createdAt": _time(info.created_at),
        "updatedAt": _time(info.updated_at),
    }


def _time(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
