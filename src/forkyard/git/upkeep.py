"""Cleaning up in the background: small packs into one, what nobody refers to away after two weeks, large files too.

One repository at a time, where something has changed since the last time and once a day, and never while one is written to.
`git gc` writes new packs before it removes old ones, so that a crash at any point costs space and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from datetime import datetime

import structlog

from forkyard.errors import ForkyardError
from forkyard.git.lfs import Lfs
from forkyard.git.repositories import Repo, Repositories

log = structlog.get_logger(__name__)

EVERY_S = 300.0
#: What nobody refers to grows old also where nothing changes.
AGAIN_S = 86400.0
GC_S = 3600.0
#: A quarantine or an upload older than this was left by a push that was cut off.
STALE_S = 86400.0


class Upkeep:
    def __init__(self, repositories: Repositories, lfs: Lfs) -> None:
        self._repositories = repositories
        self._lfs = lfs
        self._seen: dict[str, tuple[datetime | None, float]] = {}  # pushed at, and when we looked

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            with contextlib.suppress(ForkyardError):
                await self.sweep()

    async def sweep(self) -> int:
        """How many were cleaned up."""
        done = 0
        for repo in await self._repositories.every():
            now, pushed_at = time.monotonic(), repo.record.pushed_at
            seen = self._seen.get(repo.id)
            clean = seen is not None and seen[0] == pushed_at and now - seen[1] < AGAIN_S
            if clean or self._repositories.is_written(repo):
                continue
            try:
                await self.clean(repo)
                self._seen[repo.id] = (pushed_at, now)
                done += 1
            except ForkyardError as error:
                log.warning("repository not cleaned up", repo=repo.id, error=error.message)
        return done

    async def clean(self, repo: Repo, *, now: bool = False) -> None:
        """`now`: also if git thinks it is not worth it."""
        await asyncio.to_thread(_drop_stale, repo)
        args = ("gc", "--quiet") if now else ("gc", "--auto", "--quiet")
        # Packing needs the machine; whoever works with it comes first.
        await self._repositories.git.run(repo.path, *args, timeout_s=GC_S, prefix=("nice", "-n", "10"))
        await self._lfs.drop_unneeded(repo)
        await self._repositories.measured(repo)


def _drop_stale(repo: Repo) -> None:
    oldest = time.time() - STALE_S
    for directory, pattern in ((repo.path / "objects", "tmp_objdir-*"), (repo.lfs, "upload-*"), (repo.path, "push-*")):
        for left in directory.glob(pattern):
            with contextlib.suppress(OSError):
                if left.stat().st_mtime < oldest:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
