"""What `sandbox.git` gives back, and how git's output becomes that. Pure: all input is a guest's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from forkyard.errors import GitFailed

Change = Literal["added", "modified", "deleted", "renamed", "copied", "type_changed", "unmerged", "untracked"]
_CHANGES: dict[str, Change] = {
    "A": "added",
    "M": "modified",
    "D": "deleted",
    "R": "renamed",
    "C": "copied",
    "T": "type_changed",
    "U": "unmerged",
}
LOG_FIELDS = ("%H", "%P", "%an", "%ae", "%aI", "%cn", "%ce", "%cI", "%B")
LOG_FORMAT = "--format=tformat:" + "%x00".join(LOG_FIELDS)
BRANCH_FORMAT = "--format=%(refname:lstrip=2)%00%(objectname)%00%(HEAD)%00%(upstream:short)"


@dataclass(frozen=True)
class StatusEntry:
    """One path that is not as in the last commit."""

    path: str
    staged: Change | None = None
    """What the next commit does to it."""
    unstaged: Change | None = None
    """What is different in the working tree from that; `untracked` if git does not know the path."""
    previous_path: str | None = None

    @property
    def conflicted(self) -> bool:
        return "unmerged" in (self.staged, self.unstaged)


@dataclass(frozen=True)
class WorktreeStatus:
    branch: str | None
    """None: no branch is checked out, but a commit."""
    sha: str | None
    """None: there is no commit yet."""
    upstream: str | None
    ahead: int
    behind: int
    files: tuple[StatusEntry, ...]

    @property
    def clean(self) -> bool:
        return not self.files

    @property
    def conflicts(self) -> list[str]:
        return [entry.path for entry in self.files if entry.conflicted]


@dataclass(frozen=True)
class WorktreeCommit:
    sha: str
    parents: tuple[str, ...]
    author_name: str
    author_email: str
    authored_at: datetime
    committer_name: str
    committer_email: str
    committed_at: datetime
    message: str


@dataclass(frozen=True)
class WorktreeBranch:
    name: str
    sha: str
    current: bool
    upstream: str | None


@dataclass(frozen=True)
class ChangedFile:
    path: str
    change: Change
    additions: int | None
    """None of a binary file."""
    deletions: int | None
    previous_path: str | None = None


@dataclass(frozen=True)
class WorktreeDiff:
    files: tuple[ChangedFile, ...]
    patch: str

    @property
    def additions(self) -> int:
        return sum(file.additions or 0 for file in self.files)

    @property
    def deletions(self) -> int:
        return sum(file.deletions or 0 for file in self.files)


@dataclass(frozen=True)
class PushedRef:
    ref: str
    outcome: Literal["created", "updated", "forced", "deleted", "up_to_date", "rejected"]
    summary: str


@dataclass(frozen=True)
class PullResult:
    before: str | None
    after: str

    @property
    def changed(self) -> bool:
        return self.before != self.after


_OUTCOMES: dict[str, Literal["created", "updated", "forced", "deleted", "up_to_date", "rejected"]] = {
    " ": "updated",
    "+": "forced",
    "-": "deleted",
    "*": "created",
    "=": "up_to_date",
    "!": "rejected",
}


def status(output: bytes) -> WorktreeStatus:
    """Of `git status --porcelain=v2 --branch -z`."""
    heads: dict[str, str] = {}
    files: list[StatusEntry] = []
    pieces = _pieces(output)
    for piece in pieces:
        kind, _, rest = piece.partition(" ")
        if kind == "#":
            name, _, value = rest.partition(" ")
            heads[name] = value
        elif kind == "1":
            files.append(_entry(_fields(rest, 8)))
        elif kind == "2":
            files.append(_entry(_fields(rest, 9), next(pieces, None)))
        elif kind == "u":
            files.append(StatusEntry(_fields(rest, 10)[-1], "unmerged", "unmerged"))
        elif kind == "?":
            files.append(StatusEntry(rest, None, "untracked"))
        elif kind != "!":
            raise _strange(piece)
    ahead, behind = _counts(heads.get("branch.ab"))
    branch, sha = heads.get("branch.head"), heads.get("branch.oid")
    return WorktreeStatus(
        branch=None if branch == "(detached)" else branch,
        sha=None if sha == "(initial)" else sha,
        upstream=heads.get("branch.upstream"),
        ahead=ahead,
        behind=behind,
        files=tuple(files),
    )


def log(output: bytes) -> list[WorktreeCommit]:
    """Of `git log -z` with `LOG_FORMAT`."""
    pieces = list(_pieces(output))
    if len(pieces) % len(LOG_FIELDS):
        raise _strange(pieces[-1])
    found = []
    for at in range(0, len(pieces), len(LOG_FIELDS)):
        sha, parents, author, email, authored, committer, committer_email, committed, message = pieces[
            at : at + len(LOG_FIELDS)
        ]
        found.append(
            WorktreeCommit(
                sha=sha,
                parents=tuple(parents.split()),
                author_name=author,
                author_email=email,
                authored_at=_time(authored),
                committer_name=committer,
                committer_email=committer_email,
                committed_at=_time(committed),
                message=message,
            )
        )
    return found


def branches(output: bytes) -> list[WorktreeBranch]:
    """Of `git for-each-ref` with `BRANCH_FORMAT`."""
    found = []
    for line in _text(output).splitlines():
        fields = line.split("\0")
        if len(fields) != 4:
            raise _strange(line)
        found.append(WorktreeBranch(fields[0], fields[1], fields[2] == "*", fields[3] or None))
    return found


def changed_files(output: bytes) -> tuple[ChangedFile, ...]:
    """Of `git diff -z --raw --numstat`: first a record per file of one kind, then of the other, in the same order."""
    kinds: list[tuple[Change, str, str | None]] = []
    counts: list[tuple[int | None, int | None]] = []
    pieces = _pieces(output)
    for piece in pieces:
        if piece.startswith(":"):
            letter = piece.rsplit(" ", 1)[-1][:1]
            change = _CHANGES.get(letter)
            path = next(pieces, None)
            if change is None or path is None:
                raise _strange(piece)
            previous = None
            if letter in "RC":
                previous, path = path, next(pieces, None)
                if path is None:
                    raise _strange(piece)
            kinds.append((change, path, previous))
        else:
            fields = piece.split("\t", 2)
            if len(fields) != 3:
                raise _strange(piece)
            if not fields[2]:  # a rename: both names follow
                next(pieces, None)
                next(pieces, None)
            counts.append((_number(fields[0]), _number(fields[1])))
    if len(counts) > len(kinds):
        raise _strange("more counts than files")
    # Of what is not merged git counts no lines.
    counts += [(None, None)] * (len(kinds) - len(counts))
    return tuple(
        ChangedFile(path, change, added, deleted, previous)
        for (change, path, previous), (added, deleted) in zip(kinds, counts, strict=True)
    )


def pushed(output: bytes) -> list[PushedRef]:
    """Of `git push --porcelain`."""
    found = []
    for line in _text(output).splitlines():
        fields = line.split("\t")
        if len(fields) == 3 and fields[0] in _OUTCOMES:
            found.append(PushedRef(fields[1].partition(":")[2], _OUTCOMES[fields[0]], fields[2]))
    return found


def _entry(fields: list[str], previous: str | None = None) -> StatusEntry:
    staged, unstaged = fields[0][:1], fields[0][1:2]
    return StatusEntry(fields[-1], _CHANGES.get(staged), _CHANGES.get(unstaged), previous)


def _fields(text: str, count: int) -> list[str]:
    """The last is a path, which may have spaces in it."""
    found = text.split(" ", count - 1)
    if len(found) != count:
        raise _strange(text)
    return found


def _counts(text: str | None) -> tuple[int, int]:
    parts = (text or "+0 -0").split()
    if len(parts) != 2 or not all(part[1:].isdecimal() for part in parts):
        raise _strange(text or "")
    return int(parts[0][1:]), int(parts[1][1:])


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise _strange(text) from None


def _pieces(output: bytes) -> Iterator[str]:
    text = _text(output)
    return iter(text.removesuffix("\0").split("\0") if text else ())


def _text(output: bytes) -> str:
    """Paths need not be UTF-8; such bytes survive a round trip through `os.fsencode`."""
    return output.decode("utf-8", "surrogateescape")


def _strange(what: str) -> GitFailed:
    return GitFailed(f"git in the sandbox answered with something that git does not say: {what[:200]!r}")
