"""Commits without a clone: many changes of files, all or none, on the tip of a branch."""

from __future__ import annotations

import asyncio
import base64
import binascii
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forkyard.control.identities import Principal
from forkyard.errors import Conflict, InvalidRequest, RefConflict, RepoFull
from forkyard.git.library import branch_tip, commit_at, opened, read_tree
from forkyard.git.names import NO_SHA, checked_ref
from forkyard.git.objects import EXECUTABLE, FILE, SYMLINK, PackWriter, Signature, commit_data
from forkyard.git.refs import Refs, moved, signed
from forkyard.git.repositories import Repo, Repositories
from forkyard.git.trees import TreeEdit
from forkyard.models.git import CommitCreate, CommitInfo, FileChange, PersonInfo

ATTEMPTS = 5
MAX_LINK_BYTES = 4096


@dataclass(frozen=True)
class _Draft:
    """A commit that is not in the repository yet."""

    sha: str
    tree: str
    old: str  # where the branch was
    parents: list[str]


class Commits:
    def __init__(self, repositories: Repositories, refs: Refs) -> None:
        self._repositories = repositories
        self._refs = refs

    async def create(self, repo: Repo, request: CommitCreate, by: Principal) -> CommitInfo:
        branch = checked_ref(request.branch or await self._repositories.default_branch(repo))
        author = signed(request.author, by)
        committer = signed(request.committer, by) if request.committer is not None else author
        async with self._repositories.lock(repo):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    draft = await self._attempt(repo, request, branch, author, committer, by)
                    break
                except RefConflict:
                    # A push came in between. Who did not say what it expects means: on whatever is there.
                    if request.expected_sha is not None or attempt == ATTEMPTS:
                        raise
        return CommitInfo(
            sha=draft.sha,
            tree=draft.tree,
            parents=draft.parents,
            author=_person(author),
            committer=_person(committer),
            message=request.message,
        )

    async def _attempt(
        self, repo: Repo, request: CommitCreate, branch: str, author: Signature, committer: Signature, by: Principal
    ) -> _Draft:
        with tempfile.TemporaryFile(dir=repo.path) as file:
            pack = PackWriter(file)
            draft = await asyncio.to_thread(_draft, repo.path, pack, request, branch, author, committer)
            async with self._repositories.writing(repo) as room:
                if not room.take(pack.size_bytes):
                    raise full(repo, pack.size_bytes)
                await self._refs.keep(repo.path, file, pack)
                await self._refs.move(repo, f"refs/heads/{branch}", draft.old, draft.sha, by)
        return draft


def _draft(
    path: Path, pack: PackWriter, request: CommitCreate, branch: str, author: Signature, committer: Signature
) -> _Draft:
    with opened(path) as library:
        tip = branch_tip(library, branch)
        if request.expected_sha is not None and request.expected_sha != (tip or NO_SHA):
            raise moved(f"branch {branch!r}", request.expected_sha, tip or NO_SHA)
        parent = tip
        if tip is None and request.start is not None:
            parent = str(commit_at(library, request.start).id)
        base = None if parent is None else str(commit_at(library, parent).tree_id)
        edit = TreeEdit(lambda sha: read_tree(library, sha), base)
        apply(edit, pack, request.files)
        tree = edit.write(pack)
    if tree == base and not request.allow_empty:
        raise Conflict("these changes change nothing; set allow_empty for a commit in any case", branch=branch)
    parents = [] if parent is None else [parent]
    sha = pack.add("commit", commit_data(tree, parents, author, committer, request.message))
    return _Draft(sha, tree, tip or NO_SHA, parents)


def apply(edit: TreeEdit, pack: PackWriter, changes: Sequence[FileChange], *, careful: bool = True) -> None:
    for change in changes:
        _refuse_contradiction(change)
        if change.delete:
            edit.delete(change.path)
            continue
        if change.rename_from is not None:
            edit.rename(change.rename_from, change.path)
        if change.content is not None:
            there = edit.entry(change.path)
            mode = int(change.mode, 8) if change.mode else (there.mode if there and there.mode in _PLAIN else FILE)
            data = _content(change)
            if mode == SYMLINK:
                _refuse_bad_link(change.path, data)
            edit.put(change.path, mode, pack.add("blob", data), careful=careful)
        elif change.mode is not None:
            edit.change_mode(change.path, int(change.mode, 8))


_PLAIN = (FILE, EXECUTABLE)


def _refuse_contradiction(change: FileChange) -> None:
    given = change.content is not None or change.mode is not None or change.rename_from is not None
    if change.delete == given:
        raise InvalidRequest(
            f"the change of {change.path!r} must have delete, or some of content, mode and rename_from",
            path=change.path,
        )


def _content(change: FileChange) -> bytes:
    assert change.content is not None
    try:
        if change.encoding == "base64":
            return base64.b64decode(change.content, validate=True)
        return change.content.encode()
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"the content of {change.path!r} is no {change.encoding}: {error}") from None


def _refuse_bad_link(path: str, target: bytes) -> None:
    if not target or b"\0" in target or b"\n" in target or len(target) > MAX_LINK_BYTES:
        raise InvalidRequest(f"the symlink {path!r} must hold a path, of at most {MAX_LINK_BYTES} bytes", path=path)


def full(repo: Repo, size_bytes: int) -> RepoFull:
    return RepoFull(
        f"{size_bytes} more bytes do not fit: repository {repo.record.name!r} holds {repo.record.size_bytes} of "
        f"{repo.record.quota_bytes} bytes; raise its quota, or keep large files elsewhere",
        size_bytes=repo.record.size_bytes,
        quota_bytes=repo.record.quota_bytes,
    )


def _person(signature: Signature) -> PersonInfo:
    return PersonInfo(name=signature.name, email=signature.email, date=signature.date.replace(microsecond=0))
