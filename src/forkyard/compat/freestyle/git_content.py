"""What is in a repository: contents, objects, archives, comparisons, searches."""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Literal

from starlette.responses import Response, StreamingResponse

from forkyard.compat.freestyle.calls import Call, done, time_of
from forkyard.compat.freestyle.errors import Refused
from forkyard.compat.freestyle.git import Git
from forkyard.errors import InvalidPath, NotFound
from forkyard.git.hosting import GitHosting
from forkyard.git.search import Pattern
from forkyard.models.git import CommitInfo, TreeEntry

MOST_FOUND = 1000
CONTEXT_LINES = 2
_STATUS = {"added": "added", "deleted": "removed", "renamed": "renamed", "copied": "copied"}


class GitContent:
    def __init__(self, hosting: GitHosting, git: Git) -> None:
        self._hosting = hosting
        self._git = git

    async def contents(self, call: Call) -> Response:
        repo, path = await self._git.repo(call), call.path["path"].strip("/")
        try:
            found = await self._hosting.content.get(repo, path, _rev(call))
        except (NotFound, InvalidPath) as error:
            await self._hosting.history.commit(
                repo, _rev(call) or await self._hosting.repositories.default_branch(repo)
            )
            raise Refused(404, "PATH_NOT_FOUND", error.message) from error
        row: dict[str, Any] = {"name": found.name, "path": found.path, "sha": found.sha}
        if found.entries is not None:
            entries = found.entries
            if call.flag("recursive"):
                whole = await self._hosting.content.tree(repo, found.sha, recursive=True)
                entries = [one.model_copy(update={"path": posixpath.join(path, one.path)}) for one in whole.entries]
            return done({"type": "dir", **row, "entries": _nested(entries)})
        return done({"type": "file", **row, "size": found.size, "content": found.content})

    async def tarball(self, call: Call) -> Response:
        return await self._archive(call, "tar.gz", "application/gzip")

    async def zip(self, call: Call) -> Response:
        return await self._archive(call, "zip", "application/zip")

    async def _archive(self, call: Call, kind: Literal["tar.gz", "zip"], media_type: str) -> Response:
        opened = AsyncExitStack()
        repo = await self._git.repo(call)
        chunks = await opened.enter_async_context(self._hosting.content.archive(repo, _rev(call), kind))

        async def content() -> AsyncIterator[bytes]:
            async with opened:
                async for chunk in chunks:
                    yield chunk

        return StreamingResponse(content(), media_type=media_type)

    async def blob(self, call: Call) -> Response:
        try:
            found = await self._hosting.content.blob(await self._git.repo(call), call.path["sha"])
        except NotFound as error:
            raise Refused(404, "BLOB_NOT_FOUND", error.message) from error
        return done({"content": found.content, "encoding": "base64", "sha": found.sha, "size": found.size})

    async def tree(self, call: Call) -> Response:
        try:
            found = await self._hosting.content.tree(await self._git.repo(call), call.path["sha"], recursive=False)
        except NotFound as error:
            raise Refused(404, "TREE_NOT_FOUND", error.message) from error
        kinds = {"directory": "tree", "submodule": "commit"}
        rows = [
            {"path": one.path, "sha": one.sha, "size": one.size, "type": kinds.get(one.type, "blob")}
            for one in found.entries
        ]
        return done({"tree": rows, "sha": found.sha})

    async def compare(self, call: Call) -> Response:
        base, head = call.query("base"), call.query("head")
        if base is None or head is None:
            raise Refused(400, "INVALID_REVISION", "base and head are needed")
        found = await self._hosting.history.compare(await self._git.repo(call), base, head, patch=False)
        files = [
            {
                "sha": one.new_sha,
                "filename": one.path,
                "status": _STATUS.get(one.status, "modified"),
                "additions": one.additions,
                "deletions": one.deletions,
                "changes": one.additions + one.deletions,
                "previous_filename": one.previous_path,
            }
            for one in found.files
        ]
        return done(
            {
                "status": found.status,
                "ahead_by": found.ahead_by,
                "behind_by": found.behind_by,
                "total_commits": found.ahead_by,
                "files": files,
            }
        )

    # ── search ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def search(self, call: Call) -> Response:
        """A page is one of files. Of a line its first match is told, by its characters from 0."""
        limit, offset = call.number("maxResults", 100, 1, MOST_FOUND), call.number("offset", 0)
        found = await self._hosting.search.page_of_files(
            await self._git.repo(call),
            _pattern(call, "EMPTY_QUERY"),
            rev=_rev(call),
            include=_globs(call, "pathPattern", "INVALID_PATH_PATTERN"),
            exclude=_globs(call, "excludePattern", "INVALID_PATH_PATTERN"),
            context=CONTEXT_LINES,
            offset=offset,
            limit=limit,
        )
        rows = [
            {
                "path": file.path,
                "extension": _extension(file.path),
                "size": file.size,
                "matches": [
                    {
                        "lineNumber": one.line_number,
                        "line": one.line,
                        "startColumn": one.start_column - 1,
                        "endColumn": one.end_column - 1,
                        "contextBefore": one.before,
                        "contextAfter": one.after,
                    }
                    for one in file.matches
                ],
            }
            for file in found.files
        ]
        return done(
            {
                "totalFiles": found.total_files,
                "totalMatches": found.total_matches,
                "hasMore": found.truncated,
                "files": rows,
            }
        )

    async def search_files(self, call: Call) -> Response:
        limit, offset = _window(call)
        pattern = _pattern(call, "FILENAME_EMPTY_QUERY")
        glob = any(char in pattern.text for char in "*?[") and not pattern.regex
        found = await self._hosting.search.paths(
            await self._git.repo(call), pattern, glob=glob, rev=_rev(call), limit=limit
        )
        rows = [{"path": one.path, "extension": _extension(one.path), "size": one.size} for one in found.files]
        return done({"totalFiles": len(rows), "hasMore": found.truncated, "files": rows[offset:]})

    async def search_commits(self, call: Call) -> Response:
        limit, offset = _window(call)
        found = await self._hosting.search.messages(
            await self._git.repo(call), _pattern(call, "COMMIT_EMPTY_QUERY"), rev=_rev(call), path=None, limit=limit
        )
        rows = [{**_commit(one), "fullMessage": one.message} for one in found.commits]
        return done({"totalCommits": len(rows), "hasMore": found.truncated, "commits": rows[offset:]})

    async def search_diffs(self, call: Call) -> Response:
        limit, offset = _window(call)
        found = await self._hosting.search.diffs(
            await self._git.repo(call),
            _pattern(call, "DIFF_EMPTY_QUERY"),
            rev=_rev(call),
            include=_globs(call, "pathPattern", "DIFF_INVALID_PATH_PATTERN"),
            exclude=_globs(call, "excludePattern", "DIFF_INVALID_PATH_PATTERN"),
            limit=limit,
        )
        rows = []
        for one in found.commits:
            files: dict[str, list[dict[str, Any]]] = {}
            for line in one.lines:
                files.setdefault(line.path, []).append(
                    {
                        "line": line.line,
                        "lineNumber": line.line_number,
                        "startColumn": _bytes(line.line, line.start_column),
                        "endColumn": _bytes(line.line, line.end_column),
                        "isAddition": line.kind == "added",
                    }
                )
            listed = [{"path": path, "matches": matches} for path, matches in files.items()]
            rows.append({**_commit(one.commit), "files": listed})
        return done({"totalCommits": len(rows), "hasMore": found.truncated, "commits": rows[offset:]})


