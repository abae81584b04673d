"""VMs: made, looked at, put to sleep, forked, ended. A VM is a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from forkyard.builds.builds import Builds
from forkyard.compat.freestyle import models, specs
from forkyard.compat.freestyle.background import Background, Progress
from forkyard.compat.freestyle.calls import Call, done, time_of
from forkyard.compat.freestyle.domains import FREE, Domains
from forkyard.compat.freestyle.errors import Refused, not_served, refusal
from forkyard.compat.freestyle.notes import Note, instance_of, state_of
from forkyard.control.plane import ControlPlane
from forkyard.errors import BuildFailed, ForkyardError, SandboxNotFound, from_problem
from forkyard.git.hosting import GitHosting
from forkyard.lifecycle import ENDED, State
from forkyard.models import SandboxCreate, SandboxFork, SandboxInfo, SandboxResize, SandboxUpdate

BAD_REQUEST = "CREATE_VM_BAD_REQUEST"
_ID = re.compile(r"[a-z0-9]{20}", re.ASCII)
MOST_LISTED = 10_000
_GONE = frozenset({State.DELETING, State.DELETED})


class Vms:
    def __init__(
        self, control: ControlPlane, hosting: GitHosting, builds: Builds, background: Background, mapping: Domains
    ) -> None:
        self._control = control
        self._hosting = hosting
        self._builds = builds
        self._background = background
        self._mapping = mapping

    # ── create ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(self, call: Call) -> Response:
        body = await call.body(models.NewVm, BAD_REQUEST)
        if body.nics:
            raise not_served("nics of a VM (there are no VPCs)")
        if body.udp:
            raise not_served("UDP ports from outside")
        plan = specs.plan(body, body.spec, body.template)
        return await self._background.answer(call, lambda progress: self._made(call, body, plan, progress))

    async def _made(self, call: Call, body: models.NewVm, plan: specs.Plan, progress: Progress) -> dict[str, Any]:
        key_id = call.who.id
        wanted = await self._wanted(body, plan)
        try:
            if plan.cached:
                registry = None if body.credentials is None else body.credentials.auth()
                built = wanted.model_copy(update={"spec": plan.spec(), "registry": registry})
                info = await self._builds.sandbox(built, api_key_id=key_id, begun=progress.begun)
            else:
                info = await self._control.sandboxes.create(wanted, api_key_id=key_id)
        except BuildFailed as error:
            raise setup_failed(error) from error
        try:
            info = await self._in_its_size(info, plan)
            if plan.own:
                await self._builds.set_up(info.id, plan.own, key_id=key_id)
            domains = await self._map(info, body.domains or [])
            if progress.build_id is not None:
                note = Note(**{**vars(Note.of(info)), "build_id": progress.build_id})
                change = SandboxUpdate(annotations=note.annotations(info.annotations))
                await self._control.sandboxes.update(info.id, change)
        except BaseException as error:
            with contextlib.suppress(ForkyardError):
                await asyncio.shield(self._control.sandboxes.delete(info.id))
            if isinstance(error, BuildFailed):
                raise setup_failed(error) from error
            raise
        made = {"id": info.id, "domains": [*domains, *self._domains(info)]}
        return made if info.snapshot_id is None else {**made, "snapshotId": info.snapshot_id}

    async def _in_its_size(self, info: SandboxInfo, plan: specs.Plan) -> SandboxInfo:
        """What is made from a snapshot has the size of that, until it is booted."""
        wanted = info.shape.model_copy(update=plan.size)
        if plan.snapshot_id is None or wanted == info.shape:
            return info
        if wanted.disk_gib < info.shape.disk_gib:
            raise _shrunk("CREATE_VM_BAD_REQUEST", info, wanted.disk_gib)
        return await self._resized(info, SandboxResize(**plan.size))

    async def _wanted(self, body: models.NewVm, plan: specs.Plan) -> SandboxCreate:
        keep = body.persistence or models.Persistence()
        note = Note(plan.workdir, recreate=bool(body.recreate))
        fields: dict[str, Any] = {}
        if plan.snapshot_id is not None:
            origin = await self._origin(plan.snapshot_id)
            note = Note(plan.workdir or origin.workdir, origin.port, recreate=note.recreate)
            fields["snapshot"] = plan.snapshot_id
        if plan.port is not None:
            note = Note(note.workdir, plan.port, recreate=note.recreate)
        if plan.cached:
            fields.pop("snapshot", None)
        elif plan.snapshot_id is None:
            fields |= plan.size
        if body.threshold is not None:
            fields["activity_threshold_bytes"] = body.threshold
        return SandboxCreate(
            identity=await self.identity_for(plan.repos),
            name=body.name,
            idle_timeout_s=plan.idle_s,
            persistence=keep.ours,
            priority=5 if keep.priority is None else keep.priority,
            annotations=note.annotations(),
            **fields,
        )

    async def _origin(self, snapshot_id: str) -> Note:
        """What is known of the VM that a snapshot was taken of."""
        snapshot = await self._control.snapshots.get(snapshot_id)
        try:
            return Note.of(await self._control.sandboxes.get(snapshot.sandbox_id))
        except SandboxNotFound:
            return Note()

    async def identity_for(self, repos: list[str]) -> str | None:
        """Who may use these repositories, and nothing else."""
        if not repos:
            return None
        found = [await self._hosting.repositories.get(repo) for repo in repos]
        ids = sorted({repo.id for repo in found})
        if len(ids) == 1:
            return await self._hosting.only(found[0], "write")
        purpose = hashlib.sha256(" ".join(ids).encode()).hexdigest()[:24]
        identity = await self._control.identities.ensure_managed(f"freestyle:{purpose}", "repositories of a VM")
        for repo_id in ids:
            await self._control.identities.grant_repo(identity.id, repo_id, "write", by="forkyard")
        return identity.id

    async def _map(self, info: SandboxInfo, wanted: list[models.DomainWanted]) -> list[str]:
        """Names that are Freestyle's to give away are left out: a VM has an address anyway."""
        own = [one for one in wanted if not one.domain.lower().endswith(FREE)]
        return [(await self._mapping.mapped(one.domain, info.id, one.port)).domain for one in own]

    def _domains(self, info: SandboxInfo) -> list[str]:
        """Where its port is seen from outside; as host and port, for there they are always behind `https://`."""
        port = Note.of(info).port
        return [] if port == specs.NO_PORT else [self._control.previews.address.url(info.id, port).partition("://")[2]]

    # ── look ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def listed(self, call: Call) -> Response:
        limit, offset = call.number("limit", MOST_LISTED, 1), call.number("offset", 0)
        wanted, search = call.query("vmState"), (call.query("search") or "").lower()
        states = None if call.flag("includeDeleted") else [state for state in State if state not in _GONE]
        found: list[SandboxInfo] = []
        cursor = None
        while True:
            page = await self._control.sandboxes.list(states=states, ended=True, limit=1000, cursor=cursor)
            found += page.items
            cursor = page.next_cursor
            if cursor is None or len(found) >= MOST_LISTED:
                break
        counts: dict[str, int] = {}
        for info in found:
            counts[state_of(info)] = counts.get(state_of(info), 0) + 1
        shown = [
            info
            for info in found
            if (wanted is None or state_of(info) == wanted)
            and (search in info.id or search in (info.name or "").lower())
        ]
        names = ("running", "starting", "suspended", "stopped", "building", "suspending", "lost")
        return done(
            {
                "vms": [_row(info) for info in shown[offset : offset + limit]],
                "totalCount": len(shown),
                **{f"{name}Count": counts.get(name, 0) for name in names},
                "userId": call.who.id,
            }
        )

    async def info(self, call: Call) -> Response:
        info = await self.living(call)
        row = _row(info)
        return done(
            {
                **{name: row[name] for name in ("id", "name", "state", "lastNetworkActivity", "buildId")},
                "recreate": Note.of(info).recreate,
                "vmInstanceId": instance_of(info),
                "cpuTimeSeconds": await self._cpu_s(info),
            }
        )

    async def _cpu_s(self, info: SandboxInfo) -> float | None:
        if info.state is State.RUNNING:
            with contextlib.suppress(ForkyardError):
                return (await self._control.sandboxes.usage(info.id)).cpu_s
        return None

    async def build(self, call: Call) -> Response:
        build_id = Note.of(await self.living(call)).build_id
        if build_id is None:
            raise Refused(404, "NOT_FOUND", "this VM was not built: all it is made of was there before")
        return done(build_row(await self._builds.get(build_id)))

    async def living(self, call: Call) -> SandboxInfo:
        return await self.found(call.path["vm"])

    async def found(self, vm: str) -> SandboxInfo:
        if _ID.fullmatch(vm) is None:
            raise Refused(400, "INVALID_VM_ID", f"{vm[:64]!r} is no id of a VM")
        try:
            info = await self._control.sandboxes.get(vm)
        except SandboxNotFound:
            raise Refused(404, "VM_NOT_FOUND", f"there is no VM {vm[:64]!r}") from None
        if info.state in _GONE:
            raise Refused(410, "VM_DELETED", f"VM {vm} was deleted")
        return info

    # ── change ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def delete(self, call: Call) -> Response:
        info = await self.living(call)
        await self._control.sandboxes.delete(info.id)
        return done({"id": info.id, "recreate": False})

    async def start(self, call: Call) -> Response:
        """Boots what is stopped, and resumes what sleeps."""
        body = await call.body(models.StartVm)
        info = await self.living(call)
        change: dict[str, Any] = {}
        if "idle_s" in body.model_fields_set:
            change["idle_timeout_s"] = body.idle_s
        if body.threshold is not None:
            change["activity_threshold_bytes"] = body.threshold
        if change:
            await self._control.sandboxes.update(info.id, SandboxUpdate(**change))
        if info.state in (State.STOPPED, State.STOPPING, State.FAILED):
            info = await self._control.power.start(info.id)
        else:
            info = await self._control.sleep.resume(info.id)
        return done({"id": info.id, "domains": self._domains(info), "console_url": None})

    async def suspend(self, call: Call) -> Response:
        info = await self.living(call)
        if info.state in (State.STOPPED, State.STOPPING):
            raise Refused(400, "VM_NOT_RUNNING", f"VM {info.id} is stopped; start it first")
        paused = await self._control.sleep.pause(info.id)
        instance = instance_of(paused)
        return done({"id": info.id, "vmInstanceId": instance, "snapshotLayerId": f"{instance}-memory"})

    async def stop(self, call: Call) -> Response:
        info = await self.living(call)
        if info.state is State.STOPPED:
            raise Refused(400, "VM_NOT_RUNNING", f"VM {info.id} is stopped already")
        await self._control.power.stop(info.id)
        return done({"vmId": info.id, "vmInstanceId": instance_of(info)})

    async def kill(self, call: Call) -> Response:
        info = await self.living(call)
        await self._control.power.stop(info.id)
        return done({"id": info.id})

    async def wait(self, call: Call) -> Response:
        """Until its machine is gone."""
        vm = (await self.living(call)).id
        exited = asyncio.create_task(self._exited(vm))
        left = asyncio.create_task(_disconnected(call))
        try:
            await asyncio.wait({exited, left}, return_when=asyncio.FIRST_COMPLETED)
            return done({"id": vm, "exitStatus": exited.result() if exited.done() else "unknown"})
        finally:
            for task in (exited, left):
                task.cancel()
            await asyncio.gather(exited, left, return_exceptions=True)

    async def _exited(self, vm: str) -> str:
        while True:
            news = self._control.ground.store.news
            info = await self._control.sandboxes.get(vm)
            if info.state in ENDED or info.state in (State.STOPPED, State.DELETING):
                return info.cause.value
            await news.wait()

    async def fork(self, call: Call) -> Response:
        body = await call.body(models.ForkVm)
        try:
            info = await self.living(call)
        except Refused as refused:
            code = "FORK_VM_NOT_FOUND" if refused.status == 404 else refused.code
            raise Refused(refused.status, code, refused.message) from None
        forked = await self._control.forks.fork(info.id, SandboxFork(count=body.count or 1), api_key_id=call.who.id)
        made = [child.sandbox for child in forked.children if child.sandbox is not None]
        if len(made) < len(forked.children):
            # There is no word for half of it.
            await asyncio.gather(*(self._control.sandboxes.delete(child.id) for child in made), return_exceptions=True)
            problem = next(child.problem or {} for child in forked.children if child.sandbox is None)
            raise refusal(from_problem(problem))
        return done({"vmId": info.id, "forks": [{"id": child.id, "domains": self._domains(child)} for child in made]})

    async def optimize(self, call: Call) -> Response:
        info = await self.living(call)
        await self._control.sleep.pause(info.id, durable=True)
        return done({"id": info.id, "message": "suspended, with its memory on disk"})

    async def resize(self, call: Call) -> Response:
        body = await call.body(models.ResizeVm)
        info = await self.living(call)
        wanted = _resize(body, info)
        await self._resized(info, wanted)
        return done()

    async def _resized(self, info: SandboxInfo, wanted: SandboxResize) -> SandboxInfo:
        """With a stop between, if it was up: one that would not outlast that is kept meanwhile, and if it does not start."""
        update = self._control.sandboxes.update
        if info.state in (State.STOPPED, State.FAILED):
            return await self._control.power.resize(info.id, wanted)
        await update(info.id, SandboxUpdate(persistence="persistent"))
        await self._control.power.stop(info.id)
        try:
            await self._control.power.resize(info.id, wanted)
        finally:
            await self._control.power.start(info.id)
            started = await update(info.id, SandboxUpdate(persistence=info.persistence))
        return started


