"""Merges and cherry-picks without a working tree. A conflict changes nothing and names every path it is about."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from forkyard.control.identities import Principal
from forkyard.errors import Conflict, InvalidRequest, MergeConflict, RefConflict
from forkyard.git.library import commit_at, opened, person_info
from forkyard.git.names import checked_ref
from forkyard.git.objects import PackWriter, Signature, commit_data
from forkyard.git.refs import Refs, moved, signed
from forkyard.git.repositories import Repo, Repositories
from forkyard.models.git import CherryPick, Merge, MergeResult

MERGE_S = 60.0
ATTEMPTS = 5


class Merging:
    def __init__(self, repositories: Repositories, refs: Refs) -> None:
        self._repositories = repositories
        self._refs = refs
        self._git = repositories.git

    async def merge(self, repo: Repo, request: Merge, by: Principal) -> MergeResult:
        branch = checked_ref(request.into or await self._repositories.default_branch(repo))
        async with self._repositories.lock(repo):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    return await self._merge(repo, branch, request, by)
                except RefConflict:
                    if request.expected_sha is not None or attempt == ATTEMPTS:
                        raise
        raise AssertionError("unreachable")

    async def _merge(self, repo: Repo, branch: str, request: Merge, by: Principal) -> MergeResult:
        ours = await self._tip(repo, branch, request.expected_sha)
        theirs = await self._refs.commit_sha(repo, request.source)
        base = await self._git.run(repo.path, "merge-base", ours, theirs, ok=(0, 1))
        bases = base.stdout.decode().split()
        if theirs in bases:
            return MergeResult(branch=branch, sha=ours, previous_sha=ours)
        ahead = ours in bases
        if request.fast_forward == "only" and not ahead:
            raise Conflict(
                f"branch {branch!r} cannot be fast-forwarded to {request.source!r}: it has commits of its own"
            )
        if ahead and not request.squash and request.fast_forward != "never":
            await self._refs.move(repo, f"refs/heads/{branch}", ours, theirs, by)
            return MergeResult(branch=branch, sha=theirs, previous_sha=ours, fast_forward=True)
        tree = await self._merged_tree(repo, ours, theirs, request.source)
        verb = "Squash" if request.squash else "Merge"
        message = request.message or f"{verb} {request.source} into {branch}"
        parents = [ours] if request.squash else [ours, theirs]
        who = signed(request.author, by)
        sha = await self._commit(repo.path, tree, parents, who, who, message)
        await self._refs.move(repo, f"refs/heads/{branch}", ours, sha, by)
        return MergeResult(branch=branch, sha=sha, previous_sha=ours, commits=[sha])

    async def _merged_tree(self, repo: Repo, ours: str, theirs: str, source: str) -> str:
        """`git merge-tree` prints the tree, then (mode, id, stage, path) of what is in conflict, then why."""
        async with self._repositories.writing(repo):
            done = await self._git.run(
                repo.path,
                "merge-tree", "--write-tree", "-z", "--messages", "--allow-unrelated-histories", ours, theirs,
                ok=(0, 1),
                timeout_s=MERGE_S,
            )  # fmt: skip
        tree, _, rest = done.stdout.decode("utf-8", "replace").partition("\0")
        if done.code == 0:
            return tree
        entries, _, messages = rest.partition("\0\0")
        paths = sorted({entry.partition("\t")[2] for entry in entries.split("\0") if "\t" in entry})
        raise conflict(f"{source!r} cannot be merged", paths, _reasons(messages))

    async def cherry_pick(self, repo: Repo, request: CherryPick, by: Principal) -> MergeResult:
        branch = checked_ref(request.branch or await self._repositories.default_branch(repo))
        async with self._repositories.lock(repo):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    return await self._pick(repo, branch, request, by)
                except RefConflict:
                    if request.expected_sha is not None or attempt == ATTEMPTS:
                        raise
        raise AssertionError("unreachable")

    async def _pick(self, repo: Repo, branch: str, request: CherryPick, by: Principal) -> MergeResult:
        start = await self._tip(repo, branch, request.expected_sha)
        made: list[str] = []
        tip = start
        async with self._repositories.writing(repo):
            for rev in request.commits:
                tree, author, message = await asyncio.to_thread(_picked, repo.path, tip, rev)
                tip = await self._commit(repo.path, tree, [tip], author, signed(request.committer, by), message)
                made.append(tip)
        await self._refs.move(repo, f"refs/heads/{branch}", start, tip, by)
        return MergeResult(branch=branch, sha=tip, previous_sha=start, commits=made)

    async def _tip(self, repo: Repo, branch: str, expected: str | None) -> str:
        sha = (await self._refs.branch(repo, branch)).sha
        if expected is not None and expected != sha:
            raise moved(f"branch {branch!r}", expected, sha)
        return sha

    async def _commit(
        self, path: Path, tree: str, parents: list[str], author: Signature, committer: Signature, message: str
    ) -> str:
        with tempfile.TemporaryFile(dir=path) as file:
            pack = PackWriter(file)
            sha = pack.add("commit", commit_data(tree, parents, author, committer, message))
            await self._refs.keep(path, file, pack)
        return sha


def _picked(path: Path, tip: str, rev: str) -> tuple[str, Signature, str]:
    """The tree of `tip` with the change of `rev` on it."""
    with opened(path) as library:
        commit = commit_at(library, rev)
        if len(commit.parent_ids) > 1:
            raise InvalidRequest(f"{rev!r} is a merge; pick the commits it merged", rev=rev)
        # A first commit changes nothing into its tree.
        before = commit.parents[0].tree.id if commit.parent_ids else library.TreeBuilder().write()
        ours = commit_at(library, tip).tree
        index = library.merge_trees(before, ours, commit.tree)
        if index.conflicts:
            paths = {side.path for sides in index.conflicts for side in sides if side is not None}
            raise conflict(f"commit {commit.id} cannot be picked", sorted(paths), [])
        tree = index.write_tree(library)
        if tree == ours.id:
            raise Conflict(f"commit {commit.id} changes nothing here; it may have been picked before", rev=rev)
        person = person_info(commit.author)
        message = commit.raw_message.decode("utf-8", "replace")
        return str(tree), Signature(person.name, person.email, person.date), message


def conflict(what: str, paths: list[str], reasons: list[str]) -> MergeConflict:
    shown = ", ".join(paths[:10]) + (" …" if len(paths) > 10 else "")
    return MergeConflict(f"{what}: conflicts in {shown or 'the history'}", paths=paths, reasons=reasons)


def _reasons(messages: str) -> list[str]:
    """Each: a number of paths, these paths, a kind, a sentence."""
    pieces = messages.split("\0")
    found, at = [], 0
    while at < len(pieces) and pieces[at].isdigit():
        count = int(pieces[at])
        sentence = pieces[at + count + 2] if at + count + 2 < len(pieces) else ""
        if sentence.startswith("CONFLICT"):
            found.append(sentence.strip())
        at += count + 3
    return found
