"""Search: in files, among file names, in commit messages, in diffs. Every pattern runs in a process with a deadline."""

from __future__ import annotations

import asyncio
import fnmatch
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from forkyard.errors import HostFailure, InvalidRequest
from forkyard.git.content import Content
from forkyard.git.history import FIELDS, FORMAT, parsed_log
from forkyard.git.library import commit_at, opened
from forkyard.git.process import Done
from forkyard.git.repositories import Repo, Repositories
from forkyard.models.git import (
    CommitDiffMatches,
    CommitMatches,
    ContentMatches,
    DiffLine,
    DiffMatches,
    FileMatches,
    Match,
    PathMatches,
    TreeEntry,
)

SEARCH_S = 10.0
MAX_OUTPUT_BYTES = 8 * 2**20
MAX_LINE = 1000
MAX_DIFF_LINES = 20_000


@dataclass(frozen=True)
class Pattern:
    text: str
    regex: bool = False
    case_sensitive: bool = True
    whole_word: bool = False

    def __post_init__(self) -> None:
        if not self.text or "\0" in self.text or "\n" in self.text:
            raise InvalidRequest("what to search for must be one line, and not empty", field="query")

    def pcre(self) -> str:
        """For programs that know no `--word-regexp`."""
        plain = self.text if self.regex else _escaped(self.text)
        return rf"(?<!\w)(?:{plain})(?!\w)" if self.whole_word else plain

    def args(self) -> list[str]:
        return ["--perl-regexp", *([] if self.case_sensitive else ["--regexp-ignore-case"])]


def _escaped(text: str) -> str:
    return "".join(char if char.isalnum() or char in " _" or ord(char) > 127 else "\\" + char for char in text)


