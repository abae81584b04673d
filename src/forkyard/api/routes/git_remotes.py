"""Remotes that a repository is kept in step with. Each takes an API key, but the hook, which has its own signature."""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from forkyard.api.access import By, Hosting
from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute, upload
from forkyard.api.problem import documented
from forkyard.api.routes.git import RepoPath
from forkyard.errors import (
    Conflict,
    HostFailure,
    InvalidRequest,
    NotFound,
    OperationTimeout,
    RemoteFailed,
    RepoNotFound,
    Unauthenticated,
)
from forkyard.models import Page
from forkyard.models.git_triggers import RefState, RemoteCreate, RemoteCreated, RemoteInfo, RemoteUpdate, SyncReport

#: As much as GitHub sends.
MAX_HOOK_BYTES = 25 * 2**20
#: An event of a pull request is some 30 kB.
MAX_EVENT_BYTES = 2**21
_ERRORS = documented(RepoNotFound, NotFound, Conflict, HostFailure, RemoteFailed, OperationTimeout)

router = APIRouter(prefix="/git/repos/{repo}/remotes", tags=["git"], route_class=BoundedRoute, responses=_ERRORS)
#: Its body is looked at as it comes, and not kept.
hooks = APIRouter(prefix="/git/repos/{repo}/remotes", tags=["git"])

_EXAMPLE = {"name": "github", "url": "https://github.com/example/app.git", "secret": "GITHUB_TOKEN"}


@router.post("", status_code=201, response_model=RemoteCreated, summary="Keep a repository in step with a remote")
async def create(
    repo: RepoPath, hosting: Hosting, by: By, body: Annotated[RemoteCreate, Body(examples=[_EXAMPLE])]
) -> Response:
    """The first sync begins at once."""
    found = await hosting.repositories.get(repo)
    made = await hosting.sync.create(found, body)
    await hosting.identities.record(by, "git.remote.create", found.id, data={"name": made.name, "url": made.url})
    return answer(made, 201)


@router.get("", response_model=Page[RemoteInfo], summary="List remotes")
async def list_(repo: RepoPath, hosting: Hosting) -> Response:
    return answer(Page[RemoteInfo](items=await hosting.sync.list(await hosting.repositories.get(repo))))


@router.get("/{name}", response_model=RemoteInfo, summary="Get a remote")
async def get(repo: RepoPath, name: str, hosting: Hosting) -> Response:
    return answer(await hosting.sync.get(await hosting.repositories.get(repo), name))


@router.patch("/{name}", response_model=RemoteInfo, summary="Change a remote")
async def update(
    repo: RepoPath, name: str, hosting: Hosting, by: By, body: Annotated[RemoteUpdate, Body(examples=[{"name": "hub"}])]
) -> Response:
    """Its name, its url, its credential and the rest. It is synced at once."""
    found = await hosting.repositories.get(repo)
    changed = await hosting.sync.update(found, name, body)
    data = {"name": name, "changed": sorted(body.model_fields_set)}
    await hosting.identities.record(by, "git.remote.update", found.id, data=data)
    return answer(changed)


@router.delete("/{name}", status_code=204, summary="Keep in step with it no longer")
async def delete(repo: RepoPath, name: str, hosting: Hosting, by: By) -> Response:
    """Both sides stay as they are."""
    found = await hosting.repositories.get(repo)
    await hosting.sync.delete(found, name)
    await hosting.identities.record(by, "git.remote.delete", found.id, data={"name": name})
    return done()


@router.get("/{name}/refs", response_model=Page[RefState], summary="How branches and tags stood at the last sync")
async def refs(repo: RepoPath, name: str, hosting: Hosting) -> Response:
    """Those not in step first."""
    return answer(Page[RefState](items=[*await hosting.sync.refs(await hosting.repositories.get(repo), name)]))


@router.post("/{name}/sync", response_model=SyncReport, summary="Sync now")
async def sync(repo: RepoPath, name: str, hosting: Hosting) -> Response:
    """What has diverged is reported and left."""
    return answer(await hosting.sync.now(await hosting.repositories.get(repo), name))


@hooks.post(
    "/{name}/hook",
    status_code=202,
    response_class=Response,
    summary="For the other host: something has changed",
    responses=documented(Unauthenticated, InvalidRequest),
    openapi_extra={"security": []},
)
async def hook(repo: RepoPath, name: str, request: Request, hosting: Hosting) -> Response:
    """Signed with the hook secret as GitHub does it (X-Hub-Signature-256). Whatever it says, the remote is looked at. What
    it says of a pull request begins a review, if the remote has a plan for one; told twice, it is one review."""
    found = await hosting.sync.hook_secret(repo, name)
    body = hmac.new(b"nobody" if found is None else found[1].encode(), digestmod=hashlib.sha256)
    size, kept = 0, bytearray()
    reviews = request.headers.get("x-github-event") == "pull_request"
    async for chunk in upload(request):
        size += len(chunk)
        if size > MAX_HOOK_BYTES:
            raise InvalidRequest(f"the body is larger than {MAX_HOOK_BYTES} bytes")
        body.update(chunk)
        if reviews and size <= MAX_EVENT_BYTES:
            kept += chunk
    hosting.sync.hooked(found, request.headers.get("x-hub-signature-256", ""), body)
    remote = None if found is None else hosting.sync.tracked(found)
    if reviews and remote is not None and remote.review is not None:
        begun = await hosting.reviews.told(remote, bytes(kept))
        return Response(status_code=202) if begun is None else answer(begun, 202)
    return Response(status_code=202)