def _rev(call: Call) -> str | None:
    """The types of clients say `rev`, the clients themselves `ref`."""
    return call.query("rev") or call.query("ref")


def _window(call: Call) -> tuple[int, int]:
    offset = call.number("offset", 0, 0, MOST_FOUND)
    return min(call.number("maxResults", 100, 1, MOST_FOUND) + offset, MOST_FOUND), offset


def _pattern(call: Call, code: str) -> Pattern:
    text = call.query("query")
    if text is None:
        raise Refused(400, code, "query is empty")
    return Pattern(
        text[:1000],
        regex=call.flag("isRegex"),
        case_sensitive=call.flag("caseSensitive"),
        whole_word=call.flag("wholeWord"),
    )


def _globs(call: Call, name: str, code: str) -> list[str]:
    """One without a slash is for names, at any depth."""
    found = (call.query(name) or "")[:1000]
    if "\0" in found:
        raise Refused(400, code, f"{name} holds a NUL, which no path has")
    return [] if not found else [found if "/" in found else f"**/{found}"]


def _bytes(line: str, column: int) -> int:
    """A column as the offset of its byte."""
    return len(line[: column - 1].encode("utf-8", "replace"))


def _extension(path: str) -> str | None:
    name = path.rpartition("/")[2]
    return name.rpartition(".")[2] if "." in name.lstrip(".") else None


def _nested(entries: list[TreeEntry]) -> list[dict[str, Any]]:
    """Directories come before what is in them, if that is there at all."""
    top: list[dict[str, Any]] = []
    inside: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        row: dict[str, Any] = {"name": entry.name, "path": entry.path, "sha": entry.sha}
        if entry.type == "directory":
            row |= {"type": "dir", "entries": inside.setdefault(entry.path, [])}
        else:
            row |= {"type": "file", "size": entry.size or 0}
        inside.get(posixpath.dirname(entry.path), top).append(row)
    return top


def _commit(info: CommitInfo) -> dict[str, Any]:
    return {
        "sha": info.sha,
        "message": info.message.split("\n")[0],
        "authorName": info.author.name,
        "authorEmail": info.author.email,
        "timestamp": time_of(info.author.date),
    }
