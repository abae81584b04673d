"""Snapshots of VMs, those that specs are built into, and builds."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from forkyard.builds.builds import Builds
from forkyard.compat.freestyle import models, specs
from forkyard.compat.freestyle.background import Background, Progress
from forkyard.compat.freestyle.calls import ACCOUNT, Call, done, time_of
from forkyard.compat.freestyle.errors import Refused
from forkyard.compat.freestyle.notes import instance_of
from forkyard.compat.freestyle.vms import Vms, build_row, setup_failed
from forkyard.control.plane import ControlPlane
from forkyard.control.snapshots import check_name
from forkyard.errors import BuildFailed, BuildNotFound, Conflict, InvalidRequest, SnapshotNotFound
from forkyard.models import SnapshotInfo
from forkyard.models.builds import BuildInfo

BAD_REQUEST = "CREATE_SNAPSHOT_BAD_REQUEST"
MOST_LISTED = 10_000
MOST_BUILDS = 1000


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
        try:
            check_name(body.name or None)
        except InvalidRequest as error:
            raise Refused(error.status, BAD_REQUEST, error.message) from error
        plan = specs.build(body.spec, body.template)
        return await self._background.answer(call, lambda progress: self._ensured(call, body, plan, progress))

    async def _ensured(
        self, call: Call, body: models.EnsureSnapshot, plan: specs.Plan, progress: Progress
    ) -> dict[str, Any]:
        identity = await self._vms.identity_for(plan.repos)
        registry = None if body.credentials is None else body.credentials.auth()
        try:
            snapshot_id = await self._builds.built(
                plan.spec(), identity=identity, registry=registry, key_id=call.who.id, begun=progress.begun
            )
        except BuildFailed as error:
            raise setup_failed(error) from error
        if body.name:
            # Whoever had it was made from what was wanted before.
            await self._control.snapshots.rename(snapshot_id, body.name, take=True)
        return {"snapshotId": snapshot_id}

    async def listed(self, call: Call) -> Response:
        """What is deleted is gone, and what is being built is none yet."""
        found: list[SnapshotInfo] = []
        cursor = None
        while True:
            page = await self._control.snapshots.list(limit=1000, cursor=cursor)
            found += page.items
            cursor = page.next_cursor
            if cursor is None or len(found) >= MOST_LISTED:
                break
        made_by = await self._made_by()
        rows = [_snapshot(one, made_by.get(one.id)) for one in found]
        failed = sum(row["failed"] for row in rows)
        shown = [row for row in rows if not row["failed"] or call.flag("includeFailed", True)]
        counts = dict.fromkeys(("building", "cancelled", "lost", "deleted"), 0)
        counts |= {"failed": failed, "ready": len(rows) - failed}
        return done(
            {
                "snapshots": shown,
                "totalCount": len(shown),
                **{f"{name}Count": count for name, count in counts.items()},
            }
        )

    async def get(self, call: Call) -> Response:
        found = await self._found_snapshot(call)
        return done(_snapshot(found, (await self._made_by()).get(found.id)))

    async def rename(self, call: Call) -> Response:
        body = await call.body(models.RenameSnapshot)
        found = await self._found_snapshot(call)
        try:
            await self._control.snapshots.rename(found.id, body.name)
        except (Conflict, InvalidRequest) as error:
            raise Refused(error.status, BAD_REQUEST, error.message) from error
        return done({"snapshot_id": found.id, "name": body.name})

    async def delete(self, call: Call) -> Response:
        try:
            found = await self._found_snapshot(call)
        except SnapshotNotFound as error:
            if await self._control.snapshots.was_deleted(call.path["id"]):
                message = f"snapshot {call.path['id']} was deleted before"
                raise Refused(409, "SNAPSHOT_ALREADY_DELETED", message) from error
            raise
        await self._control.snapshots.delete(found.id)
        return done({"snapshot_id": found.id})

    async def _found_snapshot(self, call: Call) -> SnapshotInfo:
        return await self._control.snapshots.get(call.path["id"])

    async def _made_by(self) -> dict[str, BuildInfo]:
        """The build of each snapshot that one has left, as long as it is on record."""
        made: dict[str, BuildInfo] = {}
        for build in (await self._builds.list(limit=MOST_BUILDS)).items:
            built = [layer.snapshot_id for layer in build.layers if not layer.cached]
            debug = None if build.failure is None else build.failure.debug_snapshot_id
            made |= {snapshot_id: build for snapshot_id in (*built, debug) if snapshot_id is not None}
        return made

    # ── builds ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def build(self, call: Call) -> Response:
        return done(build_row(await self._found(call)))

    async def phases(self, call: Call) -> Response:
        """Only what failed has a snapshot: clients take the last phase with one for that."""
        build = await self._found(call)
        failure = build.failure
        steps = [(layer.index, "; ".join(layer.steps)) for layer in build.layers if not layer.cached]
        if not steps and failure is not None:  # in the VM itself: it has no layers
            steps = [(failure.layer or 0, failure.what or "setup")]
        failed = None if failure is None else (failure.layer if failure.layer is not None else steps[-1][0])
        return done(
            {
                "phases": [
                    {
                        "phaseId": f"bph-{build.id.removeprefix('bld-')[:16]}{index:04d}",
                        "buildId": build.id,
                        "name": f"layer {index}: {what}"[:200],
                        "snapshotId": failure.debug_snapshot_id if failure is not None and index == failed else None,
                        "startedAt": time_of(build.created_at),
                    }
                    for index, what in steps
                ]
            }
        )

    async def _found(self, call: Call) -> BuildInfo:
        try:
            return await self._builds.get(call.path["id"])
        except BuildNotFound as error:
            raise Refused(404, "NOT_FOUND", error.message) from error


def _snapshot(info: SnapshotInfo, build: BuildInfo | None) -> dict[str, Any]:
    failure = None if build is None else build.failure
    failed = failure is not None and failure.debug_snapshot_id == info.id
    layers = [] if build is None else [layer for layer in build.layers if layer.snapshot_id == info.id]
    return {
        "snapshotId": info.id,
        "state": "failed" if failed else "ready",
        "sourceVmId": info.sandbox_id,
        "accountId": ACCOUNT,
        "createdAt": time_of(info.created_at),
        "name": info.name,
        "failed": failed,
        "cancelled": False,
        "lost": False,
        "failureReason": failure.message if failed and failure is not None else None,
        "deleted": False,
        "snapshotPersistence": {"type": "persistent"},
        "buildId": None if build is None else build.id,
        "templateHash": layers[-1].key if layers else None,
        "vcpuCount": info.shape.vcpus,
        "memSizeMib": info.shape.memory_mib,
        "rootfsSizeMb": info.shape.disk_gib * 1024,
    }
