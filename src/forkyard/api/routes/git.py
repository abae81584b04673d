"""Repositories, their branches and tags. (`git clone` and `git push` go to `/git/NAME.git`, not here.)"""

from __future__ import annotations

import asyncio
import tempfile
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Path, Query, Request, Response

from forkyard.api.access import By, Hosting
from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute, raw_body, upload
from forkyard.api.problem import documented
from forkyard.control.pages import cursor_after
from forkyard.errors import (
    Conflict,
    HostFailure,
    InvalidPath,
    MergeConflict,
    OperationTimeout,
    RefConflict,
    RepoFull,
    RepoNotFound,
    RevisionNotFound,
)
from forkyard.git.archives import Archive
from forkyard.git.repositories import Repo
from forkyard.models import Page
from forkyard.models.git import (
    BranchCreate,
    BranchInfo,
    BranchUpdate,
    Person,
    RepoCreate,
    RepoInfo,
    RepoName,
    RepoToken,
    RepoTokenCreate,
    RepoUpdate,
    TagCreate,
    TagInfo,
    Visibility,
)

ERRORS = documented(
    RepoNotFound,
    RevisionNotFound,
    Conflict,
    RefConflict,
    MergeConflict,
    RepoFull,
    InvalidPath,
    HostFailure,
    OperationTimeout,
)


class LargeRoute(BoundedRoute):
    """Files come inside the JSON. Larger ones are for `git push`."""

    max_body_bytes = 48 * 2**20


router = APIRouter(prefix="/git/repos", tags=["git"], route_class=LargeRoute, responses=ERRORS)
#: Bodies as large as they like.
streams = APIRouter(prefix="/git/repos", tags=["git"], responses=ERRORS)

RepoPath = Annotated[str, Path(description="Id or name of a repository.")]
_EXAMPLE = {"name": "app", "source": {"type": "files", "files": [{"path": "README.md", "content": "# App\n"}]}}


def url_of(request: Request) -> str:
    """Where this client reached us; empty if by a unix socket, where no git client can."""
    server = request.scope.get("server")
    if server is None or str(server[0]).startswith("/") or server[1] is None:
        return ""
    return f"{request.url.scheme}://{request.headers.get('host', '')}"


@router.post("", status_code=201, response_model=RepoInfo, summary="Create a repository")
async def create(
    request: Request,
    hosting: Hosting,
    by: By,
    body: Annotated[RepoCreate, Body(examples=[_EXAMPLE])] = RepoCreate(),  # noqa: B008
) -> Response:
    """Empty, from files, or from another repository. It is there as a whole, or not at all."""
    made = await hosting.create(body, by)
    await hosting.identities.record(by, "git.create", made.id, data={"name": made.record.name})
    return answer(await hosting.info(made, url_of(request)), 201)


@streams.post(
    "/archive",
    status_code=201,
    response_model=RepoInfo,
    summary="Create a repository from an archive",
    openapi_extra=raw_body("A tar (also compressed) or zip archive."),
)
async def create_from_archive(
    request: Request,
    hosting: Hosting,
    by: By,
    format: Literal["tar", "zip"] = "tar",
    name: Annotated[RepoName | None, Query()] = None,
    visibility: Visibility = "private",
    default_branch: Annotated[str, Query(min_length=1, max_length=250)] = "main",
    quota_mib: Annotated[int | None, Query(ge=1, le=2**20)] = None,
    strip: Annotated[int, Query(ge=0, le=100, description="Leave out so many leading parts of each path.")] = 0,
    message: Annotated[str, Query(max_length=4096)] = "Import",
    author_name: Annotated[str | None, Query(min_length=1, max_length=256)] = None,
    author_email: Annotated[str, Query(max_length=256)] = "unknown@forkyard.invalid",
) -> Response:
    author = None if author_name is None else Person(name=author_name, email=author_email)
    quota_bytes = None if quota_mib is None else quota_mib * 2**20
    with tempfile.TemporaryFile() as file:
        most_bytes, size = quota_bytes or hosting.quota_bytes, 0
        async for chunk in upload(request):
            size += len(chunk)
            if size > most_bytes:
                raise RepoFull(f"the archive does not fit: the quota is {most_bytes} bytes")
            await asyncio.to_thread(file.write, chunk)
        file.seek(0)
        made = await hosting.create_from_archive(
            name,
            Archive(file, format, strip, message, author),
            by,
            visibility=visibility,
            default_branch=default_branch,
            quota_bytes=quota_bytes,
        )
    await hosting.identities.record(by, "git.create", made.id, data={"name": made.record.name})
    return answer(await hosting.info(made, url_of(request)), 201)