def _resize(body: models.ResizeVm, info: SandboxInfo) -> SandboxResize:
    """Each thing that cannot be has a name of its own."""
    if body.vcpus is body.memory_gb is body.disk_gb is None:
        raise Refused(400, "RESIZE_VM_EMPTY_REQUEST", "vcpuCount, memSizeGb or rootfsSizeGb is needed")
    for number, most, name, word in (
        (body.vcpus, models.MAX_VCPUS, "vcpuCount", "VCPU"),
        (body.memory_gb, models.MAX_MEMORY_GB, "memSizeGb", "MEM"),
    ):
        if number is not None and not 1 <= number <= most:
            raise Refused(400, f"RESIZE_VM_{word}_OUT_OF_RANGE", f"{name} is from 1 to {most}, not {number}")
        if number is not None and number.bit_count() != 1:
            raise Refused(400, f"RESIZE_VM_{word}_NOT_POWER_OF_TWO", f"{name} is a power of two, not {number}")
    if body.disk_gb is not None and body.disk_gb < info.shape.disk_gib:
        raise _shrunk("RESIZE_VM_ROOTFS_SHRINK_NOT_SUPPORTED", info, body.disk_gb)
    memory_mib = None if body.memory_gb is None else body.memory_gb * 1024
    return SandboxResize(vcpus=body.vcpus, memory_mib=memory_mib, disk_gib=body.disk_gb)


