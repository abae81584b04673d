"""libgit2, for quick reads of objects that are on this disk anyway: resolving, trees, blobs, commits. Blocking.

Git itself (`process.py`) does what takes long, and so must have a deadline, and what changes refs, but for the one change
that every commit makes: a branch moves on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pygit2
from pygit2.enums import ConfigLevel, ObjectType, RepositoryOpenFlag

from forkyard.errors import HostFailure, RevisionNotFound
from forkyard.git.names import checked_revision, has_steps, is_sha
from forkyard.git.objects import Entry, tree_entries
from forkyard.models.git import CommitInfo, PersonInfo

pygit2.settings.owner_validation = False
pygit2.settings.enable_fsync_gitdir(True)
for _level in (ConfigLevel.SYSTEM, ConfigLevel.XDG, ConfigLevel.GLOBAL):
    pygit2.settings.search_path[_level] = ""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[pygit2.Repository]:
    try:
        repo = pygit2.Repository(str(path), RepositoryOpenFlag.BARE | RepositoryOpenFlag.NO_SEARCH)
    except pygit2.GitError as error:
        raise HostFailure(f"the repository in {path} cannot be opened: {error}") from error
    try:
        yield repo
    except pygit2.GitError as error:
        raise HostFailure(f"the repository in {path} cannot be read: {error}") from error
    finally:
        repo.free()


def resolved(repo: pygit2.Repository, rev: str) -> pygit2.Object:
    """A branch, then a tag, then whatever git takes it for."""
    checked_revision(rev)
    with contextlib.suppress(KeyError, ValueError, pygit2.GitError):
        if is_sha(rev):
            return repo[rev]
        for namespace in () if has_steps(rev) else ("refs/heads/", "refs/tags/"):
            reference = repo.references.get(namespace + rev)
            if reference is not None:
                return repo[reference.resolve().target]
        return repo.revparse_single(rev)
    raise RevisionNotFound(f"this repository has no branch, tag or commit {rev!r}", rev=rev)


def commit_at(repo: pygit2.Repository, rev: str) -> pygit2.Commit:
    with contextlib.suppress(ValueError, pygit2.GitError, pygit2.InvalidSpecError):
        found = resolved(repo, rev).peel(pygit2.Commit)
        assert isinstance(found, pygit2.Commit)
        return found
    raise RevisionNotFound(f"{rev!r} is no commit", rev=rev)


def branch_tip(repo: pygit2.Repository, branch: str) -> str | None:
    reference = repo.references.get(f"refs/heads/{branch}")
    return None if reference is None else str(reference.resolve().target)


def swapped(path: Path, ref: str, old: str, new: str) -> bool:
    """Move a branch that is at `old` to the commit `new`, under git's own lock and durably. False: it is not so simple (made,
    removed, elsewhere, locked), nothing was done, and git has to say."""
    with opened(path) as repo, contextlib.suppress(_NotSimple, KeyError, ValueError, pygit2.GitError):
        if not ref.startswith("refs/heads/") or not isinstance(repo.get(new), pygit2.Commit):
            return False
        with repo.transaction() as change:
            change.lock_ref(ref)
            if repo.references[ref].raw_target != pygit2.Oid(hex=old):
                raise _NotSimple
            change.set_target(ref, new)
        return True
    return False


class _NotSimple(Exception):
    """Leaves a transaction without a change."""


def read_tree(repo: pygit2.Repository, sha: str) -> dict[str, Entry]:
    kind, data = repo.odb.read(pygit2.Oid(hex=sha))
    if kind != ObjectType.TREE:
        raise RevisionNotFound(f"{sha} is no tree", sha=sha)
    return tree_entries(data)


def text(data: bytes) -> str:
    """Commits may hold anything; what is no UTF-8 is shown as such."""
    return data.decode("utf-8", "replace")


def commit_info(commit: pygit2.Commit) -> CommitInfo:
    return CommitInfo(
        sha=str(commit.id),
        tree=str(commit.tree_id),
        parents=[str(parent) for parent in commit.parent_ids],
        author=person_info(commit.author),
        committer=person_info(commit.committer),
        message=text(commit.raw_message),
    )


def person_info(person: pygit2.Signature) -> PersonInfo:
    return PersonInfo(name=text(person.raw_name), email=text(person.raw_email), date=_date(person.time, person.offset))


def _date(seconds: int, offset_minutes: int) -> datetime:
    """Any number may stand in a commit, also one that is no date."""
    try:
        zone = timezone(timedelta(minutes=offset_minutes)) if offset_minutes else UTC
        return datetime.fromtimestamp(seconds, zone)
    except (ValueError, OverflowError, OSError):
        return datetime(1970, 1, 1, tzinfo=UTC)
