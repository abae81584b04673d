"""API keys: made, shown once, found again by hash.

Owns: what a key looks like and who holds a valid one. A key is 256 random bits (160 in E2B's form), so its plain
SHA-256 gives nothing away and the look-up by hash takes the same time whatever was guessed. Never does: HTTP (`api.auth`).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from forkyard.errors import Conflict, HostFailure, NotFound, Unauthenticated
from forkyard.models import KeyCreated, KeyFormat, KeyInfo
from forkyard.store.records import KeyRecord
from forkyard.store.sql import Store

#: `last_used_at` is this precise: a busy client must not cost a commit per request.
TOUCH_EVERY_S = 60.0
PREFIX_LENGTH = 8
_NEW: dict[KeyFormat, Callable[[], str]] = {
    "forkyard": lambda: "fy_" + secrets.token_urlsafe(32),
    "e2b": lambda: "e2b_" + secrets.token_hex(20),  # what its client checks
    "freestyle": lambda: secrets.token_urlsafe(32),
}


class Keys:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, str] = {}  # hash -> id; as many as there are keys, so bounded
        self._touched: dict[str, float] = {}
        self._deletions = 0

    async def create(self, name: str, format: KeyFormat = "forkyard") -> KeyCreated:
        key = _NEW[format]()
        record = await self._store.add_key("k" + secrets.token_hex(8), name, _hash(key), key[:PREFIX_LENGTH])
        return KeyCreated(**key_info(record).model_dump(), key=key)

    async def list(self) -> list[KeyInfo]:
        return [key_info(record) for record in await self._store.list_keys()]

    async def delete(self, key_id: str) -> None:
        if not await self._store.remove_key(key_id):
            if any(record.id == key_id for record in await self._store.list_keys()):
                raise Conflict("this is the last API key; create another before you delete it")
            raise NotFound(f"there is no API key {key_id!r}")
        self._deletions += 1
        self._known = {key_hash: known for key_hash, known in self._known.items() if known != key_id}

    async def authenticate(self, key: str | None) -> str:
        """The id of a valid key."""
        if not key:
            raise Unauthenticated()
        key_hash = _hash(key)
        key_id = self._known.get(key_hash)
        if key_id is None:
            deletions = self._deletions
            record = await self._store.key_by_hash(key_hash)
            if record is None:
                raise Unauthenticated("this API key is unknown (was it deleted?); set FORKYARD_API_KEY to a valid one")
            key_id = record.id
            if deletions == self._deletions:  # else what was read may be the key just deleted: do not remember it
                self._known[key_hash] = key_id
        now = time.monotonic()
        if now - self._touched.get(key_id, -TOUCH_EVERY_S) >= TOUCH_EVERY_S:
            self._touched[key_id] = now
            await self._store.touch_key(key_id)
        return key_id

    async def ensure_file(self, path: Path) -> None:
        """A key for clients on this machine: made at the first start, and again if the file or its key was lost."""
        try:
            key = (await asyncio.to_thread(path.read_text)).strip()
        except FileNotFoundError:
            key = ""
        except (OSError, ValueError) as error:
            raise HostFailure(f"the key file {path} cannot be read: {error}") from error
        if key and await self._store.key_by_hash(_hash(key)) is not None:
            return
        created = await self.create("this machine")
        try:
            await asyncio.to_thread(_write_private, path, created.key + "\n")
        except OSError as error:
            raise HostFailure(f"the key file {path} cannot be written: {error}") from error


def key_info(record: KeyRecord) -> KeyInfo:
    return KeyInfo(
        id=record.id,
        name=record.name,
        prefix=record.prefix,
        created_at=record.created_at,
        last_used_at=record.last_used_at,
    )


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
