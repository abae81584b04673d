"""Repositories: made, listed, their branches, tags and commits."""

from __future__ import annotations

import re
import secrets
from typing import Any, Literal

from pydantic import Field
from starlette.responses import Response

from forkyard.compat.freestyle.calls import ACCOUNT, Body, Call, done, ours, time_of
from forkyard.compat.freestyle.errors import Refused
from forkyard.compat.freestyle.models import Text
from forkyard.control.pages import cursor_after
from forkyard.errors import Conflict, InvalidRequest, RefConflict, RevisionNotFound
from forkyard.git.history import LogFilter
from forkyard.git.hosting import GitHosting
from forkyard.git.repositories import Repo
from forkyard.models.git import (
    ArchiveSource,
    BranchCreate,
    CommitCreate,
    CommitInfo,
    FileChange,
    FilesSource,
    GitSource,
    Person,
    PersonInfo,
    RepoCreate,
    TagInfo,
)

BAD_REQUEST = "GIT_INVALID_REQUEST"
MOST_LISTED = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
#: `branches.create` of every client so far loses the name, and sends its own template instead.
_LOST_NAME = "{*branch}"


class _Source(Body):
    url: Text
    rev: Text | None = None
    branch: Text | None = None


class _Import(Body):
    type: Literal["files", "git", "tar", "zip"]
    files: dict[Text, str] = Field(default_factory=dict, max_length=100_000)
    url: Text = ""
    rev: Text | None = None
    dir: Text | None = None
    message: Text = Field("Import", alias="commitMessage")
    author_name: Text | None = Field(None, alias="authorName")
    author_email: Text | None = Field(None, alias="authorEmail")


class _NewRepo(Body):
    name: Text | None = None
    public: bool | None = None
    default_branch: Text | None = Field(None, alias="defaultBranch")
    source: _Source | None = None
    imported: _Import | None = Field(None, alias="import")


class _DefaultBranch(Body):
    default_branch: Text = Field(alias="defaultBranch")


class _Visibility(Body):
    visibility: Literal["public", "private"]


class _NewBranch(Body):
    sha: Text | None = None


class _Author(Body):
    name: Text
    email: Text = "unknown@forkyard.invalid"


class _File(Body):
    path: Text
    content: str | None = None
    encoding: Literal["utf8", "utf-8", "base64"] | None = None
    deleted: bool | None = None


class _NewCommit(Body):
    message: Text
    files: list[_File] = Field(default_factory=list, max_length=100_000)
    branch: Text | None = None
    author: _Author | None = None
    expected_sha: Text | None = Field(None, alias="expectedSha")


