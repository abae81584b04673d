"""Pages of snapshots on tmpfs, where VMs map them: read from disk and verified once, shared by all that start from one.

Owns: which layers are there, and for how long: while a machine is being made from it, and then as long as the budget
allows, the least recently used going first. VMs keep what they mapped, so a layer may go at any time. Never does: what is
on disk (`storage.snapshots`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from forkyard.storage.snapshots import Saved, Snapshots

#: One that nobody asked for in this time gives its memory back.
IDLE_S = 300.0


@dataclass
class _Layer:
    path: Path
    loading: asyncio.Task[Saved]
    users: int = 0
    last_used: float = 0.0
    unwanted: bool = False  # goes with its last user

    @property
    def failed(self) -> bool:
        return self.loading.done() and (self.loading.cancelled() or self.loading.exception() is not None)

    @property
    def size_bytes(self) -> int:
        return self.loading.result().size_bytes if self.loading.done() and not self.failed else 0


class Layers:
    def __init__(self, snapshots: Snapshots, directory: Path, budget_bytes: int) -> None:
        self._snapshots = snapshots
        self._dir = directory
        self._budget_bytes = budget_bytes
        self._layers: dict[str, _Layer] = {}

    @contextlib.asynccontextmanager
    async def use(self, snapshot_id: str, *, keep: bool) -> AsyncIterator[tuple[Saved, Path]]:
        """What a snapshot's manifest says, and its pages on tmpfs, there as long as the block lasts. `keep`: others will
        want it too."""
        layer = self._layers.get(snapshot_id)
        if layer is None:
            path = self._dir / f"saved-{secrets.token_hex(6)}.layer"
            layer = _Layer(path, asyncio.create_task(self._load(snapshot_id, path)), unwanted=not keep)
            self._layers[snapshot_id] = layer
        layer.users += 1
        try:
            # Who gives up does not spoil it for the others.
            yield await asyncio.shield(layer.loading), layer.path
        finally:
            layer.users -= 1
            layer.unwanted = layer.unwanted or layer.failed
            layer.last_used = time.monotonic()
            self._shrink()
            if layer.users == 0 and not layer.unwanted:
                asyncio.get_running_loop().call_later(IDLE_S, self._shrink)

    def forget(self, snapshot_id: str) -> None:
        """It is deleted."""
        layer = self._layers.get(snapshot_id)
        if layer is not None:
            layer.unwanted = True
            self._shrink()

    def clear(self) -> None:
        for snapshot_id in list(self._layers):
            self.forget(snapshot_id)

    async def _load(self, snapshot_id: str, path: Path) -> Saved:
        def load() -> Saved:
            saved = self._snapshots.read(snapshot_id)
            self._snapshots.load(saved, path)
            return saved

        return await asyncio.to_thread(load)

    def _shrink(self) -> None:
        idle = sorted((layer.last_used, name) for name, layer in self._layers.items() if layer.users == 0)
        total_bytes = sum(layer.size_bytes for layer in self._layers.values())
        for last_used, name in idle:
            layer = self._layers[name]
            old = time.monotonic() - last_used >= IDLE_S
            if layer.unwanted or old or total_bytes > self._budget_bytes:
                total_bytes -= layer.size_bytes
                del self._layers[name]
                layer.loading.add_done_callback(lambda _, path=layer.path: path.unlink(missing_ok=True))  # type: ignore[misc]
                if layer.loading.done():
                    layer.path.unlink(missing_ok=True)
