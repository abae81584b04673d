"""Builds: begun, followed, re-attached, ended; and sandboxes made from a spec.

Owns: what a build is and how it ends. It is a task of its own, so a client that goes away does not stop it, and its
request is on record, so a daemon that starts anew goes on with it: what was built is in the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from forkyard.builds.bases import Bases
from forkyard.builds.cache import LayerCache
from forkyard.builds.drawing import Drawing, Drawn
from forkyard.builds.journal import Journal, read
from forkyard.builds.layers import Layer, Start, layers_of
from forkyard.builds.uploads import Uploads
from forkyard.builds.workshop import LayerFailed, Workshop
from forkyard.control.ground import new_id
from forkyard.control.pages import cursor_after, place_of
from forkyard.control.plane import ControlPlane
from forkyard.errors import (
    BuildFailed,
    BuildNotFound,
    ForkyardError,
    InternalError,
    InvalidRequest,
    NoCapacity,
    SnapshotNotFound,
)
from forkyard.models import Page, SandboxCreate, SandboxInfo
from forkyard.models.bases import RegistryAuth
from forkyard.models.builds import (
    BuildCreate,
    BuildEnd,
    BuildFailure,
    BuildInfo,
    BuildOutput,
    BuildPhase,
    BuildPlan,
    LayerInfo,
    Pruned,
)
from forkyard.models.network import Secret
from forkyard.models.specs import DEFAULT_BASE, Spec, Step
from forkyard.store.builds import BuildRecord
from forkyard.store.records import Place

log = structlog.get_logger(__name__)

MAX_RUNNING = 32
BUILDS_KEPT = 200
DEBUG_SNAPSHOTS_KEPT = 5
_LOG_BYTES = 16 * 1024

#: What is found of each layer of a stage; and that of all stages, by their numbers.
Plan = list[LayerInfo]
Plans = dict[int, Plan]


class _Build:
    """One that is under way."""

    def __init__(
        self,
        record: BuildRecord,
        request: BuildCreate,
        journal: Journal,
        stages: Sequence[Drawn],
        plans: Plans,
    ) -> None:
        self.record, self.request, self.journal = record, request, journal
        self.stages = {stage.number: stage for stage in stages}
        self.plans = plans
        self.snapshots: dict[int, str] = {}

    def dumped(self) -> list[dict[str, object]]:
        return [info.model_dump(mode="json") for plan in self.plans.values() for info in plan]


class Builds:
    def __init__(self, control: ControlPlane, directory: Path, *, budget_bytes: int | None = None) -> None:
        """`directory` holds the logs; uploads are beside it. `budget_bytes`: what layers may occupy."""
        self._control = control
        self._store = control.ground.store
        self._directory = directory
        self._cache = LayerCache(control, budget_bytes)
        self.uploads = Uploads(directory.with_name("uploads"))
        self.bases = Bases(control, self.uploads)
        self._drawing = Drawing(control, self.bases, self.uploads)
        self._workshop = Workshop(control, self._cache, self.uploads)
        #: Of builds under way; nowhere else.
        self._credentials: dict[str, RegistryAuth] = {}
        self._journals: dict[str, Journal] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = False

    async def start(self) -> None:
        """Goes on with what an earlier daemon had begun."""
        await asyncio.to_thread(self._directory.mkdir, mode=0o700, parents=True, exist_ok=True)
        await asyncio.to_thread(self.uploads.start)
        await self._workshop.sweep()
        for record in await self._store.list_builds(states=["running"]):
            self._begin(record)

    async def stop(self) -> None:
        self._stopping = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._workshop.stop()

    # ── builds ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def plan(self, request: BuildCreate) -> BuildPlan:
        """What would come from the cache, and why the rest would not."""
        await self._drawing.check(request.spec)
        stages = await self._drawing.draw(request.spec, request.registry, allow_secrets=request.allow_secrets)
        return BuildPlan(layers=[info for plan in (await self._plans(stages, request)).values() for info in plan])

    async def create(self, request: BuildCreate, *, key_id: str = "") -> BuildInfo:
        """Returns when it has begun."""
        await self._drawing.check(request.spec, request.registry)
        await self._control.networks.check(request.network)
        if len(self._tasks) >= MAX_RUNNING:
            raise NoCapacity(f"{MAX_RUNNING} builds run already; wait for one of them", retry_after_s=5)
        asked = request.model_dump(mode="json", exclude={"registry"})
        record = await self._store.add_build("bld-" + new_id(), key_id, asked, [])
        if request.registry is not None:
            self._credentials[record.id] = request.registry
        self._begin(record)
        return build_info(record)

    async def get(self, build_id: str) -> BuildInfo:
        return build_info(await self._record(build_id))

    async def list(self, *, limit: int = 100, cursor: str | None = None) -> Page[BuildInfo]:
        found = await self._store.list_builds(before=place_of(cursor), limit=limit + 1)
        more, found = len(found) > limit, found[:limit]
        return Page[BuildInfo](
            items=[build_info(record) for record in found],
            next_cursor=cursor_after(Place(found[-1].created_at, found[-1].id)) if more else None,
        )

    async def finished(self, build_id: str) -> BuildInfo:
        """Returns when it has ended, one way or the other."""
        task = self._tasks.get(build_id)
        if task is not None:
            await asyncio.wait([task])
        return await self.get(build_id)

    async def delete(self, build_id: str) -> None:
        """Ends it if it runs. The layers it has made stay in the cache; what it kept for debugging does not."""
        record = await self._record(build_id)
        task = self._tasks.get(build_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            record = await self._record(build_id)
        await self._forget(record)

    async def prune(self) -> Pruned:
        return await self._cache.prune()

    @asynccontextmanager
    async def logs(
        self, build_id: str, *, after: int = 0, follow: bool = False
    ) -> AsyncIterator[AsyncIterator[BuildPhase | BuildOutput | BuildEnd]]:
        await self._record(build_id)
        lines = read(self._log(build_id), self._journals.get(build_id), after=after, follow=follow)
        yield lines

    # ── sandboxes ────────────────────────────────────────────────────────────────────────────────────────────────

    async def sandbox(
        self,
        request: SandboxCreate,
        *,
        api_key_id: str = "",
        idempotency_key: str | None = None,
        begun: Callable[[str], None] | None = None,
    ) -> SandboxInfo:
        """A sandbox of `request.spec`, which is built first if it is not in the cache."""
        assert request.spec is not None
        for name in ("snapshot", "vcpus", "memory_mib", "disk_gib"):
            if name in request.model_fields_set and getattr(request, name) is not None:
                raise InvalidRequest(f"a sandbox with a spec has no {name} of its own; leave it out", field=name)
        spec, layer = request.spec, await self._last_layer(request.spec, request.registry)
        async with self._cache.pinned([layer]):
            for attempt in (1, 2):  # it may be deleted by hand all the same
                snapshot_id = await self._snapshot_of(
                    spec,
                    layer,
                    identity=request.identity,
                    registry=request.registry,
                    secrets=request.secrets,
                    key_id=api_key_id,
                    begun=begun,
                )
                wanted = request.model_copy(update={"snapshot": snapshot_id, "spec": None, "registry": None})
                try:
                    return await self._control.sandboxes.create(
                        wanted, api_key_id=api_key_id, idempotency_key=idempotency_key
                    )
                except SnapshotNotFound:
                    if attempt == 2:
                        raise
        raise AssertionError("unreachable")

    async def built(
        self,
        spec: Spec,
        *,
        identity: str | None = None,
        registry: RegistryAuth | None = None,
        secrets: Mapping[str, Secret] | None = None,
        key_id: str = "",
        begun: Callable[[str], None] | None = None,
    ) -> str:
        """The snapshot of a spec, from the cache or built now; `begun` is told the id of the build then. Of `secrets` the
        build may use those that are stored."""
        layer = await self._last_layer(spec, registry)
        return await self._snapshot_of(
            spec, layer, identity=identity, registry=registry, secrets=secrets, key_id=key_id, begun=begun
        )

    async def _last_layer(self, spec: Spec, registry: RegistryAuth | None) -> Layer:
        await self._drawing.check(spec)
        return (await self._drawing.draw(spec, registry))[-1].layers[-1]

    async def _snapshot_of(
        self,
        spec: Spec,
        last: Layer,
        *,
        identity: str | None,
        registry: RegistryAuth | None,
        secrets: Mapping[str, Secret] | None,
        key_id: str,
        begun: Callable[[str], None] | None,
    ) -> str:
        if not last.skip_cache and (found := await self._cache.find(last.key)) is not None:
            return found.snapshot_id
        stored = {name: one for name, one in (secrets or {}).items() if one.value is None}
        request = BuildCreate(spec=spec, identity=identity, registry=registry, secrets=stored)
        build = await self.create(request, key_id=key_id)
        if begun is not None:
            begun(build.id)
        info = await self.finished(build.id)
        if info.snapshot_id is not None:
            return info.snapshot_id
        failure = info.failure or BuildFailure(message="the build was cancelled")
        raise _failed(info.id, failure)

    async def set_up(self, sandbox_id: str, steps: Sequence[Step], *, key_id: str = "") -> None:
        """Do steps in a sandbox that runs. Nothing is kept of it but, if one fails, a build that tells why."""
        request = BuildCreate(spec=Spec(steps=list(steps)))
        try:
            await self._workshop.do(
                sandbox_id, layers_of(request.spec, Start(DEFAULT_BASE, ""), list(enumerate(steps)))[0]
            )
        except LayerFailed as error:
            failure = _failure(error)
            record = await self._store.add_build("bld-" + new_id(), key_id, request.model_dump(mode="json"), [])
            await self._store.end_build(record.id, "failed", failure=failure.model_dump(mode="json"))
            await self._tidy()
            raise _failed(record.id, failure) from error

    # ── one build ────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, record: BuildRecord) -> None:
        journal = self._journals[record.id] = Journal(self._log(record.id))
        task = asyncio.create_task(self._run(record, journal), name=f"build {record.id}")
        self._tasks[record.id] = task
        task.add_done_callback(lambda _: self._ended(record.id))

    def _ended(self, build_id: str) -> None:
        self._tasks.pop(build_id, None)
        self._journals.pop(build_id, None)
        self._credentials.pop(build_id, None)

    async def _run(self, record: BuildRecord, journal: Journal) -> None:
        try:
            snapshot_id = await self._build(record, journal)
            await self._store.end_build(record.id, "succeeded", snapshot_id=snapshot_id)
            journal.end("succeeded")
        except asyncio.CancelledError:
            if not self._stopping:  # else the next daemon goes on with it
                await self._store.end_build(record.id, "cancelled")
                journal.end("cancelled")
            journal.close()
            raise
        except LayerFailed as error:
            await self._fail(record, journal, _failure(error))
        except Exception as error:
            if not isinstance(error, ForkyardError):
                log.error("build failed", build=record.id, exc_info=error)
                error = InternalError()
            await self._fail(record, journal, BuildFailure(message=error.message))
        with contextlib.suppress(ForkyardError):
            await self._tidy()

    async def _fail(self, record: BuildRecord, journal: Journal, failure: BuildFailure) -> None:
        await self._store.end_build(record.id, "failed", failure=failure.model_dump(mode="json"))
        journal.end("failed", failure.message)

    async def _build(self, record: BuildRecord, journal: Journal) -> str:
        request = BuildCreate.model_validate(record.request)
        stages = await self._drawing.draw(
            request.spec,
            self._credentials.get(record.id),
            lambda text: journal.phase("base", 0, text),
            allow_secrets=request.allow_secrets,
        )
        async with self._cache.pinned([layer for stage in stages for layer in stage.layers]):
            under_way = _Build(record, request, journal, stages, await self._plans(stages, request))
            await self._store.change_build(record.id, layers=under_way.dumped())
            return await self._stage(under_way, stages[-1].number)

    async def _plans(self, stages: Sequence[Drawn], request: BuildCreate) -> Plans:
        """What each stage finds in the cache."""
        return {stage.number: await self._cache.plan(stage.layers, skip_cache=request.skip_cache) for stage in stages}

    async def _stage(self, build: _Build, number: int) -> str:
        """The snapshot of its last layer; what it needs of other stages is built on the way."""
        if number in build.snapshots:
            return build.snapshots[number]
        stage, plan = build.stages[number], build.plans[number]
        snapshot_id = stage.snapshot_id
        if stage.parent is not None and not plan[0].cached:
            snapshot_id = await self._stage(build, stage.parent)
        for place, layer in enumerate(stage.layers):
            info = plan[place]
            if info.cached and info.snapshot_id is None:  # a later one is there
                continue
            sources = {} if info.cached else {other: await self._stage(build, other) for other in layer.sources}
            snapshot_id = await self._layer(build, layer, place, plan, snapshot_id, sources)
        assert snapshot_id is not None
        build.snapshots[number] = snapshot_id
        return snapshot_id

    async def _layer(
        self,
        build: _Build,
        layer: Layer,
        place: int,
        plan: Plan,
        parent: str | None,
        sources: dict[int, str],
    ) -> str:
        begun, info, request = time.monotonic(), plan[place], build.request
        force = request.skip_cache or layer.skip_cache
        snapshot_id = await self._workshop.layer(
            layer, parent, sources, request, build.record.key_id, build.journal, force=force
        )
        took_ms = None if info.cached else (time.monotonic() - begun) * 1000
        plan[place] = info.model_copy(update={"snapshot_id": snapshot_id, "duration_ms": took_ms})
        await self._store.change_build(build.record.id, layers=build.dumped())
        return snapshot_id

    async def _record(self, build_id: str) -> BuildRecord:
        record = await self._store.build(build_id)
        if record is None:
            raise BuildNotFound(f"there is no build {build_id!r}; `forkyard builds ls` lists those there are")
        return record

    def _log(self, build_id: str) -> Path:
        return self._directory / f"{build_id}.ndjson"

    async def _tidy(self) -> None:
        """Old builds are forgotten, and of failed ones only the newest keep their machine."""
        ended = [record for record in await self._store.list_builds() if record.state != "running"]
        for record in ended[BUILDS_KEPT:]:
            await self._forget(record)
        kept = [record for record in ended[:BUILDS_KEPT] if _debug_snapshot(record)]
        for record in kept[DEBUG_SNAPSHOTS_KEPT:]:
            await self._drop_debug(record)
            await self._store.change_build(record.id, failure={**(record.failure or {}), "debug_snapshot_id": None})

    async def _forget(self, record: BuildRecord) -> None:
        await self._drop_debug(record)
        await self._store.forget_build(record.id)
        await asyncio.to_thread(self._log(record.id).unlink, missing_ok=True)

    async def _drop_debug(self, record: BuildRecord) -> None:
        """Builds that failed together share one."""
        snapshot_id = _debug_snapshot(record)
        if snapshot_id is None:
            return
        others = [_debug_snapshot(other) for other in await self._store.list_builds() if other.id != record.id]
        if snapshot_id not in others:
            await self._control.removal.drop_snapshot(snapshot_id)


def _debug_snapshot(record: BuildRecord) -> str | None:
    return (record.failure or {}).get("debug_snapshot_id")


def _failure(error: LayerFailed) -> BuildFailure:
    failed = error.failed
    return BuildFailure(
        message=failed.message,
        layer=error.layer,
        step=failed.number,
        what=failed.what,
        exit_code=failed.exit_code,
        log=failed.log[-_LOG_BYTES:],
        units=failed.units,
        denied=failed.denied,
        debug_snapshot_id=error.debug_snapshot_id,
    )


def _failed(build_id: str, failure: BuildFailure) -> BuildFailed:
    return BuildFailed(
        f"build {build_id} failed: {failure.message}", build_id=build_id, **failure.model_dump(exclude={"message"})
    )


def build_info(record: BuildRecord) -> BuildInfo:
    return BuildInfo(
        id=record.id,
        name=record.request["spec"].get("name"),
        state=record.state,
        layers=[LayerInfo.model_validate(info) for info in record.layers],
        snapshot_id=record.snapshot_id,
        failure=None if record.failure is None else BuildFailure.model_validate(record.failure),
        created_at=record.created_at,
        finished_at=record.finished_at,
    )
