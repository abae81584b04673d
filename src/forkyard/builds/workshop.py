"""Builds one layer: a machine from the layer before it, its steps, a snapshot, and the machine is gone.

Owns: that a layer which several builds want at once is built once, and that no machine of a build is left. A layer goes
on while any build waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog

from forkyard.builds.cache import LayerCache
from forkyard.builds.copies import Materials
from forkyard.builds.journal import Journal
from forkyard.builds.layers import Layer, digest
from forkyard.builds.steps import StepFailed, Telling, do_steps
from forkyard.builds.uploads import Uploads
from forkyard.control import services
from forkyard.control.ground import new_id
from forkyard.control.plane import ControlPlane
from forkyard.errors import BuildFailed, ForkyardError, SnapshotNotFound
from forkyard.guest.base import Guest, Stream
from forkyard.lifecycle import Cause, State
from forkyard.models import SandboxCreate, SnapshotInfo
from forkyard.models.builds import BUILD_LABEL, BuildCreate
from forkyard.models.labels import marked
from forkyard.models.network import EgressPolicy, NetworkPolicy
from forkyard.models.specs import GitRepo

log = structlog.get_logger(__name__)

#: A machine of a build is deleted after this, whatever happens to the daemon.
MACHINE_TTL_S = 24 * 3600.0
_LOOK_S = 60.0


class LayerFailed(Exception):
    def __init__(self, layer: int, failed: StepFailed, debug_snapshot_id: str | None) -> None:
        super().__init__(failed.message)
        self.layer, self.failed, self.debug_snapshot_id = layer, failed, debug_snapshot_id


@dataclass
class _Flight:
    journals: list[Journal] = field(default_factory=list)
    task: asyncio.Task[str] | None = None

    def output(self, stream: Stream, data: bytes) -> None:
        for journal in self.journals:
            journal.output(stream, data)

    def phase(self, phase: str, layer: int, text: str, step: int | None = None, ms: float | None = None) -> None:
        for journal in self.journals:
            journal.phase(phase, layer, text, step=step, ms=ms)


#: The id of a sandbox with the files of a stage.
SourceOf = Callable[[int], Awaitable[str]]


@dataclass(frozen=True)
class _Made:
    """A layer that is wanted, and what it is made with."""

    layer: Layer
    parent: str | None
    sources: Mapping[int, str]
    request: BuildCreate
    key_id: str
    force: bool

    def slot(self) -> str:
        """Builds share what is the same, and is made with the same means: else the first would decide for all."""
        means = self.request.model_dump(mode="json", include={"network", "identity", "secrets", "allow_secrets"})
        return digest([self.layer.key, self.force, means])


class Workshop:
    def __init__(self, control: ControlPlane, cache: LayerCache, uploads: Uploads) -> None:
        self._control = control
        self._cache = cache
        self._uploads = uploads
        self._flights: dict[str, _Flight] = {}
        self._tasks: set[asyncio.Task[str]] = set()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def sweep(self) -> None:
        """Machines and snapshots that a daemon before this one did not come to remove."""
        await self._remove(None)
        await self._cache.sweep()

    async def layer(
        self,
        layer: Layer,
        parent: str | None,
        sources: Mapping[int, str],
        request: BuildCreate,
        key_id: str,
        journal: Journal,
        *,
        force: bool,
    ) -> str:
        """The snapshot of this layer, from the cache or made now on that of its `parent`. `sources`: snapshots of the
        stages that it copies from."""
        made = _Made(layer, parent, sources, request, key_id, force)
        slot = made.slot()
        flight = self._flights.get(slot)
        if flight is None:
            flight = self._flights[slot] = _Flight()
            work = self._find_or_make(made, flight)
            task = flight.task = asyncio.create_task(work, name=f"layer {layer.key[:12]}")
            self._tasks.add(task)
            task.add_done_callback(lambda task: self._landed(slot, task))
        else:
            journal.phase("waiting", layer.index, "another build makes this layer already")
        assert flight.task is not None
        flight.journals.append(journal)
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.journals.remove(journal)
            if not flight.journals and not flight.task.done():
                flight.task.cancel()

    def _landed(self, slot: str, task: asyncio.Task[str]) -> None:
        self._flights.pop(slot, None)
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _find_or_make(self, made: _Made, flight: _Flight) -> str:
        layer = made.layer
        if not made.force and (found := await self._cache.find(layer.key)) is not None:
            flight.phase("cached", layer.index, f"layer {layer.index} is in the cache")
            return found.snapshot_id
        if layer.parent_key is not None and made.parent is None:
            raise SnapshotNotFound("a layer that this build rests on was deleted meanwhile; build again")
        mark = new_id()
        flight.phase("layer", layer.index, f"layer {layer.index}: {len(layer.steps)} steps")
        try:
            return await self._make(made, flight, mark)
        finally:
            await asyncio.shield(self._remove(mark))

    async def _make(self, made: _Made, flight: _Flight, mark: str) -> str:
        control, layer, began = self._control, made.layer, time.monotonic()
        kept, parent = 0, made.parent
        if not made.force and (begun := await self._cache.begun(layer)) is not None:
            kept, parent = begun
            flight.phase("cached", layer.index, f"the first {kept} steps of layer {layer.index} are in the cache")
        env = layer.env_after()
        wanted = SandboxCreate(
            name=f"layer {layer.key[:12]}",
            env=env,
            idle_timeout_s=None,
            ttl_s=MACHINE_TTL_S,
            persistence="ephemeral",
            network=made.request.network,
            identity=made.request.identity,
            secrets={name: secret for name, secret in made.request.secrets.items() if name not in env},
            **({"snapshot": parent} if parent is not None else layer.shape.model_dump()),
        )
        image = layer.image if parent is None else None
        sandbox = await control.sandboxes.create(
            marked(wanted, {BUILD_LABEL: mark}), api_key_id=made.key_id, image=image
        )

        def on_step(number: int, text: str, ms: float | None) -> None:
            flight.phase("step" if ms is None else "done", layer.index, text, number, ms)

        async def source(stage: int) -> str:
            snapshot = SandboxCreate(
                name=f"source of layer {layer.key[:12]}",
                snapshot=made.sources[stage],
                persistence="ephemeral",
                idle_timeout_s=None,
                ttl_s=MACHINE_TTL_S,
                network=NetworkPolicy(egress=EgressPolicy(preset="none")),
            )
            return (await control.sandboxes.create(marked(snapshot, {BUILD_LABEL: mark}), api_key_id=made.key_id)).id

        async def on_stop(count: int) -> None:
            if kept + count in layer.stops():
                await self._keep(layer.part(kept + count), sandbox.id, made, parent)

        await self.do(
            sandbox.id,
            layer.rest(kept),
            Telling(flight.output, on_step, on_stop),
            source,
            parent=parent,
            allow_secrets=made.request.allow_secrets,
        )
        flight.phase("snapshot", layer.index, "saving the machine as it runs")
        snapshot_id = await self._keep(layer, sandbox.id, made, parent)
        ms = (time.monotonic() - began) * 1000
        flight.phase("done", layer.index, f"layer {layer.index} is snapshot {snapshot_id}", ms=ms)
        return snapshot_id

    async def _keep(self, layer: Layer, sandbox_id: str, made: _Made, parent: str | None) -> str:
        snapshot, found = await self._saved(sandbox_id, parent, allow_secrets=made.request.allow_secrets)
        if snapshot is None:
            raise BuildFailed(
                f"layer {layer.index} holds the value of the secret {', '.join(found)}, in its memory or its files, and "
                "whoever starts from it would have it. Give it to the build by `secrets`, which keeps it out; or build with "
                "allow_secrets"
            )
        return await self._cache.keep(layer, snapshot, replace=made.force)

    async def _saved(
        self, sandbox_id: str, parent: str | None, *, allow_secrets: bool
    ) -> tuple[SnapshotInfo | None, list[str]]:
        """A snapshot; or none, and the names of stored secrets whose values are in it. Others start from it: what is in
        it, they have."""
        control = self._control
        snapshot = await control.snapshots.create(sandbox_id)
        if allow_secrets:
            return snapshot, []
        try:
            known = await control.secrets.recognisable()
            found = await control.snapshots.secrets_in(snapshot.id, known, parent=parent)
        except BaseException:
            await asyncio.shield(control.removal.drop_snapshot(snapshot.id))
            raise
        if found:
            await control.removal.drop_snapshot(snapshot.id)
            return None, found
        return snapshot, []

    async def do(
        self,
        sandbox_id: str,
        layer: Layer,
        tell: Telling | None = None,
        source: SourceOf | None = None,
        *,
        parent: str | None = None,
        allow_secrets: bool = False,
    ) -> None:
        """The steps of a layer, in a sandbox that runs, which was made of `parent`. `source`: another, with the files of
        a stage. `allow_secrets`: keep it for debugging also if stored secrets are found in it."""
        tell = tell or Telling(lambda *_: None, lambda *_: None)
        control = self._control

        async def clone(repo: GitRepo) -> None:
            record = await control.ground.record(sandbox_id)
            async with control.sandboxes.clones(record, [repo]) as put:
                await put(guest)

        async with contextlib.AsyncExitStack() as stack:

            async def stage(number: int) -> Guest:
                assert source is not None
                return await stack.enter_async_context(control.sandboxes.use(await source(number)))

            guest = await stack.enter_async_context(control.sandboxes.use(sandbox_id))
            try:
                given = (await control.ground.record(sandbox_id)).secrets
                placeholders = {name: secret.placeholder for name, secret in given.items()}
                await do_steps(
                    guest, layer, tell, clone, Materials(self._uploads.find, self._uploads.scratch, stage, placeholders)
                )
            except StepFailed as failed:
                record = await control.ground.record(sandbox_id)
                if record.state is not State.RUNNING:
                    failed.message += f"; somebody or something else ended its machine: {record.state} ({record.cause})"
                kept = await self._debug(sandbox_id, guest, failed, parent, allow_secrets=allow_secrets)
                raise LayerFailed(layer.index, failed, kept) from failed

    async def _debug(
        self, sandbox_id: str, guest: Guest, failed: StepFailed, parent: str | None, *, allow_secrets: bool
    ) -> str | None:
        """What can be said of a failure; the machine may be in any state."""
        with contextlib.suppress(ForkyardError, TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                failed.denied = await self._control.egress.refused(sandbox_id)
                if failed.denied:
                    failed.message += (
                        f"; on the way the network policy of the build refused {', '.join(failed.denied)}, which its `network` "
                        "(--allow, --preset) would have to allow"
                    )
                failed.units = await services.unit_states(guest)
        try:
            snapshot, found = await self._saved(sandbox_id, parent, allow_secrets=allow_secrets)
        except ForkyardError as error:
            log.warning("no debug snapshot", sandbox=sandbox_id, error=error.message)
            return None
        if snapshot is None:
            failed.message += (
                f". Its machine is not kept to look at, for it holds the value of the secret {', '.join(found)}; build "
                "with allow_secrets to have it"
            )
            return None
        return snapshot.id

    async def _remove(self, mark: str | None) -> None:
        control = self._control
        page = await control.sandboxes.list(labels={BUILD_LABEL: mark} if mark else None, limit=1000)
        for info in page.items:
            if BUILD_LABEL in info.labels:
                try:
                    await control.sandboxes.delete(info.id, Cause.TASK_OVER)
                except ForkyardError as error:
                    log.error("machine of a build not removed", sandbox=info.id, error=error.message)