def _shrunk(code: str, info: SandboxInfo, wanted_gb: int) -> Refused:
    return Refused(400, code, f"a disk only grows: it has {info.shape.disk_gib} GB, and {wanted_gb} are less")


def setup_failed(error: BuildFailed) -> Refused:
    """With what a person needs to see why."""
    details = error.details
    units = details.get("units") or []
    states: dict[tuple[str, str], list[str]] = {}
    for unit in units:
        states.setdefault((unit["active"], unit["sub"]), []).append(unit["name"])
    logs = [{"unitName": unit["name"], "log": unit["log"]} for unit in units if unit["active"] == "failed"]
    if details.get("log"):
        logs.insert(0, {"unitName": str(details.get("what") or "setup"), "log": details["log"]})
    return Refused(
        500,
        "VM_SETUP_FAILED",
        error.message,
        failedReason=error.message,
        snapshotId=details.get("debug_snapshot_id"),
        buildId=details.get("build_id"),
        diagnostics={
            "serviceStates": [
                {"activeState": active, "subState": sub, "services": names} for (active, sub), names in states.items()
            ],
            "failedServiceLogs": logs,
        },
    )


def build_row(build: Any) -> dict[str, Any]:
    state = {"running": "running", "succeeded": "succeeded"}.get(build.state, "failed")
    return {
        "buildId": build.id,
        "accountId": "forkyard",
        "state": state,
        "templateHash": build.layers[-1].key if build.layers else None,
        "failureReason": None if build.failure is None else build.failure.message,
        "plannedPhases": [f"layer {layer.index}" for layer in build.layers],
        "startedAt": time_of(build.created_at),
        "finishedAt": time_of(build.finished_at),
        "updatedAt": time_of(build.finished_at or build.created_at),
    }


