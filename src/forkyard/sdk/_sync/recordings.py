# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""Recordings of HTTP exchanges."""

from __future__ import annotations

from forkyard.models import Page
from forkyard.models.network import RecordedExchange, RecordingInfo
from forkyard.sdk import wire
from forkyard.sdk._sync.transport import Transport


class Recordings:
    """What sandboxes with `record="name"` stored, and those with `replay="name"` are answered from."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def show(self, name: str) -> list[RecordedExchange]:
        """What was asked, in order."""
        answer = self._transport.request("GET", f"/recordings/{wire.segment(name)}")
        return wire.parse(Page[RecordedExchange], answer.content).items

    def delete(self, name: str) -> None:
        self._transport.request("DELETE", f"/recordings/{wire.segment(name)}")

    def list(self) -> list[RecordingInfo]:
        answer = self._transport.request("GET", "/recordings")
        return wire.parse(Page[RecordingInfo], answer.content).items
