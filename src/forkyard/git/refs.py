"""Branches and tags: listed, made, moved, removed. Every change names the value it starts from, so that of two who change
the same ref one is told."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import IO

import pygit2

from forkyard.control.identities import Principal
from forkyard.errors import Conflict, HostFailure, InvalidRequest, RefConflict, RevisionNotFound
from forkyard.git.library import branch_tip, commit_at, opened, person_info, resolved, swapped, text
from forkyard.git.names import NO_SHA, checked_ref
from forkyard.git.objects import PackWriter, Signature, signature, tag_data
from forkyard.git.repositories import RefChange, Repo, Repositories, head_of
from forkyard.models.git import BranchCreate, BranchInfo, BranchUpdate, Person, TagCreate, TagInfo

MAX_REFS = 10_000
_KINDS = {pygit2.Commit: "commit", pygit2.Tree: "tree", pygit2.Blob: "blob", pygit2.Tag: "tag"}


class Refs:
    def __init__(self, repositories: Repositories) -> None:
        self._repositories = repositories
        self._git = repositories.git

    # ── branches ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def branches(self, repo: Repo) -> list[BranchInfo]:
        def work() -> list[BranchInfo]:
            default = head_of(repo.path)
            with opened(repo.path) as library:
                return [
                    BranchInfo(
                        name=name, sha=str(library.references[f"refs/heads/{name}"].target), default=name == default
                    )
                    for name in sorted(library.branches.local)[:MAX_REFS]
                ]

        return await asyncio.to_thread(work)

    async def branch(self, repo: Repo, name: str) -> BranchInfo:
        def work() -> BranchInfo:
            with opened(repo.path) as library:
                sha = branch_tip(library, checked_ref(name))
            if sha is None:
                raise RevisionNotFound(f"this repository has no branch {name!r}", branch=name)
            return BranchInfo(name=name, sha=sha, default=name == head_of(repo.path))

        return await asyncio.to_thread(work)

    async def create_branch(self, repo: Repo, request: BranchCreate, by: Principal) -> BranchInfo:
        name = checked_ref(request.name)
        sha = await self.commit_sha(repo, request.rev or await self._repositories.default_branch(repo))
        await self.move(repo, f"refs/heads/{name}", NO_SHA, sha, by)
        return await self.branch(repo, name)

    async def update_branch(self, repo: Repo, name: str, request: BranchUpdate, by: Principal) -> BranchInfo:
        old = (await self.branch(repo, name)).sha
        if request.expected_sha not in (None, old):
            raise moved(f"branch {name!r}", request.expected_sha or "", old)
        new = await self.commit_sha(repo, request.rev)
        if not request.force and new != old:
            done = await self._git.run(repo.path, "merge-base", "--is-ancestor", old, new, ok=(0, 1))
            if done.code:
                raise Conflict(
                    f"branch {name!r} would lose commits by going from {old} to {new}; set force if that is meant"
                )
        await self.move(repo, f"refs/heads/{name}", old, new, by)
        return await self.branch(repo, name)

    async def delete_branch(self, repo: Repo, name: str, by: Principal) -> None:
        found = await self.branch(repo, name)
        if found.default:
            raise Conflict(f"{name!r} is the default branch; make another the default before you delete it")
        await self.move(repo, f"refs/heads/{name}", found.sha, NO_SHA, by)

    # ── tags ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def tags(self, repo: Repo) -> list[TagInfo]:
        def work() -> list[TagInfo]:
            with opened(repo.path) as library:
                names = sorted(name for name in library.references if name.startswith("refs/tags/"))[:MAX_REFS]
                return [_tag(library, name.removeprefix("refs/tags/")) for name in names]

        return await asyncio.to_thread(work)

    async def tag(self, repo: Repo, name: str) -> TagInfo:
        def work() -> TagInfo:
            with opened(repo.path) as library:
                return _tag(library, checked_ref(name, "tag"))

        return await asyncio.to_thread(work)

    async def create_tag(self, repo: Repo, request: TagCreate, by: Principal) -> TagInfo:
        name = checked_ref(request.name, "tag")
        rev = request.rev or await self._repositories.default_branch(repo)

        def target() -> tuple[str, str]:
            with opened(repo.path) as library:
                found = resolved(library, rev)
                return str(found.id), _KINDS[type(found)]

        sha, kind = await asyncio.to_thread(target)
        if request.message is not None:
            tagger = signed(request.tagger, by)
            data = tag_data(sha, kind, name, tagger, request.message)  # type: ignore[arg-type]
            with tempfile.TemporaryFile(dir=repo.path) as file:
                pack = PackWriter(file)
                sha = pack.add("tag", data)
                await self.keep(repo.path, file, pack)
        await self.move(repo, f"refs/tags/{name}", NO_SHA, sha, by)
        return await self.tag(repo, name)

    async def delete_tag(self, repo: Repo, name: str, by: Principal) -> None:
        await self.move(repo, f"refs/tags/{name}", (await self.tag(repo, name)).sha, NO_SHA, by)

    async def shas(self, repo: Repo) -> dict[str, str]:
        """Where every branch and tag is, by its full name."""
        done = await self._git.run(
            repo.path, "for-each-ref", "--format=%(objectname) %(refname)", "refs/heads", "refs/tags"
        )
        lines = done.stdout.decode("utf-8", "replace").splitlines()
        return {ref: sha for sha, _, ref in (line.partition(" ") for line in lines)}

    # ── what both, and commits, stand on ─────────────────────────────────────────────────────────────────────────

    async def commit_sha(self, repo: Repo, rev: str) -> str:
        def work() -> str:
            with opened(repo.path) as library:
                return str(commit_at(library, rev).id)

        return await asyncio.to_thread(work)

    async def keep(self, path: Path, file: IO[bytes], pack: PackWriter) -> None:
        """New objects become part of the repository, checked and on disk. Nothing refers to them yet."""
        await asyncio.to_thread(pack.finish)
        try:
            await self._git.run(path, "index-pack", "--stdin", "--strict", stdin=file, timeout_s=600)
        except HostFailure as error:
            raise InvalidRequest(f"git refuses what shall be written: {error.message}") from error

    async def move(self, repo: Repo, ref: str, old: str, new: str, by: Principal) -> None:
        """`RefConflict` if it is not at `old` (any more)."""
        if old == new:
            return
        args = ("-d", ref, old) if new == NO_SHA else (ref, new, old)
        async with self._repositories.writing(repo):
            if not await asyncio.to_thread(swapped, repo.path, ref, old, new):
                done = await self._git.run(repo.path, "update-ref", *args, ok=(0, 1, 128))
                if done.code:
                    raise await asyncio.to_thread(_why_not_moved, repo.path, ref, old, done.error)
        await self._repositories.changed(repo, [RefChange(ref, old, new)], by.id)


def _why_not_moved(path: Path, ref: str, old: str, error: str) -> Conflict:
    with opened(path) as library:
        reference = library.references.get(ref)
        now = NO_SHA if reference is None else str(reference.resolve().target)
    if now != old:
        return moved(ref, old, now)
    return RefConflict(
        f"{ref} cannot be written: {error.splitlines()[-1] if error else 'git did not say why'}", ref=ref
    )


def moved(what: str, expected: str, now: str) -> RefConflict:
    if now == NO_SHA:
        return RefConflict(f"{what} does not exist; it was expected at {expected}", expected_sha=expected, sha=None)
    if expected == NO_SHA:
        return RefConflict(f"{what} exists already, at {now}", expected_sha=None, sha=now)
    return RefConflict(f"{what} is at {now}, not at {expected}; look again, then retry", expected_sha=expected, sha=now)


def signed(person: Person | None, by: Principal) -> Signature:
    if person is None:
        return signature("Forkyard" if by.admin else by.name, f"{by.id}@forkyard.invalid")
    if person.date is not None and not 0 <= person.date.timestamp() < 2**33:
        raise InvalidRequest(f"{person.date} cannot be the date of a commit", field="date")
    return signature(person.name, person.email, person.date)


def _tag(library: pygit2.Repository, name: str) -> TagInfo:
    reference = library.references.get(f"refs/tags/{name}")
    if reference is None:
        raise RevisionNotFound(f"this repository has no tag {name!r}", tag=name)
    found = library[reference.resolve().target]
    if not isinstance(found, pygit2.Tag):
        return TagInfo(name=name, sha=str(found.id), target=str(found.id))
    return TagInfo(
        name=name,
        sha=str(found.id),
        target=str(found.target),
        message=text(found.raw_message),
        tagger=None if found.tagger is None else person_info(found.tagger),
    )
