"""Identities: who an agent is, the tokens it shows, what it may do, and the log of what it did.

Owns: `authenticate` (of API keys and of tokens, for the API, git and SSH alike) and `authorize`. A token is 256 random
bits, found by its hash, as an API key is. API keys may do everything; an identity only what it was granted. Never does:
HTTP (`api.auth`, `api.access`).
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from forkyard.control.keys import Keys
from forkyard.errors import Forbidden, InvalidRequest, NotFound, RepoNotFound, SandboxNotFound, Unauthenticated
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
from forkyard.store.identities import (
    AuditRecord,
    IdentityRecord,
    RepoGrantRecord,
    SandboxGrantRecord,
    TokenRecord,
)
from forkyard.store.sql import Store

TOKEN_PREFIX = "fyt_"
#: As of API keys.
TOUCH_EVERY_S = 60.0
PREFIX_LENGTH = 9


@dataclass(frozen=True)
class Principal:
    """Who asks."""

    kind: Literal["key", "identity"]
    id: str
    name: str
    token_id: str | None = None
    #: The sandbox the token was made for.
    sandbox_id: str | None = None

    @property
    def admin(self) -> bool:
        return self.kind == "key"

    def whoami(self) -> WhoAmI:
        return WhoAmI(kind=self.kind, id=self.id, name=self.name)


@dataclass(frozen=True)
class _Known:
    principal: Principal
    expires_at: datetime | None


class Identities:
    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._known: dict[str, _Known] = {}  # by hash; as many as there are tokens, so bounded
        self._touched: dict[str, float] = {}
        self._revocations = 0

    # ── who ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def authenticate(self, credential: str | None) -> Principal:
        """Of an API key or a token of an identity. `Unauthenticated` if it is neither, was revoked, or has expired."""
        if credential is None or not credential.startswith(TOKEN_PREFIX):
            key_id = await self._keys.authenticate(credential)
            return Principal("key", key_id, f"API key {key_id}")
        known = await self._token(_hash(credential))
        if known is None or (known.expires_at is not None and known.expires_at <= datetime.now(UTC)):
            raise Unauthenticated("this token is unknown, revoked or expired; make a new one for its identity")
        await self._touch(known.principal.token_id or "")
        return known.principal

    async def _token(self, token_hash: str) -> _Known | None:
        if token_hash in self._known:
            return self._known[token_hash]
        revocations = self._revocations
        found = await self._store.token_by_hash(token_hash)
        if found is None:
            return None
        token, identity = found
        known = _Known(Principal("identity", identity.id, identity.name, token.id, token.sandbox_id), token.expires_at)
        if revocations == self._revocations:  # else what was read may be the token just revoked: do not remember it
            self._known[token_hash] = known
        return known

    async def _touch(self, token_id: str) -> None:
        now = time.monotonic()
        if now - self._touched.get(token_id, -TOUCH_EVERY_S) >= TOUCH_EVERY_S:
            self._touched[token_id] = now
            await self._store.touch_token(token_id)

    def _forget(self) -> None:
        self._revocations += 1
        self._known.clear()
        self._touched.clear()

    # ── what it may do ───────────────────────────────────────────────────────────────────────────────────────────

    async def authorize_repo(self, who: Principal, wanted: Permission, repo_id: str, *, public: bool) -> None:
        """What it may not even read is not there for it."""
        if who.admin:
            return
        grant = await self._store.repo_grant(who.id, repo_id)
        if grant is None and not public:
            raise RepoNotFound(f"there is no repository {repo_id!r}, or {who.name!r} may not read it")
        if wanted == "write" and (grant is None or grant.permission != "write"):
            raise Forbidden(f"{who.name!r} may read this repository, not write to it")

    async def authorize_sandbox(self, who: Principal, sandbox_id: str, user: str | None = None) -> None:
        """`user`: the Linux user it wants to be in there; None: it only looks."""
        if who.admin:
            return
        grant = await self._store.sandbox_grant(who.id, sandbox_id)
        if grant is None:
            raise SandboxNotFound(f"there is no sandbox {sandbox_id!r}, or {who.name!r} may not use it")
        if user is not None and grant.allowed_users is not None and user not in grant.allowed_users:
            allowed = ", ".join(grant.allowed_users) or "nobody"
            raise Forbidden(f"{who.name!r} may not be {user!r} in this sandbox; allowed: {allowed}")

    # ── identities ───────────────────────────────────────────────────────────────────────────────────────────────

    async def create(self, name: str) -> IdentityInfo:
        return _identity(await self._store.add_identity(_new_id("i"), name))

    async def ensure_managed(self, purpose: str, name: str) -> IdentityInfo:
        """One that Forkyard needs for itself; the same for the same purpose."""
        return _identity(await self._store.add_identity(_new_id("i"), name, managed=purpose))

    async def remove_managed(self, purpose_prefix: str) -> None:
        await self._store.remove_managed(purpose_prefix)
        self._forget()

    async def get(self, identity_id: str) -> IdentityInfo:
        record = await self._store.identity(identity_id)
        if record is None:
            raise NotFound(f"there is no identity {identity_id!r}")
        return _identity(record)

    async def find(self, id_or_name: str) -> IdentityInfo:
        """By its id, or by its name if no other has it."""
        if (record := await self._store.identity(id_or_name)) is not None:
            return _identity(record)
        named = [one for one in await self._store.list_identities() if one.name == id_or_name]
        if not named:
            raise NotFound(f"there is no identity {id_or_name!r}; `forkyard identities ls` lists those there are")
        if len(named) > 1:
            raise InvalidRequest(f"{len(named)} identities are named {id_or_name!r}; give the id of one")
        return _identity(named[0])

    async def list(self, *, managed: bool = False) -> list[IdentityInfo]:
        return [_identity(record) for record in await self._store.list_identities(managed=managed)]

    async def delete(self, identity_id: str) -> None:
        if not await self._store.remove_identity(identity_id):
            raise NotFound(f"there is no identity {identity_id!r}")
        self._forget()

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def create_token(
        self,
        identity_id: str,
        *,
        name: str | None = None,
        expires_in_s: float | None = None,
        sandbox_id: str | None = None,
    ) -> TokenCreated:
        await self.get(identity_id)
        now = datetime.now(UTC)
        token = TOKEN_PREFIX + secrets.token_urlsafe(32)
        record = TokenRecord(
            id=_new_id("t"),
            identity_id=identity_id,
            prefix=token[:PREFIX_LENGTH],
            name=name,
            sandbox_id=sandbox_id,
            created_at=now,
            expires_at=None if expires_in_s is None else now + timedelta(seconds=expires_in_s),
            last_used_at=None,
        )
        await self._store.add_token(record, _hash(token))
        return TokenCreated(**vars(record), token=token)

    async def list_tokens(self, identity_id: str) -> Sequence[TokenInfo]:
        await self.get(identity_id)
        return [TokenInfo(**vars(record)) for record in await self._store.list_tokens(identity_id)]

    async def revoke_token(self, identity_id: str, token_id: str) -> None:
        """From the moment this returns it opens nothing."""
        if not await self._store.remove_token(identity_id, token_id):
            raise NotFound(f"identity {identity_id!r} has no token {token_id!r}")
        self._forget()

    # ── grants ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def grant_repo(self, identity_id: str, repo_id: str, permission: Permission, *, by: str) -> RepoGrantInfo:
        await self.get(identity_id)
        if await self._store.repo(repo_id) is None:
            raise RepoNotFound(f"there is no repository {repo_id!r}")
        grant = RepoGrantRecord(identity_id, repo_id, permission, datetime.now(UTC), by)
        await self._store.grant_repo(grant)
        return RepoGrantInfo(**vars(grant))

    async def repo_grants(self, identity_id: str) -> Sequence[RepoGrantInfo]:
        await self.get(identity_id)
        return [RepoGrantInfo(**vars(grant)) for grant in await self._store.list_repo_grants(identity_id)]

    async def revoke_repo(self, identity_id: str, repo_id: str) -> None:
        if not await self._store.revoke_repo(identity_id, repo_id):
            raise NotFound(f"identity {identity_id!r} has no permission on repository {repo_id!r}")

    async def grant_sandbox(
        self, identity_id: str, sandbox_id: str, allowed_users: Sequence[str] | None, *, by: str
    ) -> SandboxGrantInfo:
        await self.get(identity_id)
        if await self._store.sandbox(sandbox_id) is None:
            raise SandboxNotFound(f"there is no sandbox {sandbox_id!r}")
        users = None if allowed_users is None else tuple(allowed_users)
        grant = SandboxGrantRecord(identity_id, sandbox_id, users, datetime.now(UTC), by)
        await self._store.grant_sandbox(grant)
        return _sandbox_grant(grant)

    async def sandbox_grants(self, identity_id: str) -> Sequence[SandboxGrantInfo]:
        await self.get(identity_id)
        return [_sandbox_grant(grant) for grant in await self._store.list_sandbox_grants(identity_id)]

    async def revoke_sandbox(self, identity_id: str, sandbox_id: str) -> None:
        if not await self._store.revoke_sandbox(identity_id, sandbox_id):
            raise NotFound(f"identity {identity_id!r} has no permission on sandbox {sandbox_id!r}")

    # ── the log ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def record(
        self,
        who: Principal | None,
        action: str,
        resource: str | None = None,
        *,
        allowed: bool = True,
        address: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """`who` None: nobody in particular, of a public repository."""
        await self._store.add_audit(
            AuditRecord(
                at=datetime.now(UTC),
                actor_kind="anonymous" if who is None else who.kind,
                actor_id=None if who is None else who.id,
                actor_name="anonymous" if who is None else who.name,
                token_id=None if who is None else who.token_id,
                sandbox_id=None if who is None else who.sandbox_id,
                address=address,
                action=action,
                resource=resource,
                allowed=allowed,
                data=data or {},
            )
        )

    async def audit(
        self,
        *,
        actor_id: str | None = None,
        action: str | None = None,
        resource: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[AuditEntry]:
        """Newest first."""
        if cursor is not None and not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
            raise InvalidRequest(f"{cursor!r} is no cursor; use `next_cursor` of the page before, or none")
        before = None if cursor is None else int(cursor)
        found = await self._store.list_audit(
            actor_id=actor_id, action=action, resource=resource, before=before, limit=limit + 1
        )
        items = [AuditEntry.model_validate(vars(record)) for record in found[:limit]]
        return Page[AuditEntry](items=items, next_cursor=str(items[-1].id) if len(found) > limit else None)


def _identity(record: IdentityRecord) -> IdentityInfo:
    return IdentityInfo(
        id=record.id, name=record.name, managed=record.managed is not None, created_at=record.created_at
    )


def _sandbox_grant(grant: SandboxGrantRecord) -> SandboxGrantInfo:
    users = None if grant.allowed_users is None else list(grant.allowed_users)
    return SandboxGrantInfo(**{**vars(grant), "allowed_users": users})


def _new_id(kind: str) -> str:
    return kind + secrets.token_hex(8)


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
