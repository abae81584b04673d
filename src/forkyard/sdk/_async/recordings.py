"""Recordings of HTTP exchanges."""

from __future__ import annotations

from forkyard.models import Page
from forkyard.models.network import RecordedExchange, RecordingInfo
from forkyard.sdk import wire
from forkyard.sdk._async.transport import AsyncTransport


class AsyncRecordings:
    """What sandboxes with `record="name"` stored, and those with `replay="name"` are answered from."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def show(self, name: str) -> list[RecordedExchange]:
        """What was asked, in order."""
        answer = await self._transport.request("GET", f"/recordings/{wire.segment(name)}")
        return wire.parse(Page[RecordedExchange], answer.content).items

    async def delete(self, name: str) -> None:
        await self._transport.request("DELETE", f"/recordings/{wire.segment(name)}")

    async def list(self) -> list[RecordingInfo]:
        answer = await self._transport.request("GET", "/recordings")
        return wire.parse(Page[RecordingInfo], answer.content).items
