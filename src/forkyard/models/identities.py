"""Wire types of identities: who an agent is, its tokens, what it may do, and what it did."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from forkyard.models.base import Answer, Request
from forkyard.models.git import Permission

LinuxUser = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_.-]{0,31}$")]


class IdentityCreate(Request):
    name: str = Field(min_length=1, max_length=128, description="For people and the audit log; need not be unique.")


class IdentityInfo(Answer):
    id: str
    name: str
    managed: bool = Field(False, description="Made by Forkyard for a purpose of its own, such as a clone URL.")
    created_at: datetime


class TokenCreate(Request):
    name: str | None = Field(None, max_length=128)
    expires_in_s: float | None = Field(None, gt=0, le=86400 * 3650, description="Null: never.")
    sandbox_id: str | None = Field(None, max_length=32, description="The sandbox it is for; the audit log names it.")


class TokenInfo(Answer):
    id: str
    identity_id: str
    name: str | None = None
    prefix: str = Field(description="How the token begins, to tell tokens apart.")
    sandbox_id: str | None = None
    created_at: datetime
    expires_at: datetime | None = None
    last_used_at: datetime | None = None


class TokenCreated(TokenInfo):
    token: str = Field(description="Shown this once; only its hash is kept.")


class RepoGrant(Request):
    permission: Permission


class RepoGrantInfo(Answer):
    identity_id: str
    repo_id: str
    permission: Permission
    granted_at: datetime
    granted_by: str


class SandboxGrant(Request):
    allowed_users: list[LinuxUser] | None = Field(
        None,
        max_length=64,
        description="Linux users it may be in there; null: any. Files are read and written as root.",
    )


class SandboxGrantInfo(Answer):
    identity_id: str
    sandbox_id: str
    allowed_users: list[str] | None = None
    granted_at: datetime
    granted_by: str


class WhoAmI(Answer):
    kind: Literal["key", "identity"]
    id: str
    name: str


class AuditEntry(Answer):
    """One line of what was done: by whom, from where, and whether it was allowed."""

    id: int
    at: datetime
    actor_kind: Literal["key", "identity", "anonymous"]
    actor_id: str | None = None
    actor_name: str
    token_id: str | None = None
    sandbox_id: str | None = Field(None, description="The sandbox the token was made for.")
    address: str | None = None
    action: str = Field(description="`git.push`, `sandbox.exec`, `identity.grant` …")
    resource: str | None = None
    allowed: bool = True
    data: dict[str, Any] = Field(default_factory=dict)
