"""Identities, their tokens, and what they may do."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from starlette.responses import Response

from forkyard.compat.freestyle.calls import ACCOUNT, Body, Call, done, time_of
from forkyard.compat.freestyle.errors import Refused
from forkyard.compat.freestyle.git import new_name
from forkyard.control.plane import ControlPlane
from forkyard.errors import NotFound, SandboxNotFound
from forkyard.git.hosting import GitHosting
from forkyard.models.identities import IdentityInfo, RepoGrantInfo, SandboxGrantInfo

MOST = 10_000


class _RepoGrant(Body):
    permission: Literal["read", "write"]


class _VmGrant(Body):
    users: list[str] | None = Field(None, alias="allowedUsers", max_length=64)


class Identities:
    def __init__(self, control: ControlPlane, hosting: GitHosting) -> None:
        self._identities = control.identities
        self._hosting = hosting

    async def listed(self, call: Call) -> Response:
        limit, offset = call.number("limit", 100, 1, MOST), call.number("offset", 0, 0, MOST)
        found = await self._identities.list()
        page = found[offset : offset + limit]
        rows = [{"id": one.id, "managed": one.managed} for one in page]
        return done({"identities": rows, "offset": offset + len(page), "total": len(found)})

    async def create(self, call: Call) -> Response:
        made = await self._identities.create(new_name())
        await self._identities.record(call.who, "identity.create", made.id, data={"name": made.name})
        return done({"id": made.id, "managed": made.managed})

    async def delete(self, call: Call) -> Response:
        found = await self._found(call)
        if found.managed:
            raise Refused(403, "CANNOT_DELETE_MANAGED_IDENTITY", "this identity is one that Forkyard needs itself")
        await self._identities.delete(found.id)
        await self._identities.record(call.who, "identity.delete", found.id)
        return done()

    async def _found(self, call: Call) -> IdentityInfo:
        try:
            return await self._identities.get(call.path["identity"])
        except NotFound as error:
            raise Refused(404, "IDENTITY_NOT_FOUND", error.message) from error

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def tokens(self, call: Call) -> Response:
        found = await self._identities.list_tokens((await self._found(call)).id)
        return done({"tokens": [{"id": one.id} for one in found]})

    async def create_token(self, call: Call) -> Response:
        identity = await self._found(call)
        made = await self._identities.create_token(identity.id)
        await self._identities.record(call.who, "identity.token.create", identity.id, data={"token_id": made.id})
        return done({"id": made.id, "token": made.token})

    async def revoke_token(self, call: Call) -> Response:
        identity, token_id = await self._found(call), call.path["token"]
        await self._identities.revoke_token(identity.id, token_id)
        await self._identities.record(call.who, "identity.token.revoke", identity.id, data={"token_id": token_id})
        return done()

    # ── repositories ─────────────────────────────────────────────────────────────────────────────────────────────

    async def repos(self, call: Call) -> Response:
        limit, offset = call.number("limit", MOST, 1, MOST), call.number("offset", 0, 0, MOST)
        grants = await self._identities.repo_grants((await self._found(call)).id)
        rows: list[dict[str, Any]] = []
        for grant in grants[offset : offset + limit]:
            record = (await self._hosting.repositories.get(grant.repo_id)).record
            rows.append(
                {
                    "id": record.id,
                    "name": record.name,
                    "accountId": ACCOUNT,
                    "permissions": grant.permission,
                    "visibility": record.visibility,
                }
            )
        return done({"repositories": rows, "offset": offset + len(rows), "total": len(grants)})

    async def repo(self, call: Call) -> Response:
        grant = await self._repo_grant(call)
        return done(_repo_row(grant))

    async def grant_repo(self, call: Call) -> Response:
        if await self._repo_grant_or_none(call) is not None:
            raise Refused(409, "PERMISSION_ALREADY_EXISTS", "this identity has a permission on it; update that")
        return await self._put_repo(call)

    async def update_repo(self, call: Call) -> Response:
        await self._repo_grant(call)
        return await self._put_repo(call)

    async def _put_repo(self, call: Call) -> Response:
        body = await call.body(_RepoGrant)
        identity, repo = await self._found(call), await self._hosting.repositories.get(call.path["repo"])
        grant = await self._identities.grant_repo(identity.id, repo.id, body.permission, by=call.who.id)
        data = {"repo_id": repo.id, "permission": body.permission}
        await self._identities.record(call.who, "identity.grant", identity.id, data=data)
        return done(_repo_row(grant))

    async def revoke_repo(self, call: Call) -> Response:
        grant = await self._repo_grant(call)
        await self._identities.revoke_repo(grant.identity_id, grant.repo_id)
        data = {"repo_id": grant.repo_id}
        await self._identities.record(call.who, "identity.revoke", grant.identity_id, data=data)
        return done()

    async def _repo_grant(self, call: Call) -> RepoGrantInfo:
        found = await self._repo_grant_or_none(call)
        if found is None:
            raise Refused(404, "PERMISSION_NOT_FOUND", "this identity has no permission on this repository")
        return found

    async def _repo_grant_or_none(self, call: Call) -> RepoGrantInfo | None:
        repo = await self._hosting.repositories.get(call.path["repo"])
        grants = await self._identities.repo_grants((await self._found(call)).id)
        return next((grant for grant in grants if grant.repo_id == repo.id), None)

    # ── VMs ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def vms(self, call: Call) -> Response:
        limit, offset = call.number("limit", 100, 1, MOST), call.number("offset", 0, 0, MOST)
        found = await self._identities.sandbox_grants((await self._found(call)).id)
        page = found[offset : offset + limit]
        return done(
            {"permissions": [_vm_row(grant) for grant in page], "offset": offset + len(page), "total": len(found)}
        )

    async def vm(self, call: Call) -> Response:
        return done(_vm_row(await self._vm_grant(call)))

    async def grant_vm(self, call: Call) -> Response:
        if await self._vm_grant_or_none(call) is not None:
            raise Refused(409, "PERMISSION_ALREADY_EXISTS", "this identity has a permission on it; update that")
        return await self._put_vm(call)

    async def update_vm(self, call: Call) -> Response:
        await self._vm_grant(call)
        return await self._put_vm(call)

    async def _put_vm(self, call: Call) -> Response:
        body = await call.body(_VmGrant)
        identity, vm = await self._found(call), call.path["vm_id"]
        try:
            grant = await self._identities.grant_sandbox(identity.id, vm, body.users, by=call.who.id)
        except SandboxNotFound as error:
            raise Refused(404, "VM_NOT_FOUND", error.message) from error
        data = {"sandbox_id": vm, "allowed_users": body.users}
        await self._identities.record(call.who, "identity.grant", identity.id, data=data)
        return done(_vm_row(grant))

    async def revoke_vm(self, call: Call) -> Response:
        grant = await self._vm_grant(call)
        await self._identities.revoke_sandbox(grant.identity_id, grant.sandbox_id)
        data = {"sandbox_id": grant.sandbox_id}
        await self._identities.record(call.who, "identity.revoke", grant.identity_id, data=data)
        return done()

    async def _vm_grant(self, call: Call) -> SandboxGrantInfo:
        found = await self._vm_grant_or_none(call)
        if found is None:
            raise Refused(404, "VM_PERMISSION_NOT_FOUND", "this identity has no permission on this VM")
        return found

    async def _vm_grant_or_none(self, call: Call) -> SandboxGrantInfo | None:
        grants = await self._identities.sandbox_grants((await self._found(call)).id)
        return next((grant for grant in grants if grant.sandbox_id == call.path["vm_id"]), None)


def _repo_row(grant: RepoGrantInfo) -> dict[str, Any]:
    return {"identity": grant.identity_id, "repo": grant.repo_id, "accessLevel": grant.permission}


def _vm_row(grant: SandboxGrantInfo) -> dict[str, Any]:
    return {
        "id": f"{grant.identity_id}-{grant.sandbox_id}",
        "vmId": grant.sandbox_id,
        "identityId": grant.identity_id,
        "allowedUsers": grant.allowed_users,
        "grantedAt": time_of(grant.granted_at),
        "grantedBy": grant.granted_by,
    }
