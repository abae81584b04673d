"""Secrets: encrypted at rest, opened only on the way to the door.

Owns: the key that seals them, stored secrets, and the placeholders that stand for them inside. Never does: putting a
value anywhere but into a `Network` (`control.network`); no answer, event or log line has one.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from forkyard.errors import HostFailure, InvalidRequest, NotFound
from forkyard.models.network import SECRET_IN_TEXT, EgressHeader, Secret, SecretInfo
from forkyard.net.base import Header
from forkyard.store.records import SealedSecret
from forkyard.store.secrets import SecretRecord
from forkyard.store.sql import Store

_KEY_BYTES = 32
_NONCE_BYTES = 12
_TELLING_BYTES = 8
#: What is in these is not to be repeated to a sandbox, wherever it is from.
_PRIVATE = re.compile(r"auth|cookie|token|secret|key|password", re.IGNORECASE)


class Vault:
    """AES-256-GCM. The name of a secret is sealed in with it, so that two rows of the database cannot be swapped."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(_KEY_BYTES)
        self._cipher = AESGCM(self._key)

    @classmethod
    def load_or_make(cls, path: Path) -> Vault:
        """Blocking. Without this file what was sealed with it is lost."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                key = path.read_bytes()
            else:
                key = secrets.token_bytes(_KEY_BYTES)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(key)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise HostFailure(f"the key of the secrets, {path}, cannot be used: {error}") from error
        if len(key) != _KEY_BYTES:
            raise HostFailure(
                f"the key of the secrets, {path}, has {len(key)} bytes instead of {_KEY_BYTES}; restore it from a "
                "backup, or remove it and set all secrets again"
            )
        return cls(key)

    def seal(self, name: str, value: str) -> str:
        nonce = os.urandom(_NONCE_BYTES)
        return base64.b64encode(nonce + self._cipher.encrypt(nonce, value.encode(), name.encode())).decode("ascii")

    def open(self, name: str, sealed: str) -> str:
        blob = base64.b64decode(sealed)
        try:
            return self._cipher.decrypt(blob[:_NONCE_BYTES], blob[_NONCE_BYTES:], name.encode()).decode()
        except InvalidTag:
            raise HostFailure(
                f"secret {name} cannot be decrypted: the key in the state directory is not the one it was sealed "
                "with; set it again"
            ) from None

    def digest(self, value: str) -> str:
        """Tells equal values from different ones, and nothing else."""
        return hmac.new(self._key, value.encode(), hashlib.sha256).hexdigest()


class Secrets:
    def __init__(self, store: Store, vault: Vault) -> None:
        self._store = store
        self._vault = vault
        #: Called with the name of a stored secret that has changed.
        self.changed: Callable[[str], Awaitable[None]] = _nobody

    # ── stored ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def put(self, name: str, value: str, metadata: dict[str, str] | None = None) -> SecretInfo:
        """Sandboxes that use the stored secret of this name get the new value at once."""
        _check_header_value(value)
        record = await self._store.put_secret(name, self._vault.seal(name, value), metadata)
        await self.changed(name)
        return _info(record)

    async def get(self, name: str) -> SecretInfo:
        return _info(await self._record(name))

    async def list(self) -> list[SecretInfo]:
        return [_info(record) for record in await self._store.list_secrets()]

    async def delete(self, name: str) -> None:
        """Sandboxes that use it send their placeholder from now on."""
        if not await self._store.remove_secret(name):
            raise _missing(name)
        await self.changed(name)

    async def _record(self, name: str) -> SecretRecord:
        record = await self._store.secret(name)
        if record is None:
            raise _missing(name)
        return record

    # ── for the rest of the daemon ───────────────────────────────────────────────────────────────────────────────

    async def named(self, name: str, field: str) -> str:
        """The value of a stored secret that a request names in this field."""
        try:
            return await self.stored(name)
        except NotFound:
            raise InvalidRequest(
                f"{field}: there is no secret {name!r}; store it first: forkyard secrets set {name}", field=field
            ) from None

    async def stored(self, name: str) -> str:
        """The value itself, for what the daemon does on behalf of whoever stored it."""
        return self._vault.open(name, (await self._record(name)).sealed)

    def seal(self, purpose: str, value: str) -> str:
        """For a row of another table. `purpose` is no name of a secret: it has a colon."""
        return self._vault.seal(purpose, value)

    def unseal(self, purpose: str, sealed: str) -> str:
        return self._vault.open(purpose, sealed)

    # ── of a sandbox ─────────────────────────────────────────────────────────────────────────────────────────────

    async def sealed(
        self, wanted: Mapping[str, Secret], earlier: Mapping[str, SealedSecret] | None = None
    ) -> dict[str, SealedSecret]:
        """`earlier`: those of the sandbox whose memory is taken over. A secret of the same name keeps its placeholder,
        for processes have it."""
        found = {}
        for name, secret in wanted.items():
            if secret.value is None:
                if await self._store.secret(name) is None:
                    raise InvalidRequest(
                        f"secrets.{name} has no value, and no secret of this name is stored; give a value, or store it "
                        f"first: forkyard secrets set {name}",
                        field=f"secrets.{name}",
                    )
            else:
                _check_header_value(secret.value, f"secrets.{name}.value")
            before = (earlier or {}).get(name)
            found[name] = SealedSecret(
                hosts=tuple(secret.hosts),
                header=secret.header,
                format=_checked_format(name, secret.format),
                placeholder=before.placeholder if before else f"forkyard-secret-{secrets.token_hex(16)}",
                sealed=None if secret.value is None else await asyncio.to_thread(self._vault.seal, name, secret.value),
            )
        return found

    def digest(self, value: str) -> str:
        return self._vault.digest(value)

    # ── in texts ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def check_headers(self, headers: Iterable[EgressHeader]) -> None:
        """Before they are taken on: that what they name is there."""
        for number, header in enumerate(headers):
            for name in header.secret_names:
                if await self._store.secret(name) is None:
                    raise InvalidRequest(
                        f"network.egress.headers.{number}: no secret {name!r} is stored; store it first: "
                        f"forkyard secrets set {name}",
                        field=f"network.egress.headers.{number}",
                    )

    async def header(self, wanted: EgressHeader) -> Header | None:
        """With the values of the secrets in it. None: one of them is not there any more."""
        values = {}
        for name in wanted.secret_names:
            record = await self._store.secret(name)
            if record is None:
                return None
            values[name] = self._vault.open(name, record.sealed)
        text = SECRET_IN_TEXT.sub(lambda found: values[found[1]], wanted.value)
        hidden = tuple(values.values())
        if not hidden and _PRIVATE.search(wanted.name):
            hidden = (wanted.value, wanted.value.partition(" ")[2] or wanted.value)
        return Header(wanted.domain, wanted.name, text, hidden)

    async def recognisable(self) -> dict[str, bytes]:
        """By name, the stored ones that would be known again. A short one is found anywhere, by chance."""
        found = {}
        for record in await self._store.list_secrets():
            value = self._vault.open(record.name, record.sealed).encode()
            if len(value) >= _TELLING_BYTES:
                found[record.name] = value
        return found

    async def value(self, name: str, secret: SealedSecret) -> str | None:
        """None: it was a stored one, and is not there any more."""
        if secret.sealed is not None:
            return self._vault.open(name, secret.sealed)
        record = await self._store.secret(name)
        return None if record is None else self._vault.open(name, record.sealed)


async def _nobody(_name: str) -> None:
    pass


def _info(record: SecretRecord) -> SecretInfo:
    return SecretInfo(
        name=record.name,
        version=record.version,
        metadata=record.metadata,
        created_at=record.created_at,
        updated_at=record.updated_at,
    )


def _missing(name: str) -> NotFound:
    return NotFound(f"there is no stored secret {name!r}; `forkyard secrets ls` lists those there are")


def _check_header_value(value: str, field: str = "value") -> None:
    """It goes into a header of HTTP: what could end the header must not be in it. The value is not repeated here."""
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in value):
        raise InvalidRequest(
            f"{field} holds a control character, such as a line break, which no header can", field=field
        )
    if value != value.strip():
        raise InvalidRequest(f"{field} begins or ends with a space, which a header would lose", field=field)


def _checked_format(name: str, text: str) -> str:
    field = f"secrets.{name}.format"
    if text.count("{}") + text.count("{basic}") != 1:
        raise InvalidRequest(f"{field} is {text!r}; it needs `{{}}` or `{{basic}}` once, for the value", field=field)
    if not text.isprintable() or not text.isascii():
        raise InvalidRequest(f"{field} is {text!r}; a header has printable ASCII only", field=field)
    return text