@router.get("", response_model=Page[RepoInfo], summary="List repositories, newest first")
async def list_(
    request: Request,
    hosting: Hosting,
    by: By,
    search: Annotated[str | None, Query(max_length=100, description="Part of the name.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    """With the token of an identity: those it may read."""
    found, place = await hosting.repositories.list(
        search=search, identity_id=None if by.admin else by.id, limit=limit, cursor=cursor
    )
    items = [await hosting.info(repo, url_of(request)) for repo in found]
    return answer(Page[RepoInfo](items=items, next_cursor=None if place is None else cursor_after(place)))


@router.get("/{repo}", response_model=RepoInfo, summary="Get a repository")
async def get(repo: RepoPath, request: Request, hosting: Hosting) -> Response:
    return answer(await hosting.info(await hosting.repositories.get(repo), url_of(request)))


@router.patch("/{repo}", response_model=RepoInfo, summary="Rename it, or change its settings")
async def update(
    repo: RepoPath,
    body: Annotated[RepoUpdate, Body(examples=[{"visibility": "public"}])],
    request: Request,
    hosting: Hosting,
    by: By,
) -> Response:
    """Its id stays, and so do its address by id and what was granted on it."""
    found: Repo = await hosting.repositories.update(
        await hosting.repositories.get(repo),
        name=body.name,
        description=body.description,
        visibility=body.visibility,
        default_branch=body.default_branch,
        quota_bytes=None if body.quota_mib is None else body.quota_mib * 2**20,
    )
    await hosting.identities.record(by, "git.update", found.id, data=body.model_dump(exclude_unset=True))
    return answer(await hosting.info(found, url_of(request)))


@router.delete("/{repo}", status_code=204, summary="Delete a repository")
async def delete(repo: RepoPath, hosting: Hosting, by: By) -> Response:
    """For ever, with its large files, its tokens and what was granted on it."""
    found = await hosting.repositories.get(repo)
    await hosting.delete(found)
    await hosting.identities.record(by, "git.delete", found.id, data={"name": found.record.name})
    return done()


@router.post("/{repo}/tokens", status_code=201, response_model=RepoToken, summary="A token for this repository alone")
async def create_token(
    repo: RepoPath,
    request: Request,
    hosting: Hosting,
    by: By,
    body: RepoTokenCreate = RepoTokenCreate(),  # noqa: B008
) -> Response:
    """With a URL that git can clone from at once."""
    found = await hosting.repositories.get(repo)
    made = await hosting.token(found, body.permission, body.expires_in_s, url_of(request))
    data = {"token_id": made.token_id, "permission": body.permission}
    await hosting.identities.record(by, "git.token.create", found.id, data=data)
    return answer(made, 201)


@router.post("/{repo}/gc", response_model=RepoInfo, summary="Clean a repository up now")
async def clean(repo: RepoPath, request: Request, hosting: Hosting) -> Response:
    """It happens by itself; this is for those who measure."""
    found = await hosting.repositories.get(repo)
    await hosting.upkeep.clean(found, now=True)
    return answer(await hosting.info(await hosting.repositories.get(found.id), url_of(request)))


# ── branches ─────────────────────────────────────────────────────────────────────────────────────────────────────


@router.get("/{repo}/branches", response_model=Page[BranchInfo], summary="List branches")
async def branches(repo: RepoPath, hosting: Hosting) -> Response:
    return answer(Page[BranchInfo](items=await hosting.refs.branches(await hosting.repositories.get(repo))))


@router.post("/{repo}/branches", status_code=201, response_model=BranchInfo, summary="Create a branch")
async def create_branch(
    repo: RepoPath, body: Annotated[BranchCreate, Body(examples=[{"name": "fix"}])], hosting: Hosting, by: By
) -> Response:
    return answer(await hosting.refs.create_branch(await hosting.repositories.get(repo), body, by), 201)


@router.get("/{repo}/branches/{branch:path}", response_model=BranchInfo, summary="Get a branch")
async def branch(repo: RepoPath, branch: str, hosting: Hosting) -> Response:
    return answer(await hosting.refs.branch(await hosting.repositories.get(repo), branch))


@router.put("/{repo}/branches/{branch:path}", response_model=BranchInfo, summary="Point a branch elsewhere")
async def update_branch(repo: RepoPath, branch: str, body: BranchUpdate, hosting: Hosting, by: By) -> Response:
    return answer(await hosting.refs.update_branch(await hosting.repositories.get(repo), branch, body, by))


@router.delete("/{repo}/branches/{branch:path}", status_code=204, summary="Delete a branch")
async def delete_branch(repo: RepoPath, branch: str, hosting: Hosting, by: By) -> Response:
    """Not the default one."""
    await hosting.refs.delete_branch(await hosting.repositories.get(repo), branch, by)
    return done()


# ── tags ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@router.get("/{repo}/tags", response_model=Page[TagInfo], summary="List tags")
async def tags(repo: RepoPath, hosting: Hosting) -> Response:
    return answer(Page[TagInfo](items=await hosting.refs.tags(await hosting.repositories.get(repo))))


@router.post("/{repo}/tags", status_code=201, response_model=TagInfo, summary="Create a tag")
async def create_tag(
    repo: RepoPath, body: Annotated[TagCreate, Body(examples=[{"name": "v1"}])], hosting: Hosting, by: By
) -> Response:
    """With a message it is an annotated one."""
    return answer(await hosting.refs.create_tag(await hosting.repositories.get(repo), body, by), 201)


@router.get("/{repo}/tags/{tag:path}", response_model=TagInfo, summary="Get a tag")
async def tag(repo: RepoPath, tag: str, hosting: Hosting) -> Response:
    return answer(await hosting.refs.tag(await hosting.repositories.get(repo), tag))


@router.delete("/{repo}/tags/{tag:path}", status_code=204, summary="Delete a tag")
async def delete_tag(repo: RepoPath, tag: str, hosting: Hosting, by: By) -> Response:
    await hosting.refs.delete_tag(await hosting.repositories.get(repo), tag, by)
    return done()
