"""A repository without a clone: contents, commits, merges, comparisons, search."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Response

from forkyard.api.access import By, Hosting
from forkyard.api.answers import answer
from forkyard.api.routes.git import ERRORS, LargeRoute, RepoPath
from forkyard.api.streams import ByteStream, opened
from forkyard.git.history import LogFilter
from forkyard.git.search import Pattern
from forkyard.models import Page
from forkyard.models.git import (
    BlobInfo,
    CherryPick,
    CommitCreate,
    CommitInfo,
    CommitMatches,
    Comparison,
    ContentInfo,
    ContentMatches,
    DiffMatches,
    Merge,
    MergeResult,
    PathMatches,
    TreeInfo,
)

router = APIRouter(prefix="/git/repos/{repo}", tags=["git"], route_class=LargeRoute, responses=ERRORS)

_Rev = Annotated[
    str | None, Query(min_length=1, max_length=250, description="Branch, tag or commit. Default: the default branch.")
]
_Path = Annotated[str, Query(max_length=4096, description="Without a leading slash. Empty: the top.")]
_Globs = Annotated[list[str], Query(max_length=20, description="Only these, such as `src/**/*.py`.")]


def _bytes(description: str) -> dict[int | str, dict[str, Any]]:
    content = {ByteStream.media_type: {"schema": {"type": "string", "format": "binary"}}}
    return {200: {"description": description, "content": content}}


# ── contents ─────────────────────────────────────────────────────────────────────────────────────────────────────


@router.get("/contents", response_model=ContentInfo, summary="A file, or what is in a directory")
async def contents(repo: RepoPath, hosting: Hosting, path: _Path = "", rev: _Rev = None) -> Response:
    """A symlink is shown as such, never followed."""
    return answer(await hosting.content.get(await hosting.repositories.get(repo), path, rev))


@router.get("/raw", response_class=ByteStream, summary="The bytes of a file", responses=_bytes("As they are."))
async def raw(
    repo: RepoPath, hosting: Hosting, path: Annotated[str, Query(min_length=1, max_length=4096)], rev: _Rev = None
) -> Response:
    found = await hosting.repositories.get(repo)
    sha, size = await hosting.content.raw(found, path, rev)
    stack, chunks = await opened(hosting.content.stream_blob(found, sha))
    response = ByteStream(stack, chunks)  # type: ignore[arg-type]
    response.headers["content-length"] = str(size)
    return response


@router.get("/archive", response_class=ByteStream, summary="Download as tar or zip", responses=_bytes("The archive."))
async def archive(
    repo: RepoPath,
    hosting: Hosting,
    rev: _Rev = None,
    format: Literal["tar", "tar.gz", "zip"] = "tar.gz",
    path: Annotated[str | None, Query(max_length=4096, description="Only this directory.")] = None,
) -> Response:
    found = await hosting.repositories.get(repo)
    stack, chunks = await opened(hosting.content.archive(found, rev, format, path))
    response = ByteStream(stack, chunks)  # type: ignore[arg-type]
    response.headers["content-disposition"] = f'attachment; filename="{found.record.name}.{format}"'
    return response


@router.get("/tree", response_model=TreeInfo, summary="The entries of a tree")
async def tree(
    repo: RepoPath,
    hosting: Hosting,
    rev: Annotated[str | None, Query(min_length=1, max_length=250, description="Also the id of a tree.")] = None,
    recursive: bool = False,
) -> Response:
    found = await hosting.repositories.get(repo)
    wanted = rev or await hosting.repositories.default_branch(found)
    return answer(await hosting.content.tree(found, wanted, recursive=recursive))


@router.get("/blobs/{sha}", response_model=BlobInfo, summary="A blob by its id")
async def blob(repo: RepoPath, sha: str, hosting: Hosting) -> Response:
    return answer(await hosting.content.blob(await hosting.repositories.get(repo), sha))


# ── commits ──────────────────────────────────────────────────────────────────────────────────────────────────────

_COMMIT = {
    "message": "Say hello",
    "files": [{"path": "hello.txt", "content": "hello\n"}, {"path": "old.txt", "delete": True}],
}


@router.post("/commits", status_code=201, response_model=CommitInfo, summary="Commit many changes at once")
async def create_commit(
    repo: RepoPath, body: Annotated[CommitCreate, Body(examples=[_COMMIT])], hosting: Hosting, by: By
) -> Response:
    """All of them or none. With `expected_sha`, only if nobody was faster: else 409 `ref_conflict`."""
    return answer(await hosting.commits.create(await hosting.repositories.get(repo), body, by), 201)


@router.get("/commits", response_model=Page[CommitInfo], summary="The log")
async def commits(
    repo: RepoPath,
    hosting: Hosting,
    rev: _Rev = None,
    path: Annotated[str | None, Query(max_length=4096, description="Only what changed this file or directory.")] = None,
    author: Annotated[str | None, Query(max_length=256, description="Part of a name or address.")] = None,
    since: datetime | None = None,
    until: datetime | None = None,
    order: Literal["desc", "asc"] = "desc",
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """Newest first, or oldest first. Pages do not shift when others push."""
    wanted = LogFilter(path=path or None, author=author, since=since, until=until, order=order)
    return answer(
        await hosting.history.log(await hosting.repositories.get(repo), rev, wanted, limit=limit, cursor=cursor)
    )


@router.get("/commits/{rev:path}", response_model=CommitInfo, summary="One commit")
async def commit(repo: RepoPath, rev: str, hosting: Hosting) -> Response:
    return answer(await hosting.history.commit(await hosting.repositories.get(repo), rev))


@router.get("/compare", response_model=Comparison, summary="What lies between two revisions")
async def compare(
    repo: RepoPath,
    hosting: Hosting,
    base: Annotated[str, Query(min_length=1, max_length=250)],
    head: Annotated[str, Query(min_length=1, max_length=250)],
    patch: Annotated[bool, Query(description="With the changed lines of each file.")] = True,
) -> Response:
    return answer(await hosting.history.compare(await hosting.repositories.get(repo), base, head, patch=patch))


@router.post("/merge", response_model=MergeResult, summary="Merge into a branch")
async def merge(
    repo: RepoPath, body: Annotated[Merge, Body(examples=[{"source": "fix"}])], hosting: Hosting, by: By
) -> Response:
    """Conflicts are 409 `merge_conflict` with the paths in `details.paths`; then nothing has changed."""
    return answer(await hosting.merging.merge(await hosting.repositories.get(repo), body, by))


@router.post("/cherry-pick", response_model=MergeResult, summary="Put commits onto a branch")
async def cherry_pick(
    repo: RepoPath, body: Annotated[CherryPick, Body(examples=[{"commits": ["fix"]}])], hosting: Hosting, by: By
) -> Response:
    """All of them or none."""
    return answer(await hosting.merging.cherry_pick(await hosting.repositories.get(repo), body, by))


# ── search ───────────────────────────────────────────────────────────────────────────────────────────────────────

_Query = Annotated[str, Query(min_length=1, max_length=1000)]
_Regex = Annotated[bool, Query(description="The query is a regular expression.")]
_Limit = Annotated[int, Query(ge=1, le=1000)]


@router.get("/search", response_model=ContentMatches, summary="Search in files")
async def search(
    repo: RepoPath,
    hosting: Hosting,
    query: _Query,
    rev: _Rev = None,
    include: _Globs = [],  # noqa: B006
    exclude: Annotated[list[str], Query(max_length=20)] = [],  # noqa: B006
    regex: _Regex = False,
    case_sensitive: bool = True,
    whole_word: bool = False,
    context: Annotated[int, Query(ge=0, le=10, description="Lines before and after.")] = 0,
    limit: _Limit = 100,
) -> Response:
    return answer(
        await hosting.search.contents(
            await hosting.repositories.get(repo),
            Pattern(query, regex, case_sensitive, whole_word),
            rev=rev,
            include=include,
            exclude=exclude,
            context=context,
            limit=limit,
        )
    )


@router.get("/search/files", response_model=PathMatches, summary="Search among file names")
async def search_files(
    repo: RepoPath,
    hosting: Hosting,
    query: _Query,
    rev: _Rev = None,
    regex: _Regex = False,
    glob: Annotated[bool, Query(description="The query is a glob, such as `*.py`.")] = False,
    case_sensitive: bool = False,
    limit: _Limit = 100,
) -> Response:
    pattern = Pattern(query, regex, case_sensitive)
    found = await hosting.repositories.get(repo)
    return answer(await hosting.search.paths(found, pattern, glob=glob, rev=rev, limit=limit))


@router.get("/search/commits", response_model=CommitMatches, summary="Search in commit messages")
async def search_commits(
    repo: RepoPath,
    hosting: Hosting,
    query: _Query,
    rev: _Rev = None,
    path: Annotated[str | None, Query(max_length=4096)] = None,
    regex: _Regex = False,
    case_sensitive: bool = False,
    whole_word: bool = False,
    limit: _Limit = 100,
) -> Response:
    pattern = Pattern(query, regex, case_sensitive, whole_word)
    found = await hosting.repositories.get(repo)
    return answer(await hosting.search.messages(found, pattern, rev=rev, path=path, limit=limit))


@router.get("/search/diffs", response_model=DiffMatches, summary="Search in what commits added and removed")
async def search_diffs(
    repo: RepoPath,
    hosting: Hosting,
    query: _Query,
    rev: _Rev = None,
    include: _Globs = [],  # noqa: B006
    exclude: Annotated[list[str], Query(max_length=20)] = [],  # noqa: B006
    regex: _Regex = False,
    case_sensitive: bool = True,
    whole_word: bool = False,
    limit: _Limit = 50,
) -> Response:
    pattern = Pattern(query, regex, case_sensitive, whole_word)
    found = await hosting.repositories.get(repo)
    return answer(await hosting.search.diffs(found, pattern, rev=rev, include=include, exclude=exclude, limit=limit))
