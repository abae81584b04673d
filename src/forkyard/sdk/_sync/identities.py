# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""Identities: who an agent is, its tokens, what it may do; and the audit log."""

from __future__ import annotations

from collections.abc import Sequence

from forkyard.models import Page
from forkyard.models.git import Permission
from forkyard.models.identities import (
    AuditEntry,
    IdentityInfo,
    RepoGrantInfo,
    SandboxGrantInfo,
    TokenCreated,
    TokenInfo,
    WhoAmI,
)
from forkyard.sdk import wire
from forkyard.sdk._sync.transport import Transport


class Identities:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, name: str) -> IdentityInfo:
        """It may do nothing until it is granted something."""
        answer = self._transport.request("POST", "/identities", body={"name": name})
        return wire.parse(IdentityInfo, answer.content)

    def list(self, *, managed: bool = False) -> list[IdentityInfo]:
        """`managed`: also those Forkyard made for itself."""
        answer = self._transport.request("GET", "/identities", params={"managed": managed})
        return wire.parse(Page[IdentityInfo], answer.content).items

    def get(self, identity_id: str) -> IdentityInfo:
        answer = self._transport.request("GET", _path(identity_id))
        return wire.parse(IdentityInfo, answer.content)

    def delete(self, identity_id: str) -> None:
        """With its tokens and permissions."""
        self._transport.request("DELETE", _path(identity_id))

    def create_token(
        self,
        identity_id: str,
        *,
        name: str | None = None,
        expires_in_s: float | None = None,
        sandbox_id: str | None = None,
    ) -> TokenCreated:
        """A token, in the answer and nowhere else. Good for the API, for git (as the password) and for SSH."""
        body = {"name": name, "expires_in_s": expires_in_s, "sandbox_id": sandbox_id}
        answer = self._transport.request("POST", f"{_path(identity_id)}/tokens", body=body)
        return wire.parse(TokenCreated, answer.content)

    def tokens(self, identity_id: str) -> Sequence[TokenInfo]:
        answer = self._transport.request("GET", f"{_path(identity_id)}/tokens")
        return wire.parse(Page[TokenInfo], answer.content).items

    def revoke_token(self, identity_id: str, token_id: str) -> None:
        """At once."""
        self._transport.request("DELETE", f"{_path(identity_id)}/tokens/{wire.segment(token_id)}")

    def grant_repo(self, identity_id: str, repo: str, permission: Permission) -> RepoGrantInfo:
        """Let it read, or read and write, a repository."""
        path = f"{_path(identity_id)}/permissions/repos/{wire.segment(repo)}"
        answer = self._transport.request("PUT", path, body={"permission": permission}, again=True)
        return wire.parse(RepoGrantInfo, answer.content)

    def revoke_repo(self, identity_id: str, repo: str) -> None:
        self._transport.request("DELETE", f"{_path(identity_id)}/permissions/repos/{wire.segment(repo)}")

    def repos(self, identity_id: str) -> Sequence[RepoGrantInfo]:
        answer = self._transport.request("GET", f"{_path(identity_id)}/permissions/repos")
        return wire.parse(Page[RepoGrantInfo], answer.content).items

    def grant_sandbox(
        self, identity_id: str, sandbox_id: str, *, allowed_users: Sequence[str] | None = None
    ) -> SandboxGrantInfo:
        """Let it use a sandbox, as any of these Linux users (None: as any at all)."""
        path = f"{_path(identity_id)}/permissions/sandboxes/{wire.segment(sandbox_id)}"
        users = None if allowed_users is None else [*allowed_users]
        answer = self._transport.request("PUT", path, body={"allowed_users": users}, again=True)
        return wire.parse(SandboxGrantInfo, answer.content)

    def revoke_sandbox(self, identity_id: str, sandbox_id: str) -> None:
        path = f"{_path(identity_id)}/permissions/sandboxes/{wire.segment(sandbox_id)}"
        self._transport.request("DELETE", path)

    def sandboxes(self, identity_id: str) -> Sequence[SandboxGrantInfo]:
        answer = self._transport.request("GET", f"{_path(identity_id)}/permissions/sandboxes")
        return wire.parse(Page[SandboxGrantInfo], answer.content).items

    def whoami(self) -> WhoAmI:
        """Whose key or token this client presents."""
        answer = self._transport.request("GET", "/whoami")
        return wire.parse(WhoAmI, answer.content)

    def audit(
        self,
        *,
        actor_id: str | None = None,
        action: str | None = None,
        resource: str | None = None,
        limit: int | None = 100,
    ) -> Sequence[AuditEntry]:
        """Who did what, newest first."""
        params = {"actor_id": actor_id, "action": action, "resource": resource}
        return self._transport.items(Page[AuditEntry], "/audit", params, limit)


def _path(identity_id: str) -> str:
    return f"/identities/{wire.segment(identity_id)}"
