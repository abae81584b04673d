"""Identities: who an agent is, its tokens, what it may do; and the audit log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Query, Response

from forkyard.api.access import By, Hosting
from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute, Control
from forkyard.api.problem import documented
from forkyard.errors import NotFound, RepoNotFound, SandboxNotFound
from forkyard.models import Page
from forkyard.models.identities import (
    AuditEntry,
    IdentityCreate,
    IdentityInfo,
    RepoGrant,
    RepoGrantInfo,
    SandboxGrant,
    SandboxGrantInfo,
    TokenCreate,
    TokenCreated,
    TokenInfo,
    WhoAmI,
)

router = APIRouter(tags=["identities"], route_class=BoundedRoute)
_MISSING = documented(NotFound)
_I = "/identities/{identity_id}"


@router.get("/whoami", response_model=WhoAmI, summary="Whose key or token this is")
async def whoami(by: By) -> Response:
    return answer(by.whoami())


@router.get("/identities", response_model=Page[IdentityInfo], summary="List identities")
async def list_(
    control: Control, managed: Annotated[bool, Query(description="Also those Forkyard made for itself.")] = False
) -> Response:
    return answer(Page[IdentityInfo](items=await control.identities.list(managed=managed)))


@router.post("/identities", status_code=201, response_model=IdentityInfo, summary="Create an identity")
async def create(
    body: Annotated[IdentityCreate, Body(examples=[{"name": "reviewer"}])], control: Control, by: By
) -> Response:
    """It may do nothing until it is granted something."""
    made = await control.identities.create(body.name)
    await control.identities.record(by, "identity.create", made.id, data={"name": body.name})
    return answer(made, 201)


@router.get(_I, response_model=IdentityInfo, summary="Get an identity", responses=_MISSING)
async def get(identity_id: str, control: Control) -> Response:
    return answer(await control.identities.get(identity_id))


@router.delete(_I, status_code=204, summary="Delete an identity, its tokens and permissions", responses=_MISSING)
async def delete(identity_id: str, control: Control, by: By) -> Response:
    await control.identities.delete(identity_id)
    await control.identities.record(by, "identity.delete", identity_id)
    return done()


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────


@router.get(f"{_I}/tokens", response_model=Page[TokenInfo], summary="List tokens", responses=_MISSING)
async def tokens(identity_id: str, control: Control) -> Response:
    return answer(Page[TokenInfo](items=list(await control.identities.list_tokens(identity_id))))


@router.post(f"{_I}/tokens", status_code=201, response_model=TokenCreated, summary="Create a token", responses=_MISSING)
async def create_token(
    identity_id: str,
    control: Control,
    by: By,
    body: Annotated[TokenCreate, Body(examples=[{"expires_in_s": 3600}])] = TokenCreate(),  # noqa: B008
) -> Response:
    """The answer shows the token this once. It is good for the API, for git (as the password) and for SSH."""
    made = await control.identities.create_token(
        identity_id, name=body.name, expires_in_s=body.expires_in_s, sandbox_id=body.sandbox_id
    )
    await control.identities.record(by, "identity.token.create", identity_id, data={"token_id": made.id})
    return answer(made, 201)


@router.delete(f"{_I}/tokens/{{token_id}}", status_code=204, summary="Revoke a token", responses=_MISSING)
async def revoke_token(identity_id: str, token_id: str, control: Control, by: By) -> Response:
    """At once."""
    await control.identities.revoke_token(identity_id, token_id)
    await control.identities.record(by, "identity.token.revoke", identity_id, data={"token_id": token_id})
    return done()


# ── permissions ──────────────────────────────────────────────────────────────────────────────────────────────────


@router.get(
    f"{_I}/permissions/repos", response_model=Page[RepoGrantInfo], summary="List its repositories", responses=_MISSING
)
async def repo_grants(identity_id: str, control: Control) -> Response:
    return answer(Page[RepoGrantInfo](items=list(await control.identities.repo_grants(identity_id))))


@router.put(
    f"{_I}/permissions/repos/{{repo}}",
    response_model=RepoGrantInfo,
    summary="Let it read, or read and write, a repository",
    responses=documented(NotFound, RepoNotFound),
)
async def grant_repo(
    identity_id: str, repo: str, body: RepoGrant, control: Control, hosting: Hosting, by: By
) -> Response:
    repo_id = (await hosting.repositories.get(repo)).id
    made = await control.identities.grant_repo(identity_id, repo_id, body.permission, by=by.id)
    data = {"repo_id": repo_id, "permission": body.permission}
    await control.identities.record(by, "identity.grant", identity_id, data=data)
    return answer(made)


@router.delete(
    f"{_I}/permissions/repos/{{repo}}",
    status_code=204,
    summary="Take a repository from it",
    responses=documented(NotFound, RepoNotFound),
)
async def revoke_repo(identity_id: str, repo: str, control: Control, hosting: Hosting, by: By) -> Response:
    repo_id = (await hosting.repositories.get(repo)).id
    await control.identities.revoke_repo(identity_id, repo_id)
    await control.identities.record(by, "identity.revoke", identity_id, data={"repo_id": repo_id})
    return done()


@router.get(
    f"{_I}/permissions/sandboxes",
    response_model=Page[SandboxGrantInfo],
    summary="List its sandboxes",
    responses=_MISSING,
)
async def sandbox_grants(identity_id: str, control: Control) -> Response:
    return answer(Page[SandboxGrantInfo](items=list(await control.identities.sandbox_grants(identity_id))))


@router.put(
    f"{_I}/permissions/sandboxes/{{sandbox_id}}",
    response_model=SandboxGrantInfo,
    summary="Let it use a sandbox",
    responses=documented(NotFound, SandboxNotFound),
)
async def grant_sandbox(identity_id: str, sandbox_id: str, body: SandboxGrant, control: Control, by: By) -> Response:
    """Commands, terminals and files, as the users it is allowed to be. Not to delete, fork or resize it."""
    made = await control.identities.grant_sandbox(identity_id, sandbox_id, body.allowed_users, by=by.id)
    data = {"sandbox_id": sandbox_id, "allowed_users": body.allowed_users}
    await control.identities.record(by, "identity.grant", identity_id, data=data)
    return answer(made)


@router.delete(
    f"{_I}/permissions/sandboxes/{{sandbox_id}}", status_code=204, summary="Take a sandbox from it", responses=_MISSING
)
async def revoke_sandbox(identity_id: str, sandbox_id: str, control: Control, by: By) -> Response:
    await control.identities.revoke_sandbox(identity_id, sandbox_id)
    await control.identities.record(by, "identity.revoke", identity_id, data={"sandbox_id": sandbox_id})
    return done()


@router.get("/audit", response_model=Page[AuditEntry], summary="Who did what, newest first")
async def audit(
    control: Control,
    actor_id: Annotated[str | None, Query(max_length=64, description="An identity or an API key.")] = None,
    action: Annotated[str | None, Query(max_length=64)] = None,
    resource: Annotated[str | None, Query(max_length=256, description="Id of a repository or sandbox.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """Everything identities do, and what changes identities or repositories."""
    page = await control.identities.audit(
        actor_id=actor_id, action=action, resource=resource, limit=limit, cursor=cursor
    )
    return answer(page)
