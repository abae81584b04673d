"""Bare copies of repositories elsewhere, so that the second clone of a large one is quick.

Owns: `<root>/<key>.git`, one for each address and credential: what was fetched with one credential is never given to
whoever shows another. They may take so much room; those that were not used for longest go first. Every use fetches what
is new, so that a mirror is never older than its origin. Never does: deciding where a fetch may go (the proxy in the
environment it is given does).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import structlog

from forkyard.errors import HostFailure
from forkyard.git.names import is_sha
from forkyard.git.process import Git
from forkyard.git.repositories import measured_bytes

log = structlog.get_logger(__name__)

FETCH_S = 3600.0
BUDGET_BYTES = 10 * 2**30
#: What git says of its own files.
_DAMAGED = re.compile(
    r"\.lock'|corrupt|bad object|not a git repository|loose object|missing (blob|tree|commit|necessary)"
)


class Mirrors:
    def __init__(self, git: Git, root: Path, budget_bytes: int = BUDGET_BYTES) -> None:
        self._git = git
        self._root = root
        self._budget_bytes = budget_bytes
        self._locks: dict[str, asyncio.Lock] = {}
        self._used: Counter[str] = Counter()

    async def start(self) -> None:
        """Clears away what a fetch that was cut off left."""

        def work() -> None:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for doomed in self._root.glob("*.evicted"):
                shutil.rmtree(doomed, ignore_errors=True)
            for left in self._root.glob("*.git/objects/pack/tmp_*"):
                left.unlink(missing_ok=True)
            for lock in self._root.glob("*.git/**/*.lock"):
                lock.unlink(missing_ok=True)

        await asyncio.to_thread(work)

    @contextlib.asynccontextmanager
    async def fresh(
        self, url: str, credential: str, env: Mapping[str, str], head: str | None, rev: str | None
    ) -> AsyncIterator[Path | None]:
        """The mirror of `url`, as it is now, for as long as the block lasts. `head`: its default branch. `rev`: a commit
        that must be in it, if its name is one. `env`: how to get there. None: there is not so much room."""
        key = hashlib.sha256(f"{url}\0{credential}".encode()).hexdigest()[:32]
        path = self._root / f"{key}.git"
        self._used[key] += 1
        try:
            async with self._locks.setdefault(key, asyncio.Lock()):
                if await self._fits(path, url, {**env, "GIT_DIR": str(path)}, head, rev):
                    yield path
                else:
                    yield None
        finally:
            self._used[key] -= 1
            if not self._used[key]:
                del self._used[key]
                self._locks.pop(key, None)
        await self._evict()

    async def _fits(self, path: Path, url: str, env: Mapping[str, str], head: str | None, rev: str | None) -> bool:
        try:
            try:
                await self._updated(path, url, env, head, rev)
            except HostFailure as error:
                if not _DAMAGED.search(error.message):
                    raise
                log.warning("a mirror is damaged, and made anew", url=url, error=error.message)
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
                await self._updated(path, url, env, head, rev)
        except HostFailure as error:
            if "index-pack" not in error.message:  # which was ended at the limit of its file
                raise
            log.warning("a repository has no room for a mirror; FORKYARD_GIT_MIRRORS_GIB is the limit", url=url)
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            return False
        return True

    async def _updated(self, path: Path, url: str, env: Mapping[str, str], head: str | None, rev: str | None) -> None:
        if not await asyncio.to_thread((path / "HEAD").exists):
            await self._git.run(self._root, "init", "--quiet", "--bare", "--template=", str(path), env=self._git.env())
        refs = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
        await self._fetch(path, env, "--prune", url, *refs)
        if head is not None:
            await self._git.run(path, "symbolic-ref", "HEAD", f"refs/heads/{head}")
        if rev is not None and is_sha(rev):
            known = await self._git.run(path, "cat-file", "-e", f"{rev}^{{commit}}", ok=(0, 1, 128))
            if known.code:
                with contextlib.suppress(HostFailure):  # then there is no such commit, which is said later
                    await self._fetch(path, env, url, f"+{rev}:refs/forkyard/{rev}")
        await self._git.run(path, "gc", "--auto", "--quiet", timeout_s=FETCH_S)
        await asyncio.to_thread(os.utime, path)

    async def _fetch(self, path: Path, env: Mapping[str, str], *args: str) -> None:
        await self._git.run(
            path,
            *("fetch", "--quiet", "--no-write-fetch-head", "--no-auto-gc", "--no-tags", *args),
            timeout_s=FETCH_S,
            env=env,
            prefix=("prlimit", f"--fsize={self._budget_bytes}"),
        )

    async def _evict(self) -> None:
        try:
            for path in await asyncio.to_thread(self._too_much):
                if path.stem not in self._used:  # said here, where uses begin
                    doomed = path.with_suffix(".evicted")
                    path.rename(doomed)
                    await asyncio.to_thread(shutil.rmtree, doomed, ignore_errors=True)
        except OSError as error:
            log.warning("mirrors take too much room", error=str(error))

    def _too_much(self) -> list[Path]:
        found = sorted(self._root.glob("*.git"), key=lambda path: path.stat().st_mtime, reverse=True)
        total, over = 0, []
        for path in found:
            total += measured_bytes(path)
            if total > self._budget_bytes:
                over.append(path)
        return over