class Search:
    def __init__(self, repositories: Repositories, content: Content) -> None:
        self._repositories = repositories
        self._content = content
        self._git = repositories.git

    async def contents(
        self,
        repo: Repo,
        pattern: Pattern,
        *,
        rev: str | None,
        include: list[str],
        exclude: list[str],
        context: int,
        limit: int,
    ) -> ContentMatches:
        commit = await self._commit(repo, rev)
        flags = [] if pattern.case_sensitive else ["--ignore-case"]
        specs = [f":(glob){glob}" for glob in include] + [f":(exclude,glob){glob}" for glob in exclude]
        done = await self._run(
            repo,
            "grep", "-z", "-I", "--line-number", "--column", "--only-matching", "--full-name", "--no-color",
            "--perl-regexp", *flags, "-e", pattern.pcre(), commit, "--", *specs,
            ok=(0, 1),
        )  # fmt: skip
        hits = _parsed_grep(done.stdout, commit)
        total = len(hits)
        return await asyncio.to_thread(_shown, repo.path, commit, hits[:limit], total, context, done.cut)

    async def paths(self, repo: Repo, pattern: Pattern, *, glob: bool, rev: str | None, limit: int) -> PathMatches:
        """A glob is matched against the whole path, or against the name if it has no slash."""
        commit = await self._commit(repo, rev)
        tree = await self._content.tree(repo, commit, recursive=True)
        files = [entry for entry in tree.entries if entry.type != "directory"]
        found = _globbed(files, pattern) if glob else await self._matching(files, pattern)
        cut = tree.truncated or len(found) > limit
        return PathMatches(commit=commit, files=found[:limit], truncated=cut)

    async def _matching(self, files: list[TreeEntry], pattern: Pattern) -> list[TreeEntry]:
        numbers = await self._grep([file.path for file in files], pattern)
        return [files[number] for number in numbers]

    async def messages(
        self, repo: Repo, pattern: Pattern, *, rev: str | None, path: str | None, limit: int
    ) -> CommitMatches:
        commit = await self._commit(repo, rev)
        paths = [f":(literal){path}"] if path else []
        done = await self._run(
            repo, "log", "-z", FORMAT, f"--max-count={limit + 1}", *pattern.args(), f"--grep={pattern.pcre()}",
            commit, "--", *paths,
        )  # fmt: skip
        found = parsed_log(done.stdout)
        return CommitMatches(commits=found[:limit], truncated=len(found) > limit or done.cut)

    async def diffs(
        self, repo: Repo, pattern: Pattern, *, rev: str | None, include: list[str], limit: int
    ) -> DiffMatches:
        """Commits that added or removed a line that matches, with these lines."""
        commit = await self._commit(repo, rev)
        specs = [f":(glob){glob}" for glob in include]
        marker = secrets.token_hex(16)  # what no commit can contain
        # Git's own pickaxe knows only POSIX patterns. Lines are looked at here, by the same program as elsewhere.
        done = await self._run(
            repo, "log", "--format=" + marker + "%x00".join(FIELDS) + "%x00", "-p", "-U0",
            "--no-ext-diff", "--no-textconv", "--no-renames", "--no-color",
            *_pickaxe(pattern), commit, "--", *specs,
        )  # fmt: skip
        entries = _parsed_patches(done.stdout, marker.encode())
        lines = [(number, line) for number, (_, some) in enumerate(entries) for line in some]
        cut = done.cut or len(lines) > MAX_DIFF_LINES
        lines = lines[:MAX_DIFF_LINES]
        matching = await self._grep([line.line for _, line in lines], pattern)
        found: dict[int, list[DiffLine]] = {}
        for index in matching:
            number, line = lines[index]
            found.setdefault(number, []).append(line.model_copy(update={"line": line.line[:MAX_LINE]}))
        matches = [
            CommitDiffMatches(commit=parsed_log(entries[number][0])[0], lines=some) for number, some in found.items()
        ]
        return DiffMatches(commits=matches[:limit], truncated=cut or len(matches) > limit)

    async def _commit(self, repo: Repo, rev: str | None) -> str:
        wanted = rev or await self._repositories.default_branch(repo)

        def work() -> str:
            with opened(repo.path) as library:
                return str(commit_at(library, wanted).id)

        return await asyncio.to_thread(work)

    async def _run(self, repo: Repo, *args: str, ok: tuple[int, ...] = (0,)) -> Done:
        try:
            return await self._git.run(
                repo.path, *args, ok=ok, timeout_s=SEARCH_S, max_bytes=MAX_OUTPUT_BYTES, may_cut=True
            )
        except HostFailure as error:
            raise InvalidRequest(f"this cannot be searched for: {error.message}", field="query") from error

    async def _grep(self, lines: list[str], pattern: Pattern) -> list[int]:
        """Which of these lines match. In a process: a pattern can take for ever."""
        flags = ["-P", "-n", "-a"] + ([] if pattern.case_sensitive else ["-i"])
        text = "\n".join(line.replace("\n", " ") for line in lines) + "\n"
        try:
            process = await asyncio.create_subprocess_exec(
                "grep", *flags, "-e", pattern.pcre(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._git.env(),
            )  # fmt: skip
        except OSError as error:
            raise HostFailure(f"grep cannot be started: {error}") from error
        try:
            async with asyncio.timeout(SEARCH_S):
                out, err = await process.communicate(text.encode("utf-8", "replace"))
        except TimeoutError:
            raise InvalidRequest(f"this pattern takes longer than {SEARCH_S:.0f} s", field="query") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode not in (0, 1):
            raise InvalidRequest(
                f"this cannot be searched for: {err.decode('utf-8', 'replace').strip()}", field="query"
            )
        return [int(line.partition(b":")[0]) - 1 for line in out.splitlines() if line.partition(b":")[0].isdigit()]


@dataclass(frozen=True)
class _Hit:
    path: str
    line_number: int
    column: int  # in bytes, from 1
    length: int


def _parsed_grep(output: bytes, commit: str) -> list[_Hit]:
    """`commit:path NUL line NUL column NUL text LF`"""
    hits = []
    for line in output.split(b"\n"):
        pieces = line.split(b"\0", 3)
        if len(pieces) == 4 and pieces[1].isdigit() and pieces[2].isdigit():
            path = pieces[0].decode("utf-8", "surrogateescape").removeprefix(commit + ":")
            hits.append(_Hit(path, int(pieces[1]), int(pieces[2]), len(pieces[3])))
    return hits


def _shown(path: Path, commit: str, hits: list[_Hit], total: int, context: int, cut: bool) -> ContentMatches:
    by_path: dict[str, list[_Hit]] = {}
    for hit in hits:
        by_path.setdefault(hit.path, []).append(hit)
    files = []
    with opened(path) as library:
        tree = commit_at(library, commit).tree
        for name, some in by_path.items():
            blob = tree[name.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")]
            data = blob.read_raw()
            lines = data.split(b"\n")
            files.append(
                FileMatches(
                    path=name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
                    sha=str(blob.id),
                    size=len(data),
                    matches=[_match(lines, hit, context) for hit in some],
                )
            )
    return ContentMatches(commit=commit, files=files, total_matches=total, truncated=cut or total > len(hits))


def _match(lines: list[bytes], hit: _Hit, context: int) -> Match:
    at = hit.line_number - 1
    line = lines[at] if at < len(lines) else b""
    start = len(line[: hit.column - 1].decode("utf-8", "replace")) + 1
    end = start + len(line[hit.column - 1 : hit.column - 1 + hit.length].decode("utf-8", "replace"))
    return Match(
        line_number=hit.line_number,
        line=_text(line),
        start_column=start,
        end_column=end,
        before=[_text(one) for one in lines[max(0, at - context) : at]],
        after=[_text(one) for one in lines[at + 1 : at + 1 + context]],
    )


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")[:MAX_LINE]


def _globbed(files: list[TreeEntry], pattern: Pattern) -> list[TreeEntry]:
    glob = pattern.text if pattern.case_sensitive else pattern.text.lower()
    found = []
    for file in files:
        name = file.path if "/" in glob else file.name
        if fnmatch.fnmatchcase(name if pattern.case_sensitive else name.lower(), glob):
            found.append(file)
    return found


def _pickaxe(pattern: Pattern) -> list[str]:
    """Spares git the diffs that cannot match, where that can be said in its words."""
    if pattern.regex:
        return []
    fixed = re.sub(r"([\\.*+?()\[\]{}|^$])", r"\\\1", pattern.text)
    return ["-G" + fixed, *([] if pattern.case_sensitive else ["--regexp-ignore-case"])]


def _parsed_patches(output: bytes, marker: bytes) -> list[tuple[bytes, list[DiffLine]]]:
    """Each commit's fields as `parsed_log` wants them, and its changed lines."""
    found: list[tuple[bytes, list[DiffLine]]] = []
    for part in output.split(marker)[1:]:
        *fields, patch = part.split(b"\0", len(FIELDS))
        if len(fields) == len(FIELDS):
            found.append((b"\0".join(fields) + b"\0", _lines(patch)))
    return found


_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)")


def _lines(patch: bytes) -> list[DiffLine]:
    found: list[DiffLine] = []
    path, old, new, inside = "", 0, 0, False
    for line in patch.decode("utf-8", "replace").split("\n"):
        if line.startswith("diff --git "):
            path, inside = line.rpartition(" b/")[2], False
        elif (hunk := _HUNK.match(line)) is not None:
            old, new, inside = int(hunk[1]), int(hunk[2]), True
        elif inside and line.startswith("+"):
            found.append(DiffLine(path=path, kind="added", line_number=new, line=line[1:]))
            new += 1
        elif inside and line.startswith("-"):
            found.append(DiffLine(path=path, kind="removed", line_number=old, line=line[1:]))
            old += 1
    return found