class Git:
    def __init__(self, hosting: GitHosting) -> None:
        self._hosting = hosting

    async def repo(self, call: Call) -> Repo:
        return await self._hosting.repositories.get(call.path["repo"])

    # ── repositories ─────────────────────────────────────────────────────────────────────────────────────────────

    async def create(self, call: Call) -> Response:
        body = await call.body(_NewRepo, BAD_REQUEST)
        if body.source is not None and body.imported is not None:
            raise Refused(400, "SOURCE_IMPORT_CONFLICT", "source and import exclude each other")
        named = body.name is not None and _NAME.fullmatch(body.name) is not None
        with ours(BAD_REQUEST):
            wanted = RepoCreate(
                name=body.name if named else None,
                description=None if named else body.name,
                visibility="public" if body.public else "private",
                default_branch=body.default_branch or "main",
                source=_source(body),
            )
        try:
            made = await self._hosting.create(wanted, call.who)
        except Conflict as error:
            raise Refused(409, "REPO_ALREADY_EXISTS", error.message) from error
        except InvalidRequest as error:
            if wanted.source is None:
                raise
            raise Refused(400, "SOURCE_NOT_FOUND", error.message) from error
        await self._hosting.identities.record(call.who, "git.create", made.id, data={"name": made.record.name})
        return done({"repoId": made.id})

    async def listed(self, call: Call) -> Response:
        limit, offset = call.number("limit", 10, 1, 1000), call.number("offset", 0, 0, MOST_LISTED)
        identity_id = None if call.who.admin else call.who.id
        found: list[Repo] = []
        cursor = None
        while True:
            page, place = await self._hosting.repositories.list(
                search=call.query("search"), identity_id=identity_id, limit=1000, cursor=cursor
            )
            found += page
            if place is None or len(found) >= MOST_LISTED:
                break
            cursor = cursor_after(place)
        shown = found[offset : offset + limit]
        rows = [await self._row(repo) for repo in shown]
        return done({"repositories": rows, "total": len(found), "offset": offset + len(shown)})

    async def _row(self, repo: Repo) -> dict[str, Any]:
        branches = await self._hosting.refs.branches(repo)
        tags = await self._hosting.refs.tags(repo)
        return {
            "id": repo.id,
            "name": repo.record.name,
            "branches": {one.name: {"default": one.default, "name": one.name, "target": one.sha} for one in branches},
            "tags": {one.name: {"name": one.name, "target": one.target} for one in tags},
            "defaultBranch": await self._hosting.repositories.default_branch(repo),
        }

    async def get(self, call: Call) -> Response:
        repo = await self.repo(call)
        return done(
            {
                "id": repo.id,
                "name": repo.record.name,
                "accountId": ACCOUNT,
                "visibility": repo.record.visibility,
                "defaultBranch": await self._hosting.repositories.default_branch(repo),
                "createdAt": time_of(repo.record.created_at),
            }
        )

    async def delete(self, call: Call) -> Response:
        repo = await self.repo(call)
        await self._hosting.delete(repo)
        await self._hosting.identities.record(call.who, "git.delete", repo.id, data={"name": repo.record.name})
        return done()

    async def default_branch(self, call: Call) -> Response:
        repo = await self.repo(call)
        return done({"defaultBranch": await self._hosting.repositories.default_branch(repo)})

    async def set_default_branch(self, call: Call) -> Response:
        body = await call.body(_DefaultBranch, BAD_REQUEST)
        await self._hosting.repositories.update(await self.repo(call), default_branch=body.default_branch)
        return done()

    async def visibility(self, call: Call) -> Response:
        return done({"visibility": (await self.repo(call)).record.visibility})

    async def set_visibility(self, call: Call) -> Response:
        body = await call.body(_Visibility, BAD_REQUEST)
        await self._hosting.repositories.update(await self.repo(call), visibility=body.visibility)
        return done({"visibility": body.visibility})

    # ── branches, tags ───────────────────────────────────────────────────────────────────────────────────────────

    async def branches(self, call: Call) -> Response:
        found = await self._hosting.refs.branches(await self.repo(call))
        return done({"branches": [{"name": one.name, "commit": one.sha} for one in found]})

    async def branch(self, call: Call) -> Response:
        if not call.path["branch"]:
            return await self.branches(call)
        try:
            found = await self._hosting.refs.branch(await self.repo(call), call.path["branch"])
        except RevisionNotFound as error:
            raise Refused(404, "BRANCH_NOT_FOUND", error.message) from error
        return done({"name": found.name, "sha": found.sha})

    async def create_branch(self, call: Call) -> Response:
        body = await call.body(_NewBranch, BAD_REQUEST)
        name = call.path["branch"]
        if not name or name == _LOST_NAME:
            message = "this client lost the name of the branch; make it by a commit on it, or by a push"
            raise Refused(400, "BRANCH_NAME_EMPTY", message)
        with ours(BAD_REQUEST):
            wanted = BranchCreate(name=name, rev=body.sha)
        try:
            made = await self._hosting.refs.create_branch(await self.repo(call), wanted, call.who)
        except (RefConflict, Conflict) as error:
            raise Refused(409, "BRANCH_ALREADY_EXISTS", error.message) from error
        return done({"name": made.name, "sha": made.sha})

    async def tags(self, call: Call) -> Response:
        return done({"tags": [_tag(one) for one in await self._hosting.refs.tags(await self.repo(call))]})

    async def tag(self, call: Call) -> Response:
        if not call.path["tag"]:
            return await self.tags(call)
        try:
            return done(_tag(await self._hosting.refs.tag(await self.repo(call), call.path["tag"])))
        except RevisionNotFound as error:
            raise Refused(404, "TAG_NOT_FOUND", error.message) from error

    async def tag_by_sha(self, call: Call) -> Response:
        for one in await self._hosting.refs.tags(await self.repo(call)):
            if one.sha == call.path["sha"]:
                return done(_tag(one))
        raise Refused(404, "TAG_NOT_FOUND", f"there is no tag {call.path['sha'][:64]!r}")

    # ── commits ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def commit(self, call: Call) -> Response:
        try:
            return done(commit_row(await self._hosting.history.commit(await self.repo(call), call.path["sha"])))
        except RevisionNotFound as error:
            raise Refused(404, "COMMIT_NOT_FOUND", error.message) from error

    async def commits(self, call: Call) -> Response:
        limit, offset = call.number("limit", 50, 1, 500), call.number("offset", 0, 0, MOST_LISTED)
        order: Literal["asc", "desc"] = "asc" if call.query("order") == "asc" else "desc"
        repo = await self.repo(call)
        since, until = await self._selected(repo, call.query("since")), await self._selected(repo, call.query("until"))
        if (since or until) and offset:
            raise Refused(400, "OFFSET_WITH_SELECTOR", "offset does not go together with since or until")
        try:
            branch = call.query("branch") or await self._hosting.repositories.default_branch(repo)
            head = until or (await self._hosting.history.commit(repo, branch)).sha
        except RevisionNotFound as error:
            raise Refused(404, "BRANCH_NOT_FOUND", error.message) from error
        if since is not None and await self._hosting.history.count(repo, since, behind=head):
            raise Refused(404, "COMMIT_NOT_IN_BRANCH", f"{since} is not among what {head} rests on")
        # Alone and upwards it is where the list begins; else where it ends, and not part of it.
        first = [since] if since is not None and until is None and order == "asc" else []
        found = [await self._hosting.history.commit(repo, sha) for sha in first]
        wanted = LogFilter(order=order, behind=since)
        page = await self._hosting.history.log(repo, None, wanted, limit=limit + 1, cursor=f"{head}.{offset}")
        found += page.items
        rows = [commit_row(one) for one in found[:limit]]
        answered = {"commits": rows, "count": len(rows), "limit": limit, "offset": offset, "order": order}
        if not call.flag("disableTotalCount"):
            answered["total"] = len(first) + await self._hosting.history.count(repo, head, behind=since)
        following = found[limit].sha if len(found) > limit else None
        return done({**answered, "selector": _selector(since, until), "next_commit": following})

    async def _selected(self, repo: Repo, sha: str | None) -> str | None:
        if sha is None:
            return None
        try:
            return (await self._hosting.history.commit(repo, sha)).sha
        except RevisionNotFound as error:
            raise Refused(404, "COMMIT_NOT_FOUND", error.message) from error

    async def create_commit(self, call: Call) -> Response:
        body = await call.body(_NewCommit, BAD_REQUEST)
        with ours(BAD_REQUEST):
            wanted = CommitCreate(
                message=body.message,
                files=[_change(file) for file in body.files],
                branch=body.branch,
                author=None if body.author is None else Person(name=body.author.name, email=body.author.email),
                expected_sha=body.expected_sha,
            )
        made = await self._hosting.commits.create(await self.repo(call), wanted, call.who)
        return done({"commit": commit_row(made)})


