"""Snapshots of VMs, those that specs are built into, and builds."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from forkyard.builds.builds import Builds
from forkyard.compat.freestyle import models, specs
from forkyard.compat.freestyle.background import Background, Progress
from forkyard.compat.freestyle.calls import Call, done, time_of
from forkyard.compat.freestyle.errors import Refused
from forkyard.compat.freestyle.notes import instance_of
from forkyard.compat.freestyle.vms import Vms, build_row, setup_failed
from forkyard.control.plane import ControlPlane
from forkyard.errors import BuildFailed, BuildNotFound, Conflict, InvalidRequest
from forkyard.models import SnapshotInfo

BAD_REQUEST = "CREATE_SNAPSHOT_BAD_REQUEST"
MOST_LISTED = 10_000


class Snapshots:
    def __init__(self, control: ControlPlane, builds: Builds, vms: Vms, background: Background) -> None:
        self._control = control
        self._builds = builds
        self._vms = vms
        self._background = background

    async def take(self, call: Call) -> Response:
        body = await call.body(models.SnapshotVm)
        info = await self._vms.living(call)
        try:
            made = await self._control.snapshots.create(info.id, body.name or None)
        except (Conflict, InvalidRequest) as error:
            raise Refused(error.status, "SNAPSHOT_VM_BAD_REQUEST", error.message) from error
        return done({"snapshotId": made.id, "sourceVmId": info.id, "sourceVmInstanceId": instance_of(info)})

    async def ensure(self, call: Call) -> Response:
        """From the cache, or built now."""
        body = await call.body(models.EnsureSnapshot, BAD_REQUEST)
        plan = specs.build(body.spec, body.template)
        return await self._background.answer(call, lambda progress: self._ensured(call, body, plan, progress))

    async def _ensured(
        self, call: Call, body: models.EnsureSnapshot, plan: specs.Plan, progress: Progress
    ) -> dict[str, Any]:
        identity = await self._vms.identity_for(plan.repos)
        try:
            snapshot_id = await self._builds.built(
                plan.spec(), identity=identity, key_id=call.who.id, begun=progress.begun
            )
        except BuildFailed as error:
            raise setup_failed(error) from error
        if body.name:
            await self._named(snapshot_id, body.name)
        return {"snapshotId": snapshot_id}

    async def _named(self, snapshot_id: str, name: str) -> None:
        try:
            await self._control.snapshots.rename(snapshot_id, name)
        except (Conflict, InvalidRequest) as error:
            raise Refused(error.status, BAD_REQUEST, error.message) from error

    async def listed(self, _: Call) -> Response:
        found: list[SnapshotInfo] = []
        cursor = None
        while True:
            page = await self._control.snapshots.list(limit=1000, cursor=cursor)
            found += page.items
            cursor = page.next_cursor
            if cursor is None or len(found) >= MOST_LISTED:
                break
        counts = dict.fromkeys(("building", "failed", "cancelled", "lost", "deleted"), 0) | {"ready": len(found)}
        return done(
            {
                "snapshots": [_snapshot(one) for one in found],
                "totalCount": len(found),
                **{f"{name}Count": count for name, count in counts.items()},
            }
        )

    async def get(self, call: Call) -> Response:
        return done(_snapshot(await self._control.snapshots.get(call.path["id"])))

    async def rename(self, call: Call) -> Response:
        body = await call.body(models.RenameSnapshot)
        found = await self._control.snapshots.get(call.path["id"])
        await self._named(found.id, body.name)
        return done({"snapshot_id": found.id, "name": body.name})

    async def delete(self, call: Call) -> Response:
        found = await self._control.snapshots.get(call.path["id"])
        await self._control.snapshots.delete(found.id)
        return done({"snapshot_id": found.id})

    # ── builds ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def build(self, call: Call) -> Response:
        return done(build_row(await self._found(call)))

    async def phases(self, call: Call) -> Response:
        build = await self._found(call)
        return done(
            {
                "phases": [
                    {
                        "phaseId": f"bph-{build.id.removeprefix('bld-')[:16]}{layer.index:04d}",
                        "buildId": build.id,
                        "name": f"layer {layer.index}: {'; '.join(layer.steps)}"[:200],
                        "snapshotId": layer.snapshot_id,
                        "startedAt": time_of(build.created_at),
                    }
                    for layer in build.layers
                    if not layer.cached
                ]
            }
        )

    async def _found(self, call: Call) -> Any:
        try:
            return await self._builds.get(call.path["id"])
        except BuildNotFound as error:
            raise Refused(404, "NOT_FOUND", error.message) from error


def _snapshot(info: SnapshotInfo) -> dict[str, Any]:
    return {
        "snapshotId": info.id,
        "state": "ready",
        "sourceVmId": info.sandbox_id,
        "accountId": "forkyard",
        "createdAt": time_of(info.created_at),
        "name": info.name,
        "failed": False,
        "cancelled": False,
        "lost": False,
        "deleted": False,
        "snapshotPersistence": {"type": "persistent"},
        "vcpuCount": info.shape.vcpus,
        "memSizeMib": info.shape.memory_mib,
        "rootfsSizeMb": info.shape.disk_gib * 1024,
    }
