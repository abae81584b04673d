"""E2B's snapshots. The id and the name of one are a template there."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forkyard.compat.e2b import models
from forkyard.compat.e2b.errors import Refused
from forkyard.control.plane import ControlPlane
from forkyard.errors import SandboxEnded, SandboxNotFound, SnapshotNotFound
from forkyard.lifecycle import ENDED
from forkyard.models import SnapshotInfo

#: E2B's names of snapshots begin with that of a team.
TEAM = "forkyard"
TAG = "default"
MAX_PAGE = 100


async def find_snapshot(control: ControlPlane, given: str) -> SnapshotInfo:
    """By id or name; `team/name:tag` is the name."""
    try:
        return await control.snapshots.get(given)
    except SnapshotNotFound:
        return await control.snapshots.get(given.rpartition("/")[2].partition(":")[0])


class Snapshots:
    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def create(self, request: Request) -> Response:
        body = await models.read(request, models.NewSnapshot)
        sandbox_id = str(request.path_params["sandbox_id"])
        name = None if body.name is None else body.name.rpartition("/")[2].partition(":")[0] or None
        try:
            info = await self._control.sandboxes.get(sandbox_id)
            if info.state in ENDED:
                raise SandboxEnded
            made = await self._control.snapshots.create(sandbox_id, name)
        except (SandboxNotFound, SandboxEnded):
            raise Refused(404, f"sandbox '{sandbox_id[:64]}' not found") from None
        return JSONResponse(_snapshot(made), 201)

    async def listed(self, request: Request) -> Response:
        query = request.query_params
        limit = models.number(query.get("limit"), "limit", 1, 10_000) or MAX_PAGE
        name, sandbox_id = query.get("name"), query.get("sandboxID") or None
        if name:
            try:
                found = await find_snapshot(self._control, name)
            except SnapshotNotFound:
                return JSONResponse([])
            return JSONResponse([_snapshot(found)] if sandbox_id in (None, found.sandbox_id) else [])
        page = await self._control.snapshots.list(
            sandbox_id=sandbox_id,
            automatic=False,
            limit=min(limit, MAX_PAGE),
            cursor=query.get("nextToken") or None,
        )
        headers = {} if page.next_cursor is None else {"x-next-token": page.next_cursor}
        return JSONResponse([_snapshot(one) for one in page.items], headers=headers)


def _snapshot(info: SnapshotInfo) -> dict[str, Any]:
    names = [] if info.name is None else [f"{TEAM}/{info.name}:{TAG}"]
    return {"snapshotID": info.id, "names": names}
