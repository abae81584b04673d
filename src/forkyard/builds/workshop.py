"""Builds one layer: a machine from the layer before it, its steps, a snapshot, and the machine is gone.

Owns: that a layer which several builds want at once is built once, and that no machine of a build is left. A layer goes
on while any build waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import structlog

from forkyard.builds.cache import LayerCache
from forkyard.builds.journal import Journal
from forkyard.builds.layers import Layer
from forkyard.builds.steps import StepFailed, Telling, do_steps
from forkyard.control import services
from forkyard.control.ground import new_id
from forkyard.control.plane import ControlPlane
from forkyard.errors import ForkyardError, SnapshotNotFound
from forkyard.guest.base import Guest, Stream
from forkyard.models import SandboxCreate
from forkyard.models.builds import BuildCreate
from forkyard.models.specs import GitRepo

log = structlog.get_logger(__name__)

LABEL = "forkyard.build"
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


class Workshop:
    def __init__(self, control: ControlPlane, cache: LayerCache) -> None:
        self._control = control
        self._cache = cache
        self._flights: dict[tuple[str, bool], _Flight] = {}
        self._tasks: set[asyncio.Task[str]] = set()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def sweep(self) -> None:
        """Machines that a daemon before this one did not come to remove."""
        await self._remove(None)

    async def layer(
        self, layer: Layer, parent: str | None, request: BuildCreate, key_id: str, journal: Journal, *, force: bool
    ) -> str:
        """The snapshot of this layer, from the cache or made now on that of its `parent`."""
        slot = (layer.key, force)
        flight = self._flights.get(slot)
        if flight is None:
            flight = self._flights[slot] = _Flight()
            work = self._find_or_make(layer, parent, request, key_id, flight, force=force)
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

    def _landed(self, slot: tuple[str, bool], task: asyncio.Task[str]) -> None:
        self._flights.pop(slot, None)
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _find_or_make(
        self, layer: Layer, parent: str | None, request: BuildCreate, key_id: str, flight: _Flight, *, force: bool
    ) -> str:
        if not force and (found := await self._cache.find(layer.key)) is not None:
            flight.phase("cached", layer.index, f"layer {layer.index} is in the cache")
            return found.snapshot_id
        if layer.parent_key is not None and parent is None:
            raise SnapshotNotFound("a layer that this build rests on was deleted meanwhile; build again")
        mark = new_id()
        flight.phase("layer", layer.index, f"layer {layer.index}: {len(layer.steps)} steps")
        try:
            return await self._make(layer, parent, request, key_id, flight, mark)
        finally:
            await asyncio.shield(self._remove(mark))

    async def _make(
        self, layer: Layer, parent: str | None, request: BuildCreate, key_id: str, flight: _Flight, mark: str
    ) -> str:
        control, began = self._control, time.monotonic()
        wanted = SandboxCreate(
            name=f"layer {layer.key[:12]}",
            labels={LABEL: mark},
            env=layer.env_after(),
            idle_timeout_s=None,
            ttl_s=MACHINE_TTL_S,
            persistence="ephemeral",
            network=request.network,
            identity=request.identity,
            **({"snapshot": parent} if parent is not None else layer.shape.model_dump()),
        )
        sandbox = await control.sandboxes.create(wanted, api_key_id=key_id)

        def on_step(number: int, text: str, ms: float | None) -> None:
            flight.phase("step" if ms is None else "done", layer.index, text, number, ms)

        await self.do(sandbox.id, layer, Telling(flight.output, on_step))
        flight.phase("snapshot", layer.index, "saving the machine as it runs")
        snapshot = await control.snapshots.create(sandbox.id)
        await self._cache.keep(layer, snapshot)
        ms = (time.monotonic() - began) * 1000
        flight.phase("done", layer.index, f"layer {layer.index} is snapshot {snapshot.id}", ms=ms)
        return snapshot.id

    async def do(self, sandbox_id: str, layer: Layer, tell: Telling | None = None) -> None:
        """The steps of a layer, in a sandbox that runs."""
        tell = tell or Telling(lambda *_: None, lambda *_: None)
        control = self._control

        async def clone(repo: GitRepo) -> None:
            record = await control.ground.record(sandbox_id)
            async with control.sandboxes.clones(record, [repo]) as put:
                await put(guest)

        async with control.sandboxes.use(sandbox_id) as guest:
            try:
                await do_steps(guest, layer, tell, clone)
            except StepFailed as failed:
                raise LayerFailed(layer.index, failed, await self._debug(sandbox_id, guest, failed)) from failed

    async def _debug(self, sandbox_id: str, guest: Guest, failed: StepFailed) -> str | None:
        """What can be said of a failure; the machine may be in any state."""
        with contextlib.suppress(ForkyardError, TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                failed.units = await services.unit_states(guest)
        try:
            return (await self._control.snapshots.create(sandbox_id)).id
        except ForkyardError as error:
            log.warning("no debug snapshot", sandbox=sandbox_id, error=error.message)
            return None

    async def _remove(self, mark: str | None) -> None:
        control = self._control
        page = await control.sandboxes.list(labels={LABEL: mark} if mark else None, limit=1000)
        for info in page.items:
            if LABEL in info.labels:
                try:
                    await control.sandboxes.delete(info.id)
                except ForkyardError as error:
                    log.error("machine of a build not removed", sandbox=info.id, error=error.message)
