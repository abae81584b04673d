"""Large files: kept by their SHA-256 beside the repository, streamed in and out, checked on the way in; and locks.

The wire is the git-lfs client's (`api.git_lfs`); here is what it means. One that no object of the repository names any more
is removed two weeks after it was last sent, or would have been.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from forkyard.control.identities import Principal
from forkyard.errors import Conflict, Forbidden, HostFailure, InvalidRequest, NotFound, OperationTimeout
from forkyard.git.commits import full
from forkyard.git.names import checked_path
from forkyard.git.repositories import Repo, Repositories
from forkyard.store.git import LockRecord
from forkyard.store.sql import Store

#: As long as git keeps what nobody refers to: it may be about to be pushed, or to be referred to again.
KEPT_S = 14 * 86400.0
LOOK_S = 3600.0
_OID = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 2**20
#: What stands in git for a large file is a small blob with its name in it.
_POINTER = re.compile(rb"oid sha256:([0-9a-f]{64})")
_POINTER_BYTES = range(100, 1025)
_AT_ONCE = 2000


class Lfs:
    def __init__(self, repositories: Repositories, store: Store) -> None:
        self._repositories = repositories
        self._store = store
        self._guard = threading.Lock()

    # ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def size(self, repo: Repo, oid: str) -> int | None:
        """None: it is not here."""

        def work() -> int | None:
            try:
                return _path(repo, oid).stat().st_size
            except FileNotFoundError:
                return None

        return await asyncio.to_thread(work)

    async def claim(self, repo: Repo, oid: str) -> int | None:
        """Its size, for who is about to refer to it and need not send it again: it is kept as if it came now."""

        def work() -> int | None:
            path = _path(repo, oid)
            with self._guard, contextlib.suppress(FileNotFoundError):
                os.utime(path)
                return path.stat().st_size
            return None

        return await asyncio.to_thread(work)

    async def put(self, repo: Repo, oid: str, chunks: AsyncIterator[bytes]) -> int:
        """Whole and as it should be, or not at all."""
        path = _path(repo, oid)
        digest, size = hashlib.sha256(), 0
        file = await asyncio.to_thread(_scratch, repo.lfs)
        try:
            async with self._repositories.writing(repo) as room:
                async for chunk in chunks:
                    size += len(chunk)
                    if not room.take(len(chunk)):
                        raise full(repo, size)
                    await asyncio.to_thread(_add, file, digest, chunk)
                if digest.hexdigest() != oid:
                    raise InvalidRequest(f"the {size} bytes that came are not object {oid}; send them again")
                await asyncio.to_thread(_into_place, file, path)
                await self._repositories.measured(repo)
        finally:
            file.close()
            with contextlib.suppress(FileNotFoundError):
                Path(file.name).unlink()
        return size

    async def read(self, repo: Repo, oid: str, offset: int) -> AsyncIterator[bytes]:
        try:
            file = await asyncio.to_thread(_path(repo, oid).open, "rb")
        except FileNotFoundError:
            raise NotFound(f"there is no large file {oid}", oid=oid) from None
        with file:
            file.seek(offset)
            while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield chunk

    async def drop_unneeded(self, repo: Repo) -> int:
        """How many were removed."""
        oldest = time.time() - KEPT_S
        old = await asyncio.to_thread(_older, repo, oldest)
        if not old:
            return 0
        needed = await self._named(repo)

        def work() -> int:
            dropped = 0
            for path in old:
                with self._guard, contextlib.suppress(FileNotFoundError):
                    if path.name not in needed and path.stat().st_mtime < oldest:
                        path.unlink()
                        dropped += 1
            return dropped

        return await asyncio.to_thread(work)

    async def _named(self, repo: Repo) -> set[str]:
        """By any object that git still has, referred to or not."""
        git, names = self._repositories.git, []
        form = "--batch-check=%(objecttype) %(objectsize) %(objectname)"
        listing = ("cat-file", "--batch-all-objects", "--unordered", form)
        try:
            async with asyncio.timeout(LOOK_S), git.process(repo.path, *listing) as process:
                assert process.stdout is not None
                async for line in process.stdout:
                    kind, size, name = line.split()
                    if kind == b"blob" and int(size) in _POINTER_BYTES:
                        names.append(name)
                if await process.wait():
                    raise HostFailure(f"the objects of repository {repo.id} cannot be listed")
        except TimeoutError:
            raise OperationTimeout(
                f"the objects of repository {repo.id} were not listed within {LOOK_S:.0f} s"
            ) from None
        found: set[str] = set()
        for start in range(0, len(names), _AT_ONCE):
            asked = b"\n".join(names[start : start + _AT_ONCE]) + b"\n"
            done = await git.run(repo.path, "cat-file", "--batch", stdin=asked)
            found.update(oid.decode() for oid in _POINTER.findall(done.stdout))
        return found

    # ── locks ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def lock(self, repo: Repo, path: str, by: Principal) -> tuple[LockRecord, bool]:
        """The lock of this path, and whether it is this caller's new one."""
        lock = LockRecord("l" + secrets.token_hex(8), repo.id, checked_path(path), by.id, by.name, datetime.now(UTC))
        return await self._store.add_lock(lock)

    async def locks(
        self, repo: Repo, *, path: str | None, lock_id: str | None, cursor: str | None, limit: int
    ) -> tuple[Sequence[LockRecord], str | None]:
        found = await self._store.list_locks(repo.id, path=path, lock_id=lock_id, after=cursor or "", limit=limit + 1)
        return found[:limit], found[limit - 1].path if len(found) > limit else None

    async def unlock(self, repo: Repo, lock_id: str, by: Principal, *, force: bool) -> LockRecord:
        found = await self._store.list_locks(repo.id, lock_id=lock_id, limit=1)
        if not found:
            raise NotFound(f"there is no lock {lock_id!r}")
        if found[0].owner_id != by.id and not force:
            raise Forbidden(f"{found[0].path!r} is locked by {found[0].owner_name!r}; use --force to unlock it anyway")
        if not await self._store.remove_lock(lock_id):
            raise Conflict(f"the lock {lock_id!r} is gone already")
        return found[0]


def is_oid(text: str) -> bool:
    return _OID.fullmatch(text) is not None


def _path(repo: Repo, oid: str) -> Path:
    if not is_oid(oid):
        raise InvalidRequest(f"{oid!r} is no id of a large file: 64 hexadecimal digits", field="oid")
    return repo.lfs / oid[:2] / oid[2:4] / oid


def _older(repo: Repo, than: float) -> list[Path]:
    found = []
    for path in repo.lfs.glob("??/??/*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < than:
                found.append(path)
    return found


def _scratch(directory: Path) -> tempfile._TemporaryFileWrapper[bytes]:
    directory.mkdir(mode=0o700, exist_ok=True)
    return tempfile.NamedTemporaryFile(prefix="upload-", dir=directory, delete=False)


def _add(file: IO[bytes], digest: hashlib._Hash, chunk: bytes) -> None:
    digest.update(chunk)
    file.write(chunk)


def _into_place(file: tempfile._TemporaryFileWrapper[bytes], path: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    path.parent.mkdir(parents=True, exist_ok=True)
    Path(file.name).rename(path)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
