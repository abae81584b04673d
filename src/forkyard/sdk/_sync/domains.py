# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""Domains of users, mapped to a port of a sandbox."""

from __future__ import annotations

from forkyard.models import Page
from forkyard.models.network import DomainInfo
from forkyard.sdk import wire
from forkyard.sdk._sync.sandbox import Sandbox
from forkyard.sdk._sync.transport import Transport


class Domains:
    """Names of your own for ports of sandboxes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def add(self, domain: str, sandbox: Sandbox | str | None = None, port: int | None = None) -> DomainInfo:
        """Map a domain to a port of a sandbox (the object or its id), or to nothing yet. It serves once the TXT record
        named in the answer is set and `verify` has seen it."""
        body = {"domain": domain, "sandbox_id": None if sandbox is None else _id(sandbox), "port": port}
        answer = self._transport.request("POST", "/domains", body=body)
        return wire.parse(DomainInfo, answer.content)

    def verify(self, domain: str) -> DomainInfo:
        """Look for the TXT record. `DomainUnverified` says what is missing."""
        answer = self._transport.request("POST", f"/domains/{wire.segment(domain)}/verify", again=True)
        return wire.parse(DomainInfo, answer.content)

    def map(self, domain: str, sandbox: Sandbox | str, port: int) -> DomainInfo:
        """Map it to another sandbox or port, a fork say, without a gap."""
        body = {"sandbox_id": _id(sandbox), "port": port}
        answer = self._transport.request("PUT", f"/domains/{wire.segment(domain)}", body=body, again=True)
        return wire.parse(DomainInfo, answer.content)

    def list(self) -> list[DomainInfo]:
        answer = self._transport.request("GET", "/domains")
        return wire.parse(Page[DomainInfo], answer.content).items

    def delete(self, domain: str) -> None:
        self._transport.request("DELETE", f"/domains/{wire.segment(domain)}")


def _id(sandbox: Sandbox | str) -> str:
    return sandbox if isinstance(sandbox, str) else sandbox.id
