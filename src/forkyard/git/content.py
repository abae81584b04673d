"""What is in a repository at a revision: files, directories, trees, blobs, archives. Never follows a symlink."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import pygit2

from forkyard.errors import HostFailure, InvalidRequest, OperationTimeout, RevisionNotFound
from forkyard.git.library import commit_at, opened, read_tree, resolved
from forkyard.git.names import checked_path, is_sha
from forkyard.git.objects import DIRECTORY, SUBMODULE, SYMLINK, Entry
from forkyard.git.repositories import Repo, Repositories
from forkyard.models.git import BlobInfo, ContentInfo, EntryType, TreeEntry, TreeInfo

#: Files over this are not sent inside JSON.
MAX_INLINE_BYTES = 16 * 2**20
MAX_ENTRIES = 50_000
ARCHIVE_IDLE_S = 120.0
_CHUNK_BYTES = 2**18
_TYPES: dict[int, EntryType] = {DIRECTORY: "directory", SYMLINK: "symlink", SUBMODULE: "submodule"}


class Content:
    def __init__(self, repositories: Repositories) -> None:
        self._repositories = repositories
        self._git = repositories.git

    async def get(self, repo: Repo, path: str, rev: str | None) -> ContentInfo:
        """A file or a directory; the empty path is the top."""
        rev = rev or await self._repositories.default_branch(repo)

        def work() -> ContentInfo:
            with opened(repo.path) as library:
                commit = commit_at(library, rev)
                entry = _entry_at(library, str(commit.tree_id), path)
                described = _described(library, path, entry)
                content, entries = None, None
                if entry.mode == DIRECTORY:
                    entries = list(_listed(library, entry.sha, path))
                elif described.size is not None and described.size <= MAX_INLINE_BYTES:
                    content = base64.b64encode(library[entry.sha].read_raw()).decode()
                fields = described.model_dump()
                return ContentInfo(**fields, content=content, entries=entries, commit=str(commit.id))

        return await asyncio.to_thread(work)

    async def raw(self, repo: Repo, path: str, rev: str | None) -> tuple[str, int]:
        """Id and size of the file at `path`."""
        rev = rev or await self._repositories.default_branch(repo)

        def work() -> tuple[str, int]:
            with opened(repo.path) as library:
                entry = _entry_at(library, str(commit_at(library, rev).tree_id), path)
                size = _size(library, entry)
                if size is None:
                    raise InvalidRequest(f"{path!r} is no file", path=path)
                return entry.sha, size

        return await asyncio.to_thread(work)

    async def tree(self, repo: Repo, rev: str, *, recursive: bool) -> TreeInfo:
        """Of a commit, or by its own id."""

        def work() -> TreeInfo:
            with opened(repo.path) as library:
                try:
                    found = resolved(library, rev).peel(pygit2.Tree)
                except (pygit2.GitError, pygit2.InvalidSpecError, ValueError):
                    raise RevisionNotFound(f"{rev!r} is no tree", rev=rev) from None
                entries: list[TreeEntry] = []
                for entry in _listed(library, str(found.id), "", recursive=recursive):
                    if len(entries) == MAX_ENTRIES:
                        return TreeInfo(sha=str(found.id), entries=entries, truncated=True)
                    entries.append(entry)
                return TreeInfo(sha=str(found.id), entries=entries)

        return await asyncio.to_thread(work)

    async def blob(self, repo: Repo, sha: str) -> BlobInfo:
        def work() -> BlobInfo:
            with opened(repo.path) as library:
                found = resolved(library, sha) if is_sha(sha) else None
                if not isinstance(found, pygit2.Blob):
                    raise RevisionNotFound(f"there is no blob {sha!r}; give its whole id", sha=sha)
                if found.size > MAX_INLINE_BYTES:
                    raise InvalidRequest(f"blob {sha} has {found.size} bytes; download it as raw contents instead")
                data = found.read_raw()
                return BlobInfo(sha=sha, size=len(data), content=base64.b64encode(data).decode())

        return await asyncio.to_thread(work)

    @contextlib.asynccontextmanager
    async def stream_blob(self, repo: Repo, sha: str) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._stream(repo, "cat-file", "blob", sha) as chunks:
            yield chunks

    @contextlib.asynccontextmanager
    async def archive(
        self, repo: Repo, rev: str | None, kind: Literal["tar", "tar.gz", "zip"], path: str | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        rev = rev or await self._repositories.default_branch(repo)

        def work() -> str:
            with opened(repo.path) as library:
                commit = commit_at(library, rev)
                if path and _entry_at(library, str(commit.tree_id), path).mode != DIRECTORY:
                    raise InvalidRequest(f"{path!r} is no directory", path=path)
                return str(commit.id)

        sha = await asyncio.to_thread(work)
        tree = f"{sha}:{path}" if path else sha
        args = ("archive", f"--format={kind}", f"--prefix={repo.record.name}-{sha[:12]}/", tree)
        async with self._stream(repo, *args) as chunks:
            yield chunks

    @contextlib.asynccontextmanager
    async def _stream(self, repo: Repo, *args: str) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._git.process(repo.path, *args) as process:

            async def chunks() -> AsyncIterator[bytes]:
                assert process.stdout is not None
                try:
                    while True:
                        async with asyncio.timeout(ARCHIVE_IDLE_S):
                            chunk = await process.stdout.read(_CHUNK_BYTES)
                        if not chunk:
                            break
                        yield chunk
                except TimeoutError:
                    raise OperationTimeout(f"git {args[0]} gave nothing for {ARCHIVE_IDLE_S:.0f} s") from None
                if await process.wait():
                    raise HostFailure(f"git {args[0]} failed")

            yield chunks()


def _entry_at(library: pygit2.Repository, tree: str, path: str) -> Entry:
    entry = Entry(DIRECTORY, tree)
    if not path:
        return entry
    for part in checked_path(path).split("/"):
        below = read_tree(library, entry.sha).get(part) if entry.mode == DIRECTORY else None
        if below is None:
            raise RevisionNotFound(f"there is no {path!r} at this revision", path=path)
        entry = below
    return entry


def _listed(library: pygit2.Repository, tree: str, path: str, *, recursive: bool = False) -> Iterator[TreeEntry]:
    for name, entry in read_tree(library, tree).items():
        below = f"{path}/{name}" if path else name
        yield _described(library, below, entry)
        if recursive and entry.mode == DIRECTORY:
            yield from _listed(library, entry.sha, below, recursive=True)


def _described(library: pygit2.Repository, path: str, entry: Entry) -> TreeEntry:
    return TreeEntry(
        name=path.rpartition("/")[2],
        path=path,
        type=_TYPES.get(entry.mode, "file"),
        mode=f"{entry.mode:06o}",
        sha=entry.sha,
        size=_size(library, entry),
    )


def _size(library: pygit2.Repository, entry: Entry) -> int | None:
    if entry.mode in (DIRECTORY, SUBMODULE):
        return None
    size: int = library.odb.read_header(pygit2.Oid(hex=entry.sha))[1]
    return size
