"""Public keys that may come in by SSH, and where to."""

from __future__ import annotations

from forkyard.models import Page
from forkyard.models.ssh import SshDoor, SshKeyInfo
from forkyard.sdk import validation, wire
from forkyard.sdk._async.transport import AsyncTransport


class AsyncSsh:
    """A public key opens every sandbox, until it, or the API key it was added with, is deleted."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def door(self) -> SshDoor:
        """Address and host keys of the gateway."""
        answer = await self._transport.request("GET", "/ssh")
        return wire.parse(SshDoor, answer.content)

    async def add_key(self, public_key: str, *, name: str | None = None) -> SshKeyInfo:
        """One line, as in `~/.ssh/id_ed25519.pub`. Adding it again is fine."""
        request = validation.ssh_key_create(public_key=public_key, name=name)
        answer = await self._transport.request(
            "POST", "/ssh-keys", body=request.model_dump(exclude_none=True), again=True
        )
        return wire.parse(SshKeyInfo, answer.content)

    async def list_keys(self) -> list[SshKeyInfo]:
        answer = await self._transport.request("GET", "/ssh-keys")
        return wire.parse(Page[SshKeyInfo], answer.content).items

    async def delete_key(self, ssh_key_id: str) -> None:
        await self._transport.request("DELETE", f"/ssh-keys/{wire.segment(ssh_key_id)}")
