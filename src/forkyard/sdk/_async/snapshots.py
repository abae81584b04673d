"""Snapshots: a machine's memory, devices and disk at one instant."""

from __future__ import annotations

from forkyard.models import Page, SnapshotInfo
from forkyard.sdk import wire
from forkyard.sdk._async.transport import AsyncTransport


class AsyncSnapshot:
    """What a sandbox was at one instant. `sandboxes.create(snapshot=…)` starts from it, `rollback` returns to it."""

    def __init__(self, transport: AsyncTransport, info: SnapshotInfo) -> None:
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

    async def delete(self) -> None:
        """Remove it. Sandboxes that were started from it are not affected."""
        await self._transport.request("DELETE", f"/snapshots/{wire.segment(self.id)}")


class AsyncSnapshots:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(
        self, *, sandbox_id: str | None = None, automatic: bool | None = None, limit: int | None = None
    ) -> list[AsyncSnapshot]:
        """Newest first, of one sandbox or of all. `automatic`: only checkpoints, or (False) only the others."""
        params = {"sandbox_id": sandbox_id, "automatic": automatic}
        found = await self._transport.items(Page[SnapshotInfo], "/snapshots", params, limit)
        return [AsyncSnapshot(self._transport, info) for info in found]

    async def get(self, snapshot: str) -> AsyncSnapshot:
        """By its id or its name."""
        answer = await self._transport.request("GET", f"/snapshots/{wire.segment(snapshot)}")
        return AsyncSnapshot(self._transport, wire.parse(SnapshotInfo, answer.content))

    async def delete(self, snapshot: str) -> None:
        """By its id or its name. Sandboxes that were started from it are not affected."""
        await self._transport.request("DELETE", f"/snapshots/{wire.segment(snapshot)}")


def reference(snapshot: AsyncSnapshot | str) -> str:
    return snapshot if isinstance(snapshot, str) else snapshot.id