# ── shapes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _selector(since: str | None, until: str | None) -> dict[str, Any] | None:
    if since is not None and until is not None:
        return {"Range": {"since": since, "until": until}}
    return {"Since": since} if since is not None else {"Until": until} if until is not None else None


def _source(body: _NewRepo) -> FilesSource | GitSource | ArchiveSource | None:
    if body.source is not None:
        return GitSource(url=body.source.url, rev=body.source.rev or body.source.branch)
    wanted = body.imported
    if wanted is None:
        return None
    author = None
    if wanted.author_name:
        author = Person(name=wanted.author_name, email=wanted.author_email or "unknown@forkyard.invalid")
    given: dict[str, Any] = {"url": wanted.url, "directory": wanted.dir, "message": wanted.message, "author": author}
    if wanted.type == "files":
        files = [FileChange(path=path, content=content) for path, content in wanted.files.items()]
        return FilesSource(files=files, message=wanted.message, author=author)
    if wanted.type == "git":
        return GitSource(rev=wanted.rev, history=False, **given)
    return ArchiveSource(format=wanted.type, **given)


def _change(file: _File) -> FileChange:
    if file.deleted:
        return FileChange(path=file.path, delete=True)
    if file.content is None:
        raise Refused(400, "INVALID_FILE_CHANGE", f"{file.path[:200]}: has neither content nor deleted")
    return FileChange(path=file.path, content=file.content, encoding="base64" if file.encoding == "base64" else "utf-8")


def _tag(info: TagInfo) -> dict[str, Any]:
    row: dict[str, Any] = {"name": info.name, "sha": info.sha, "target": {"sha": info.target}}
    if info.message is not None:
        row["message"] = info.message
    if info.tagger is not None:
        row["tagger"] = _person(info.tagger)
    return row


def commit_row(info: CommitInfo) -> dict[str, Any]:
    return {
        "sha": info.sha,
        "message": info.message,
        "author": _person(info.author),
        "committer": _person(info.committer),
        "tree": {"sha": info.tree},
        "parents": [{"sha": sha} for sha in info.parents],
    }


def _person(info: PersonInfo) -> dict[str, Any]:
    return {"name": info.name, "email": info.email, "date": time_of(info.date)}


def new_name() -> str:
    return f"freestyle-{secrets.token_hex(4)}"
