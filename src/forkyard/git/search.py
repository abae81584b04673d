"""Search: in files, among file names, in commit messages, in diffs. Every pattern runs in a process with a deadline."""

from __future__ import annotations

import asyncio
import fnmatch
import re
import secrets
from collections import Counter
from dataclasses import dataclass, replace
from itertools import accumulate
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
#: Of a page of files.
MAX_SHOWN = 10_000
#: So much of a line is looked through for more than its first match.
MAX_LOOKED_THROUGH = 2**16


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
        commit, hits, cut = await self._hits(repo, pattern, rev, include, exclude)
        shown = await self._placed(repo, commit, pattern, hits[:limit])
        cut = cut or len(hits) > limit
        return await asyncio.to_thread(_shown, repo.path, commit, hits, shown, context, cut)

    async def page_of_files(
        self,
        repo: Repo,
        pattern: Pattern,
        *,
        rev: str | None,
        include: list[str],
        exclude: list[str],
        context: int,
        offset: int,
        limit: int,
    ) -> ContentMatches:
        """So many files that match, each with its lines; of a line the first match."""
        commit, hits, cut = await self._hits(repo, pattern, rev, include, exclude)
        firsts: dict[tuple[str, int], _Hit] = {}
        for hit in hits:
            firsts.setdefault((hit.path, hit.line_number), hit)
        hits = list(firsts.values())
        names = list(dict.fromkeys(hit.path for hit in hits))
        page = set(names[offset : offset + limit])
        shown = [hit for hit in hits if hit.path in page]
        cut = cut or len(names) > offset + limit or len(shown) > MAX_SHOWN
        return await asyncio.to_thread(_shown, repo.path, commit, hits, shown[:MAX_SHOWN], context, cut)

    async def _hits(
        self, repo: Repo, pattern: Pattern, rev: str | None, include: list[str], exclude: list[str]
    ) -> tuple[str, list[_Hit], bool]:
        """All of them, in the order of git; and whether there are more than were read. Only the first of each line knows
        where it is."""
        commit = await self._commit(repo, rev)
        flags = [] if pattern.case_sensitive else ["--ignore-case"]
        done = await self._run(
            repo,
            "grep", "-z", "-I", "--line-number", "--column", "--only-matching", "--full-name", "--no-color",
            "--perl-regexp", *flags, "-e", pattern.pcre(), commit, "--", *_pathspecs(include, exclude),
            ok=(0, 1),
        )  # fmt: skip
        return commit, _parsed_grep(done.stdout, commit), done.cut

    async def _placed(self, repo: Repo, commit: str, pattern: Pattern, hits: list[_Hit]) -> list[_Hit]:
        """With the columns of those that are not the first of their line: git counts these wrong."""
        found = Counter((hit.path, hit.line_number) for hit in hits)
        several = [place for place, count in found.items() if count > 1]
        if not several:
            return hits
        lines = await asyncio.to_thread(_lines_at, repo.path, commit, several)
        spans = dict(zip(several, await self._spans(lines, pattern), strict=True))
        placed = []
        for hit in hits:
            there = spans.get((hit.path, hit.line_number))
            placed.append(replace(hit, column=there.pop(0)[0] + 1) if there else hit)
        return placed

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
        self, repo: Repo, pattern: Pattern, *, rev: str | None, include: list[str], exclude: list[str], limit: int
    ) -> DiffMatches:
        """Commits that added or removed a line that matches, with these lines."""
        commit = await self._commit(repo, rev)
        specs = _pathspecs(include, exclude)
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
        texts = [lines[index][1].line.encode("utf-8", "replace") for index in matching]
        found: dict[int, list[DiffLine]] = {}
        for index, text, spans in zip(matching, texts, await self._spans(texts, pattern), strict=True):
            number, line = lines[index]
            start, end = _columns(text, *(spans[0] if spans else (0, 0)))
            shown = {"line": line.line[:MAX_LINE], "start_column": start, "end_column": end}
            found.setdefault(number, []).append(line.model_copy(update=shown))
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
        """Which of these lines match."""
        text = "\n".join(line.replace("\n", " ") for line in lines) + "\n"
        out = await self._filtered(text.encode("utf-8", "replace"), pattern)
        return [int(line.partition(b":")[0]) - 1 for line in out.splitlines() if line.partition(b":")[0].isdigit()]

    async def _spans(self, lines: list[bytes], pattern: Pattern) -> list[list[tuple[int, int]]]:
        """Where in each line it matches, and in how many bytes; what matches nothing is not told."""
        lines = [line[:MAX_LOOKED_THROUGH] for line in lines]
        starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
        found: list[list[tuple[int, int]]] = [[] for _ in lines]
        if lines:
            out = await self._filtered(b"\n".join(lines) + b"\n", pattern, "-o", "-b")
            for row in out.split(b"\n"):
                number, offset, text = (*row.split(b":", 2), b"", b"")[:3]
                if number.isdigit() and offset.isdigit() and int(number) <= len(lines):
                    found[int(number) - 1].append((int(offset) - starts[int(number) - 1], len(text)))
        return found

    async def _filtered(self, text: bytes, pattern: Pattern, *flags: str) -> bytes:
        """What `grep -n` prints. In a process: a pattern can take for ever."""
        ignoring = [] if pattern.case_sensitive else ["-i"]
        try:
            process = await asyncio.create_subprocess_exec(
                "grep", "-P", "-n", "-a", *flags, *ignoring, "-e", pattern.pcre(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._git.env(),
            )  # fmt: skip
        except OSError as error:
            raise HostFailure(f"grep cannot be started: {error}") from error
        try:
            async with asyncio.timeout(SEARCH_S):
                out, err = await process.communicate(text)
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
        return out


def _pathspecs(include: list[str], exclude: list[str]) -> list[str]:
    for glob in (*include, *exclude):
        if "\0" in glob:
            raise InvalidRequest("a pattern for paths holds a NUL, which no path has", field="include")
    return [f":(glob){glob}" for glob in include] + [f":(exclude,glob){glob}" for glob in exclude]


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


def _shown(path: Path, commit: str, hits: list[_Hit], shown: list[_Hit], context: int, cut: bool) -> ContentMatches:
    """`shown`: those of the hits that were asked for."""
    by_path: dict[str, list[_Hit]] = {}
    for hit in shown:
        by_path.setdefault(hit.path, []).append(hit)
    files = []
    with opened(path) as library:
        tree = commit_at(library, commit).tree
        for name, some in by_path.items():
            blob = tree[name.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")]
            data = blob.read_raw()
            lines = _lines_of(data)
            files.append(
                FileMatches(
                    path=name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
                    sha=str(blob.id),
                    size=len(data),
                    matches=[_match(lines, hit, context) for hit in some],
                )
            )
    return ContentMatches(
        commit=commit,
        files=files,
        total_files=len({hit.path for hit in hits}),
        total_matches=len(hits),
        truncated=cut,
    )


def _lines_at(path: Path, commit: str, places: list[tuple[str, int]]) -> list[bytes]:
    found: dict[tuple[str, int], bytes] = {}
    by_path: dict[str, list[int]] = {}
    for name, number in places:
        by_path.setdefault(name, []).append(number)
    with opened(path) as library:
        tree = commit_at(library, commit).tree
        for name, numbers in by_path.items():
            lines = _lines_of(tree[name].read_raw())
            found |= {
                (name, number): lines[number - 1][:MAX_LOOKED_THROUGH] for number in numbers if number <= len(lines)
            }
    return [found.get(place, b"") for place in places]


def _lines_of(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def _match(lines: list[bytes], hit: _Hit, context: int) -> Match:
    at = hit.line_number - 1
    line = lines[at] if at < len(lines) else b""
    start, end = _columns(line, hit.column - 1, hit.length)
    return Match(
        line_number=hit.line_number,
        line=_text(line),
        start_column=start,
        end_column=end,
        before=[_text(one) for one in lines[max(0, at - context) : at]],
        after=[_text(one) for one in lines[at + 1 : at + 1 + context]],
    )


def _columns(line: bytes, offset: int, length: int) -> tuple[int, int]:
    """In characters, from 1."""
    start = len(line[:offset].decode("utf-8", "replace")) + 1
    return start, start + len(line[offset : offset + length].decode("utf-8", "replace"))


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
