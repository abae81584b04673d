"""Repositories: made whole or not at all, listed, renamed, measured, removed.

Owns: the directory of each (`<id>.git`, and `<id>.lfs` for large files) and its row. A new one is built under another
name and renamed into place before its row is marked ready. Where HEAD points is the default branch; git keeps it, the
database does not. Never does: what is inside a repository (`content.py`, `commits.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import string
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from forkyard.control.pages import place_of
from forkyard.errors import HostFailure, InvalidRequest, RepoFull, RepoNotFound
from forkyard.git.names import checked_ref
from forkyard.git.process import Git
from forkyard.models.git import Visibility
from forkyard.store.git import RepoRecord
from forkyard.store.records import Place
from forkyard.store.sql import Store

log = structlog.get_logger(__name__)

_ALPHABET = string.ascii_lowercase + string.digits
_HEADS = "ref: refs/heads/"


@dataclass(frozen=True)
class Repo:
    """One repository, at hand."""

    record: RepoRecord
    path: Path
    lfs: Path

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def room_bytes(self) -> int:
        return max(0, self.record.quota_bytes - self.record.size_bytes)


class Room:
    """What is left of a quota for those who write to a repository at the same time."""

    def __init__(self, left_bytes: int) -> None:
        self.left_bytes = left_bytes

    def take(self, size_bytes: int, *, slack_bytes: int = 0) -> bool:
        """False: that was too much."""
        self.left_bytes -= size_bytes
        return self.left_bytes >= -slack_bytes


@dataclass(frozen=True)
class RefChange:
    ref: str
    old: str
    new: str


Fill = Callable[[Path], Awaitable[None]]
Pushed = Callable[[Repo, Sequence[RefChange], str | None], Awaitable[None]]


class Repositories:
    def __init__(self, store: Store, git: Git, root: Path, *, quota_bytes: int) -> None:
        self._store = store
        self.git = git
        self._root = root
        self._quota_bytes = quota_bytes
        self._writers: dict[str, int] = {}
        self._rooms: dict[str, Room] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        #: Called after every change of refs, however it came about, with the id of who made it.
        self.on_push: list[Pushed] = []

    # ── the whole ────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Clears away what an earlier daemon left half made or half removed."""
        await asyncio.to_thread(self._prepare)
        for record in await self._store.list_repos(ready=False):
            await self._remove(record.id)

    def _prepare(self) -> None:
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.git.install()
        except OSError as error:
            raise HostFailure(f"the directory of repositories {self._root} cannot be used: {error}") from error
        for left in self._root.glob("*.tmp"):
            shutil.rmtree(left, ignore_errors=True)

    async def create(
        self,
        name: str | None,
        *,
        description: str | None = None,
        visibility: Visibility = "private",
        default_branch: str | None = "main",
        quota_bytes: int | None = None,
        fill: Fill | None = None,
        repo_id: str | None = None,
    ) -> Repo:
        """`fill` is given the new directory, before anybody can see it. `default_branch` None: it sets HEAD itself.
        `repo_id`: a `new_id` that the caller has written down before."""
        branch = checked_ref(default_branch or "main")
        repo_id = repo_id or new_id()
        record = await self._store.add_repo(
            repo_id,
            checked_name(name) if name is not None else repo_id,
            description=description,
            visibility=visibility,
            quota_bytes=quota_bytes or self._quota_bytes,
        )
        scratch = self._root / f"{repo_id}.tmp"
        try:
            await self.git.run(
                self._root,
                "init",
                "--quiet",
                "--bare",
                "--template=",
                f"--initial-branch={branch}",
                str(scratch),
                env=self.git.env(),
            )
            if fill is not None:
                await fill(scratch)
            size_bytes = await asyncio.to_thread(measured_bytes, scratch)
            if size_bytes > record.quota_bytes:
                raise RepoFull(
                    f"what shall be in it is {size_bytes} bytes; its quota is {record.quota_bytes}", size=size_bytes
                )
            await asyncio.to_thread(_into_place, scratch, self._root / f"{repo_id}.git")
            await self._store.mark_repo(repo_id, ready=True, size_bytes=size_bytes)
        except BaseException:
            await asyncio.shield(self._remove(repo_id))
            raise
        return await self.get(repo_id)

    async def get(self, id_or_name: str) -> Repo:
        record = await self._store.repo(id_or_name.removesuffix(".git"))
        if record is None:
            raise RepoNotFound(f"there is no repository {id_or_name!r}; `forkyard git ls` lists them")
        return self._at(record)

    async def list(
        self, *, search: str | None, identity_id: str | None, limit: int, cursor: str | None
    ) -> tuple[Sequence[Repo], Place | None]:
        found = await self._store.list_repos(
            search=search, identity_id=identity_id, before=place_of(cursor), limit=limit + 1
        )
        last = found[limit - 1] if len(found) > limit else None
        place = None if last is None else Place(last.created_at, last.id)
        return [self._at(record) for record in found[:limit]], place

    async def every(self) -> Sequence[Repo]:
        return [self._at(record) for record in await self._store.list_repos()]

    async def update(
        self,
        repo: Repo,
        *,
        name: str | None = None,
        description: str | None = None,
        visibility: Visibility | None = None,
        default_branch: str | None = None,
        quota_bytes: int | None = None,
    ) -> Repo:
        if default_branch is not None:
            ref = f"refs/heads/{checked_ref(default_branch)}"
            await self.git.run(repo.path, "symbolic-ref", "HEAD", ref)
        given = {
            "name": None if name is None else checked_name(name),
            "description": description,
            "visibility": visibility,
            "quota_bytes": quota_bytes,
        }
        changes = {key: value for key, value in given.items() if value is not None}
        record = await self._store.update_repo(repo.id, changes)
        if record is None:
            raise RepoNotFound(f"there is no repository {repo.id!r} any more")
        return self._at(record)

    async def delete(self, repo: Repo) -> None:
        if await self._store.mark_repo(repo.id, ready=False):
            await asyncio.shield(self._remove(repo.id))

    async def _remove(self, repo_id: str) -> None:
        def work() -> None:
            for suffix in (".git", ".tmp", ".lfs"):
                path = self._root / f"{repo_id}{suffix}"
                if path.exists():
                    shutil.rmtree(path, ignore_errors=True)

        await asyncio.to_thread(work)
        await self._store.remove_repo(repo_id)
        self._locks.pop(repo_id, None)

    def _at(self, record: RepoRecord) -> Repo:
        return Repo(record, self._root / f"{record.id}.git", self._root / f"{record.id}.lfs")

    # ── being written to ─────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def writing(self, repo: Repo) -> AsyncIterator[Room]:
        """While anybody is in here, no clean-up begins. Those who are in here at once share what room there is; who writes
        much is `measured` in here, so that whoever comes next knows."""
        self._writers[repo.id] = self._writers.get(repo.id, 0) + 1
        try:
            if repo.id not in self._rooms:
                # `repo` may have been read before others wrote, whom its reader then waited for.
                record = await self._store.repo(repo.id)
                left_bytes = repo.room_bytes if record is None else self._at(record).room_bytes
                self._rooms.setdefault(repo.id, Room(left_bytes))
            yield self._rooms[repo.id]
        finally:
            self._writers[repo.id] -= 1
            if not self._writers[repo.id]:
                del self._writers[repo.id]
                self._rooms.pop(repo.id, None)

    def is_written(self, repo: Repo) -> bool:
        return repo.id in self._writers

    def lock(self, repo: Repo) -> asyncio.Lock:
        """Commits through the API take turns: then none is built on a branch that moves under it. Pushes do not wait
        for it; git itself sees to it that none is lost."""
        return self._locks.setdefault(repo.id, asyncio.Lock())

    async def changed(self, repo: Repo, changes: Sequence[RefChange], by: str | None) -> None:
        """Refs have moved."""
        await self.measured(repo, pushed_at=datetime.now(UTC))
        for tell in self.on_push:
            try:
                await tell(repo, changes, by)
            except Exception as error:  # whoever listens cannot undo the push, and must not spoil its answer
                log.error("a push was not told of", repo=repo.id, exc_info=error)

    async def measured(self, repo: Repo, *, pushed_at: datetime | None = None) -> int:
        size_bytes = await asyncio.to_thread(measured_bytes, repo.path, repo.lfs)
        await self._store.note_repo(repo.id, size_bytes=size_bytes, pushed_at=pushed_at)
        return size_bytes

    async def default_branch(self, repo: Repo) -> str:
        return await asyncio.to_thread(head_of, repo.path)


def new_id() -> str:
    return "r" + "".join(secrets.choice(_ALPHABET) for _ in range(19))


def head_of(path: Path) -> str:
    try:
        head = (path / "HEAD").read_text().strip()
    except OSError as error:
        raise HostFailure(f"the repository in {path} cannot be read: {error}") from error
    return head.removeprefix(_HEADS) if head.startswith(_HEADS) else "main"


def checked_name(name: str) -> str:
    """The pattern is the model's; here is what it cannot say."""
    looks_like_id = len(name) == 20 and name[0] == "r" and all(char in _ALPHABET for char in name)
    if looks_like_id or ".." in name or name.endswith((".git", ".lock", ".")) or name in ("archive",):
        raise InvalidRequest(
            f"a repository cannot be called {name!r}: no id, no `..`, and no ending in .git, .lock or a dot",
            field="name",
        )
    return name


def measured_bytes(*paths: Path) -> int:
    total = 0
    for path in paths:
        for directory, _, files in os.walk(path):
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(directory, name)).st_size  # noqa: PTH118
    return total


def _into_place(scratch: Path, path: Path) -> None:
    try:
        scratch.rename(path)
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise HostFailure(f"the repository cannot be moved to {path}: {error}") from error
