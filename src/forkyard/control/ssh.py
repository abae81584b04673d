"""Who may come in by SSH: registered public keys, passwords for one sandbox, API keys, and tokens of identities.

Owns: what is registered, and whether a credential is good. Whatever was made with an API key goes with it. Passwords
are 256 random bits, so that their plain SHA-256 gives nothing away. Never does: the protocol (`gateway.ssh`).
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import asyncssh

from forkyard.control.ground import Ground, ended
from forkyard.control.identities import Identities
from forkyard.errors import Conflict, Forbidden, InvalidRequest, NotFound, Unauthenticated
from forkyard.lifecycle import ENDED
from forkyard.models.ssh import SshAccess, SshDoor, SshKeyInfo
from forkyard.store.records import SshKeyRecord

MIN_RSA_BITS = 2048
TOUCH_EVERY_S = 60.0
_PREFIX = "fyssh_"


@dataclass(frozen=True)
class Listening:
    """Where the gateway is."""

    host: str
    port: int
    host_keys: tuple[str, ...]


class Ssh:
    def __init__(self, ground: Ground, identities: Identities) -> None:
        self._ground = ground
        self._identities = identities
        self._touched: dict[str, float] = {}
        #: Set by whoever runs the gateway.
        self.listening: Listening | None = None

    # ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def add_key(self, public_key: str, name: str | None, *, api_key_id: str) -> SshKeyInfo:
        """Adding one that is there already is fine."""
        key = await asyncio.to_thread(_parsed, public_key)
        record = await self._ground.store.add_ssh_key(
            "s" + secrets.token_hex(8), api_key_id, name or key.get_comment() or "ssh key", key.get_fingerprint()
        )
        return _info(record)

    async def list_keys(self) -> list[SshKeyInfo]:
        return [_info(record) for record in await self._ground.store.list_ssh_keys()]

    async def delete_key(self, ssh_key_id: str) -> None:
        if not await self._ground.store.remove_ssh_key(ssh_key_id):
            raise NotFound(f"there is no SSH key {ssh_key_id!r}")

    # ── access ───────────────────────────────────────────────────────────────────────────────────────────────────

    def door(self, host: str | None = None) -> SshDoor:
        """`host`: the name the caller knows this machine by."""
        if self.listening is None:
            raise Conflict("this daemon has no SSH gateway; unset FORKYARD_SSH and start it again")
        return SshDoor(
            host=host or self.listening.host, port=self.listening.port, host_keys=list(self.listening.host_keys)
        )

    async def access(self, sandbox_id: str, ttl_s: float, *, api_key_id: str, host: str | None = None) -> SshAccess:
        """A new password for one sandbox."""
        door = self.door(host)
        record = await self._ground.record(sandbox_id)
        if record.state in ENDED:
            raise ended(record)
        password = _PREFIX + secrets.token_urlsafe(32)
        expires_at = datetime.now(UTC) + timedelta(seconds=ttl_s)
        await self._ground.store.add_ssh_password(_hash(password), sandbox_id, api_key_id, expires_at)
        return SshAccess(
            **door.model_dump(),
            user=sandbox_id,
            password=password,
            expires_at=expires_at,
            command=f"ssh -p {door.port} {sandbox_id}@{door.host}",
        )

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def password_opens(self, sandbox_id: str, user: str, password: str, *, inside: bool = False) -> bool:
        """An API key opens every sandbox, a password the one it was made for, a token what its identity was granted:
        those sandboxes, and in them those users. `inside`: asked of somebody who came in by it; a password that has
        expired meanwhile lets them stay, one whose API key was deleted does not."""
        if password.startswith(_PREFIX):
            return await self._ground.store.ssh_password(_hash(password), sandbox_id, inside=inside)
        try:
            who = await self._identities.authenticate(password)
            await self._identities.authorize_sandbox(who, sandbox_id, user)
        except (Unauthenticated, NotFound, Forbidden):
            return False
        return True

    async def key_opens(self, fingerprint: str, *, inside: bool = False) -> bool:  # noqa: ARG002
        return await self._ground.store.ssh_key(fingerprint) is not None

    async def key_used(self, fingerprint: str) -> None:
        record = await self._ground.store.ssh_key(fingerprint)
        now = time.monotonic()
        if record is not None and now - self._touched.get(record.id, -TOUCH_EVERY_S) >= TOUCH_EVERY_S:
            self._touched[record.id] = now
            await self._ground.store.touch_ssh_key(record.id)


def _parsed(text: str) -> asyncssh.SSHKey:
    example = "it looks like `ssh-ed25519 AAAA… name`, as in ~/.ssh/id_ed25519.pub"
    line = text.strip()
    if "\n" in line or "PRIVATE KEY" in line:
        raise InvalidRequest(f"public_key must be one line with a public key; {example}", field="public_key")
    try:
        key = asyncssh.import_public_key(line)
    except (asyncssh.KeyImportError, ValueError) as error:
        raise InvalidRequest(
            f"public_key is no public key that is known here; {example}", field="public_key"
        ) from error
    if key.get_algorithm() == "ssh-dss":
        raise InvalidRequest(
            "DSA keys are broken and not taken; make one with ssh-keygen -t ed25519", field="public_key"
        )
    bits = getattr(getattr(key, "pyca_key", None), "key_size", None)
    if key.get_algorithm() == "ssh-rsa" and bits is not None and bits < MIN_RSA_BITS:
        raise InvalidRequest(
            f"an RSA key of {bits} bits is too weak; make one with ssh-keygen -t ed25519", field="public_key"
        )
    return key


def _info(record: SshKeyRecord) -> SshKeyInfo:
    return SshKeyInfo(
        id=record.id,
        name=record.name,
        fingerprint=record.fingerprint,
        created_at=record.created_at,
        last_used_at=record.last_used_at,
    )


def _hash(password: str) -> str:
    return hashlib.sha256(password.encode("utf-8", "surrogatepass")).hexdigest()
