"""The layers that are kept: found by key, explained when missing, evicted when they take too much room.

A layer is a snapshot. Whatever was started from it, sandboxes and later layers, does not need it any more, so any layer
that no build under way works on may go.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog

from forkyard.builds.layers import Layer, shown, why_missing
from forkyard.control.plane import ControlPlane
from forkyard.errors import ForkyardError
from forkyard.models import SnapshotInfo
from forkyard.models.builds import BUILD_LABEL, LayerInfo, Pruned
from forkyard.store.builds import LayerRecord

log = structlog.get_logger(__name__)


class LayerCache:
    def __init__(self, control: ControlPlane, budget_bytes: int | None) -> None:
        self._control = control
        self._budget_bytes = budget_bytes
        self._pinned: Counter[str] = Counter()
        #: Snapshots that others took the place of while a build may have worked on them.
        self._replaced: dict[str, list[str]] = {}

    @asynccontextmanager
    async def pinned(self, layers: Sequence[Layer]) -> AsyncIterator[None]:
        """A build works on these."""
        keys = [one.key for layer in layers for one in (layer, *map(layer.part, layer.stops()))]
        self._pinned.update(keys)
        try:
            yield
        finally:
            self._pinned.subtract(keys)
            self._pinned += Counter()  # those that nobody pins any more
            for key in [key for key in self._replaced if key not in self._pinned]:
                for snapshot_id in self._replaced.pop(key):
                    await asyncio.shield(self._drop(snapshot_id))

    async def find(self, key: str) -> LayerRecord | None:
        """It counts as used now."""
        return await self._control.ground.store.layer(key, use=True)

    async def begun(self, layer: Layer) -> tuple[int, str] | None:
        """How many of its steps are kept, and the machine after them."""
        for count in reversed(layer.stops()):
            if (found := await self.find(layer.part(count).key)) is not None:
                return count, found.snapshot_id
        return None

    async def plan(self, layers: Sequence[Layer], *, skip_cache: bool = False) -> list[LayerInfo]:
        """What a build of these, which rest on each other, would find."""
        store = self._control.ground.store
        found = [await store.layer(layer.key) for layer in layers]
        kept = [(record.parent_key, record.inputs) for record in await store.list_layers()]
        forced = [skip_cache or layer.skip_cache for layer in layers]
        newest = max((i for i, record in enumerate(found) if record is not None and not forced[i]), default=-1)
        plan: list[LayerInfo] = []
        for place, (layer, record, force) in enumerate(zip(layers, found, forced, strict=True)):
            cached, steps_kept = place <= newest, 0
            if force:
                reason = "skip_cache"
            elif record is not None and cached:
                reason = f"all its inputs are those of snapshot {record.snapshot_id}"
            elif cached:
                reason = "not needed: a later layer is in the cache"
            else:
                reason = why_missing(layer, kept, parent_cached=place - 1 <= newest)
                if (begun := await self.begun(layer)) is not None:
                    steps_kept = begun[0]
            plan.append(
                LayerInfo(
                    index=layer.index,
                    key=layer.key,
                    steps=[shown(step) for _, step in layer.steps],
                    cached=cached,
                    reason=reason,
                    steps_kept=steps_kept,
                    snapshot_id=record.snapshot_id if record is not None and cached else None,
                )
            )
        return plan

    async def keep(self, layer: Layer, snapshot: SnapshotInfo, *, replace: bool) -> str:
        """Returns the snapshot of this layer. Without `replace`, that is the one another build has kept meanwhile."""
        if not replace and (there := await self.find(layer.key)) is not None:
            await self._drop(snapshot.id)
            return there.snapshot_id
        inputs = [one.to_json() for one in layer.inputs]
        store = self._control.ground.store
        before = await store.put_layer(layer.key, snapshot.id, layer.parent_key, inputs, snapshot.size_bytes)
        if before is not None:
            if self._pinned[layer.key] <= 1:
                await self._drop(before)
            else:
                self._replaced.setdefault(layer.key, []).append(before)
        await self._evict()
        return snapshot.id

    async def sweep(self) -> None:
        """Snapshots of build machines that are nobody's layer and nobody's to look at: what a daemon before this one did
        not come to keep, or to remove. Those with a name are somebody's."""
        store = self._control.ground.store
        used: set[str | None] = {record.snapshot_id for record in await store.list_layers()}
        used |= {(build.failure or {}).get("debug_snapshot_id") for build in await store.list_builds()}
        for snapshot in await store.list_snapshots():
            if snapshot.id not in used and snapshot.name is None and await self._is_of_a_build(snapshot.sandbox_id):
                await self._drop(snapshot.id)

    async def _is_of_a_build(self, sandbox_id: str) -> bool:
        sandbox = await self._control.ground.store.sandbox(sandbox_id)
        return sandbox is not None and BUILD_LABEL in sandbox.labels

    async def prune(self) -> Pruned:
        """Everything that no build works on."""
        return await self._shrink(0)

    async def _evict(self) -> None:
        if self._budget_bytes is not None:
            await self._shrink(self._budget_bytes)

    async def _shrink(self, most_bytes: int) -> Pruned:
        store = self._control.ground.store
        there = await store.list_layers()
        left_bytes, count, freed_bytes = sum(record.size_bytes for record in there), 0, 0
        for record in there:
            if left_bytes <= most_bytes and most_bytes > 0:
                break
            if self._pinned[record.key] > 0 or not await store.forget_layer(record.key, record.snapshot_id):
                continue
            await self._drop(record.snapshot_id)
            left_bytes -= record.size_bytes
            freed_bytes += record.size_bytes
            count += 1
            log.info("layer removed", key=record.key, snapshot=record.snapshot_id)
        return Pruned(layers=count, freed_bytes=freed_bytes)

    async def _drop(self, snapshot_id: str) -> None:
        try:
            await self._control.removal.drop_snapshot(snapshot_id)
        except ForkyardError as error:
            log.error("snapshot of a layer not removed", snapshot=snapshot_id, error=error.message)
