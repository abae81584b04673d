"""SSH: who may come in, and how to get there."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from forkyard.models.base import Answer, Request


class SshKeyCreate(Request):
    public_key: str = Field(
        min_length=1, max_length=16384, description="One line as in `~/.ssh/id_ed25519.pub`, without options."
    )
    name: str | None = Field(None, max_length=128, description="Default: the comment of the key.")


class SshKeyInfo(Answer):
    """A public key that opens all sandboxes its API key does, for as long as that API key exists."""

    id: str
    name: str
    fingerprint: str = Field(description="As `ssh-keygen -l` shows it.")
    created_at: datetime
    last_used_at: datetime | None = None


class SshAccessCreate(Request):
    ttl_s: float = Field(86400.0, gt=0, le=86400 * 30, description="The password is good for this long.")


class SshDoor(Answer):
    """Where this daemon listens for SSH, and the keys by which a client knows it."""

    host: str
    port: int
    host_keys: list[str]


class SshAccess(SshDoor):
    """A password for one sandbox."""

    user: str = Field(description="The sandbox; `ID+NAME` logs in as the user NAME instead of root.")
    password: str = Field(repr=False, description="Shown this once; only its hash is kept.")
    expires_at: datetime
    command: str
