# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""Stored secrets."""

from __future__ import annotations

from forkyard.models import Page
from forkyard.models.network import SecretInfo
from forkyard.sdk import wire
from forkyard.sdk._sync.transport import Transport


class Secrets:
    """Values that sandboxes use without holding them. A value goes in and never comes out."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def set(self, name: str, value: str) -> SecretInfo:
        """Store it, or change it: sandboxes that use the stored secret of this name send the new value at once."""
        answer = self._transport.request("PUT", _path(name), body={"value": value}, again=True)
        return wire.parse(SecretInfo, answer.content)

    def get(self, name: str) -> SecretInfo:
        answer = self._transport.request("GET", _path(name))
        return wire.parse(SecretInfo, answer.content)

    def list(self) -> list[SecretInfo]:
        answer = self._transport.request("GET", "/secrets")
        return wire.parse(Page[SecretInfo], answer.content).items

    def delete(self, name: str) -> None:
        """Sandboxes that use it send their placeholder from now on."""
        self._transport.request("DELETE", _path(name))


def _path(name: str) -> str:
    return f"/secrets/{wire.segment(name)}"
