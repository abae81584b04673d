# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""Snapshots: a machine's memory, devices and disk at one instant."""

from __future__ import annotations

from forkyard.models import Page, SnapshotInfo
from forkyard.sdk import wire
from forkyard.sdk._sync.transport import Transport


class Snapshot:
    """What a sandbox was at one instant. `sandboxes.create(snapshot=…)` starts from it, `rollback` returns to it."""

    def __init__(self, transport: Transport, info: SnapshotInfo) -> None:
        self._transport = transport
        self.info = info

    def __repr__(self) -> str:
        name = f", name={self.info.name!r}" if self.info.name else ""
        return f"{type(self).__name__}(id={self.id!r}{name}, sandbox_id={self.info.sandbox_id!r})"

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def name(self) -> str | None:
        return self.info.name

    @property
    def sandbox_id(self) -> str:
        return self.info.sandbox_id

    def delete(self) -> None:
        """Remove it. Sandboxes that were started from it are not affected."""
        self._transport.request("DELETE", f"/snapshots/{wire.segment(self.id)}")


class Snapshots:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(
        self, *, sandbox_id: str | None = None, automatic: bool | None = None, limit: int | None = None
    ) -> list[Snapshot]:
        """Newest first, of one sandbox or of all. `automatic`: only checkpoints, or (False) only the others."""
        params = {"sandbox_id": sandbox_id, "automatic": automatic}
        found = self._transport.items(Page[SnapshotInfo], "/snapshots", params, limit)
        return [Snapshot(self._transport, info) for info in found]

    def get(self, snapshot: str) -> Snapshot:
        """By its id or its name."""
        answer = self._transport.request("GET", f"/snapshots/{wire.segment(snapshot)}")
        return Snapshot(self._transport, wire.parse(SnapshotInfo, answer.content))

    def delete(self, snapshot: str) -> None:
        """By its id or its name. Sandboxes that were started from it are not affected."""
        self._transport.request("DELETE", f"/snapshots/{wire.segment(snapshot)}")


def reference(snapshot: Snapshot | str) -> str:
    return snapshot if isinstance(snapshot, str) else snapshot.id
