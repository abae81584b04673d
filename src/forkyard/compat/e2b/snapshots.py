"""E2B's snapshots. The id and the name of one are a template there."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from forkyard.compat.e2b import models
from forkyard.compat.e2b.errors import Refused
from forkyard.control.pages import cursor_after
from forkyard.control.plane import ControlPlane
from forkyard.errors import ForkyardError, SandboxEnded, SandboxNotFound, SnapshotNotFound
from forkyard.guest.base import ExecSpec
from forkyard.lifecycle import ENDED, State
from forkyard.models import SnapshotInfo
from forkyard.store.records import Place, SnapshotRecord

#: E2B's names of snapshots begin with that of a team.
TEAM = "forkyard"
TAG = "default"
MAX_PAGE = 100
#: A note of a snapshot: what is made from it boots its disk.
DISK_ALONE = "e2b-disk-alone"
SYNC_S = 30.0


def split(given: str) -> tuple[str, str]:
    """`team/name:tag`: the name, and the tag if there is one."""
    name, _, tag = given.rpartition("/")[2].partition(":")
    return name, tag


def _own(given: str) -> str:
    """The name of a snapshot of ours: the tag that everything has is not in it."""
    name, tag = split(given)
    return name if tag in ("", TAG) else f"{name}:{tag}"


async def find_snapshot(control: ControlPlane, given: str) -> SnapshotRecord:
    """By id or name."""
    try:
        return await control.snapshots.find(given)
    except SnapshotNotFound:
        return await control.snapshots.find(_own(given))


class Snapshots:
    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def create(self, request: Request) -> Response:
        """With a name that another one has it takes that name over."""
        body = await models.read(request, models.NewSnapshot)
        sandbox_id = str(request.path_params["sandbox_id"])
        name = None if body.name is None else _own(body.name) or None
        try:
            info = await self._control.sandboxes.get(sandbox_id)
            if info.state in ENDED:
                raise SandboxEnded
            if not body.memory and info.state is State.RUNNING:
                await self._to_disk(sandbox_id)
            note = {} if body.memory else {DISK_ALONE: "yes"}
            made = await self._control.snapshots.create(sandbox_id, annotations=note)
        except (SandboxNotFound, SandboxEnded):
            raise Refused(404, f"sandbox '{sandbox_id[:64]}' not found") from None
        if name is not None:
            try:
                made = await self._control.snapshots.rename(made.id, name, take=True)
            except ForkyardError:
                await self._control.snapshots.delete(made.id)
                raise
        return JSONResponse(_snapshot(made), 201)

    async def _to_disk(self, sandbox_id: str) -> None:
        """What programs have written may still be only in memory, which will not count."""
        async with (
            self._control.sandboxes.use(sandbox_id) as guest,
            guest.execute(ExecSpec(["sync"], timeout_s=SYNC_S)) as execution,
        ):
            async for _ in execution:
                pass

    async def listed(self, request: Request) -> Response:
        query = request.query_params
        limit = min(models.number(query.get("limit"), "limit", 1, 10_000) or MAX_PAGE, MAX_PAGE)
        name, sandbox_id, cursor = query.get("name"), query.get("sandboxID") or None, query.get("nextToken") or None
        found: list[SnapshotInfo] = []
        while len(found) <= limit:
            page = await self._control.snapshots.list(
                sandbox_id=sandbox_id, automatic=False, limit=1000 if name else limit + 1, cursor=cursor
            )
            found += [one for one in page.items if not name or _is(one, name)]
            cursor = page.next_cursor
            if cursor is None:
                break
        headers = (
            {}
            if len(found) <= limit
            else {"x-next-token": cursor_after(Place(found[limit - 1].created_at, found[limit - 1].id))}
        )
        return JSONResponse([_snapshot(one) for one in found[:limit]], headers=headers)


def _is(info: SnapshotInfo, given: str) -> bool:
    """By id or name; a name without a tag is that of all its tags."""
    if info.name is None or given == info.id:
        return given == info.id
    name, tag = split(given)
    return split(info.name)[0] == name and (not tag or _own(info.name) == _own(given))


def _snapshot(info: SnapshotInfo) -> dict[str, Any]:
    if info.name is None:
        return {"snapshotID": info.id, "names": []}
    name, tag = split(info.name)
    return {"snapshotID": info.id, "names": [f"{TEAM}/{name}:{tag or TAG}"]}
