"""Commits as they are: one, many with filters, and what lies between two. By git itself, which has a deadline."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from forkyard.errors import InvalidRequest
from forkyard.git.library import commit_at, commit_info, opened
from forkyard.git.names import checked_path, checked_sha
from forkyard.git.objects import EMPTY_TREE
from forkyard.git.repositories import Repo, Repositories
from forkyard.models import Page
from forkyard.models.git import CommitInfo, Comparison, FileDiff, PersonInfo

MAX_COMMITS = 250
MAX_FILES = 3000
MAX_PATCH_BYTES = 8 * 2**20
MAX_FILE_PATCH_BYTES = 2**20
FIELDS = ("%H", "%T", "%P", "%an", "%ae", "%at %aI", "%cn", "%ce", "%ct %cI", "%B")
#: Records end with a NUL (-z), fields too, so a record is as many pieces as there are fields.
FORMAT = "--format=tformat:" + "%x00".join(FIELDS)
_CURSOR = re.compile(r"([0-9a-f]{40})\.([0-9]{1,9})")
_STATUS: dict[str, Literal["added", "deleted", "modified", "renamed", "copied", "type_changed"]] = {
    "A": "added",
    "D": "deleted",
    "M": "modified",
    "R": "renamed",
    "C": "copied",
    "T": "type_changed",
}


@dataclass(frozen=True)
class LogFilter:
    path: str | None = None
    author: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    order: Literal["desc", "asc"] = "desc"
    behind: str | None = None  # a commit's id: neither it nor what it rests on

    def args(self) -> list[str]:
        found = []
        if self.author is not None:
            found += ["--fixed-strings", "--regexp-ignore-case", f"--author={_line(self.author)}"]
        if self.since is not None:
            found.append(f"--since={_stamp(self.since)}")
        if self.until is not None:
            found.append(f"--until={_stamp(self.until)}")
        if self.order == "asc":
            found.append("--reverse")
        if self.behind is not None:
            found.append(f"^{checked_sha(self.behind)}")
        return found


class History:
    def __init__(self, repositories: Repositories) -> None:
        self._repositories = repositories
        self._git = repositories.git

    async def commit(self, repo: Repo, rev: str) -> CommitInfo:
        def work() -> CommitInfo:
            with opened(repo.path) as library:
                return commit_info(commit_at(library, rev))

        return await asyncio.to_thread(work)

    async def log(
        self, repo: Repo, rev: str | None, wanted: LogFilter, *, limit: int, cursor: str | None
    ) -> Page[CommitInfo]:
        """A cursor holds the commit the list began at, so that pages do not shift when others push."""
        skip = 0
        if cursor is not None:
            place = _CURSOR.fullmatch(cursor)
            if place is None:
                raise InvalidRequest(f"{cursor!r} is no cursor; use `next_cursor` of the page before, or none")
            start, skip = place[1], int(place[2])
            await self.commit(repo, start)
        else:
            start = (await self.commit(repo, rev or await self._repositories.default_branch(repo))).sha
        # With --reverse git would take the first n and turn those round: then the page is cut here.
        numbers = [] if wanted.order == "asc" else [f"--skip={skip}", f"--max-count={limit + 1}"]
        paths = ["--", f":(literal){checked_path(wanted.path)}"] if wanted.path else ["--"]
        found = await self._log(repo, *wanted.args(), *numbers, start, *paths)
        if wanted.order == "asc":
            found = found[skip : skip + limit + 1]
        more = f"{start}.{skip + limit}" if len(found) > limit else None
        return Page[CommitInfo](items=found[:limit], next_cursor=more)

    async def count(self, repo: Repo, sha: str, behind: str | None = None) -> int:
        """Commits that it rests on, itself included, less `behind` and all that rests on."""
        without = [] if behind is None else [f"^{checked_sha(behind)}"]
        done = await self._git.run(repo.path, "rev-list", "--count", checked_sha(sha), *without, "--")
        return int(done.stdout)

    async def _log(self, repo: Repo, *args: str) -> list[CommitInfo]:
        done = await self._git.run(repo.path, "log", "-z", FORMAT, *args)
        return parsed_log(done.stdout)

    async def compare(self, repo: Repo, base: str, head: str, *, patch: bool = True) -> Comparison:
        """Base and head may be anything that is a commit; without a common one, everything of `head` is new."""

        def resolve() -> tuple[str, str]:
            with opened(repo.path) as library:
                return str(commit_at(library, base).id), str(commit_at(library, head).id)

        base_sha, head_sha = await asyncio.to_thread(resolve)
        found = await self._git.run(repo.path, "merge-base", base_sha, head_sha, ok=(0, 1))
        merge_base = found.stdout.decode().split("\n")[0] or None
        counted = await self._git.run(
            repo.path, "rev-list", "--left-right", "--count", f"{base_sha}...{head_sha}", "--"
        )
        behind, ahead = (int(part) for part in counted.stdout.split())
        commits = await self._log(repo, f"--max-count={MAX_COMMITS}", f"{base_sha}..{head_sha}", "--")
        files, cut = await self.diff(repo, merge_base or EMPTY_TREE, head_sha, patch=patch)
        return Comparison(
            base=base_sha,
            head=head_sha,
            merge_base=merge_base,
            status=_status(ahead, behind),
            ahead_by=ahead,
            behind_by=behind,
            commits=commits,
            files=files,
            additions=sum(file.additions for file in files),
            deletions=sum(file.deletions for file in files),
            truncated=cut or ahead > len(commits),
        )

    async def diff(self, repo: Repo, old: str, new: str, *, patch: bool = True) -> tuple[list[FileDiff], bool]:
        """What changed between two trees, and whether some of it was left out."""
        args = ("diff-tree", "-r", "-M", "--no-ext-diff", "--no-textconv")
        raw = await self._git.run(
            repo.path, *args, "-z", "--raw", "--no-abbrev", "--numstat", old, new, "--", max_bytes=2**24, may_cut=True
        )
        files = _parsed_diff(raw.stdout.decode("utf-8", "surrogateescape"))
        cut = raw.cut or len(files) > MAX_FILES
        if patch and files:
            whole = await self._git.run(repo.path, *args, "-p", old, new, "--", max_bytes=MAX_PATCH_BYTES, may_cut=True)
            parts = re.split(rb"^diff --git ", whole.stdout, flags=re.MULTILINE)[1:]
            if whole.cut:
                parts = parts[:-1]
            for index, part in enumerate(parts[: len(files)]):
                at = part.find(b"\n@@ ")
                if at >= 0 and len(part) - at <= MAX_FILE_PATCH_BYTES:
                    text = part[at + 1 :].decode("utf-8", "replace")
                    files[index] = files[index].model_copy(update={"patch": text})
                cut = cut or len(part) - at > MAX_FILE_PATCH_BYTES
            cut = cut or whole.cut
        return files[:MAX_FILES], cut


def parsed_log(output: bytes) -> list[CommitInfo]:
    pieces = output.decode("utf-8", "replace").split("\0")
    count = len(FIELDS)
    return [_commit(pieces[at : at + count]) for at in range(0, len(pieces) - count + 1, count)]


def _commit(fields: list[str]) -> CommitInfo:
    sha, tree, parents, an, ae, ad, cn, ce, cd, body = fields
    return CommitInfo(
        sha=sha,
        tree=tree,
        parents=parents.split(),
        author=PersonInfo(name=an, email=ae, date=_date(ad)),
        committer=PersonInfo(name=cn, email=ce, date=_date(cd)),
        message=body,
    )


def _date(stamp: str) -> datetime:
    """Git is asked twice, for what it cannot show as a date it can still show as a number."""
    seconds, _, iso = stamp.partition(" ")
    try:
        return datetime.fromisoformat(iso)
    except ValueError:
        try:
            return datetime.fromtimestamp(int(seconds), UTC)
        except (ValueError, OverflowError, OSError):
            return datetime(1970, 1, 1, tzinfo=UTC)


def _parsed_diff(output: str) -> list[FileDiff]:
    """First the raw lines (`:mode mode sha sha S\\0path\\0`), then the counts in the same order."""
    pieces = output.split("\0")
    files: list[FileDiff] = []
    at = 0
    while at < len(pieces) and pieces[at].startswith(":"):
        old_mode, new_mode, old_sha, new_sha, letter = pieces[at][1:].split(" ")
        moved = letter[0] in "RC"
        if at + 1 + moved >= len(pieces):
            break
        files.append(
            FileDiff(
                path=_shown(pieces[at + 1 + moved]),
                previous_path=_shown(pieces[at + 1]) if moved else None,
                status=_STATUS.get(letter[0], "modified"),
                old_sha=_present(old_sha),
                new_sha=_present(new_sha),
                old_mode=_present(old_mode),
                new_mode=_present(new_mode),
            )
        )
        at += 2 + moved
    for index, file in enumerate(files):
        counts = pieces[at].split("\t") if at < len(pieces) else []
        if len(counts) != 3:
            break
        added, deleted, path = counts
        binary = added == "-"
        values = {"binary": True} if binary else {"additions": int(added), "deletions": int(deleted)}
        files[index] = file.model_copy(update=values)
        at += 1 if path else 3
    return files


def _present(text: str) -> str | None:
    return text if text.strip("0") else None


def _shown(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _status(ahead: int, behind: int) -> Literal["identical", "ahead", "behind", "diverged"]:
    if ahead and behind:
        return "diverged"
    return "ahead" if ahead else "behind" if behind else "identical"


def _line(text: str) -> str:
    if "\n" in text or "\0" in text:
        raise InvalidRequest(f"{text!r} must be one line without NUL")
    return text


def _stamp(moment: datetime) -> str:
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).isoformat(timespec="seconds")