def _row(info: SandboxInfo) -> dict[str, Any]:
    shape = info.shape
    now = datetime.now(UTC)
    return {
        "id": info.id,
        "name": info.name,
        "state": state_of(info),
        "metrics": {
            "wallTimeSeconds": int((now - info.created_at).total_seconds()),
            "billingDay": now.date().isoformat(),
            "isActiveToday": (info.last_active_at or info.updated_at).date() == now.date(),
        },
        "createdAt": time_of(info.created_at),
        "lastNetworkActivity": time_of(info.last_active_at),
        "persistence": persistence_of(info),
        "snapshotId": info.snapshot_id,
        "deleted": info.state in _GONE,
        "buildId": Note.of(info).build_id,
        "sizing": {
            "vcpuCount": shape.vcpus,
            "memSizeMib": shape.memory_mib,
            "rootfsSizeMb": shape.disk_gib * 1024,
        },
    }


def persistence_of(info: SandboxInfo) -> dict[str, Any]:
    if info.persistence == "sticky":
        return {"type": "sticky", "priority": info.priority}
    if info.persistence == "persistent":
        return {"type": "persistent"}
    return {"type": "ephemeral", "deleteEvent": "OnStop" if info.persistence == "until-stopped" else "OnSuspend"}


async def _disconnected(call: Call) -> None:
    while (await call.request.receive())["type"] != "http.disconnect":
        pass
