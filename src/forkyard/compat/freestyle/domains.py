"""Domains: shown to be somebody's, mapped to a port of a VM."""

from __future__ import annotations

import contextlib
from typing import Any

from pydantic import Field, ValidationError
from starlette.responses import Response

from forkyard.compat.freestyle.calls import ACCOUNT, Body, Call, done, ours, time_of
from forkyard.compat.freestyle.errors import Refused, not_served
from forkyard.control.plane import ControlPlane
from forkyard.errors import Conflict, DomainNotFound, DomainUnverified, InvalidRequest
from forkyard.models.network import DomainCreate, DomainInfo, DomainMap

MOST = 10_000
#: Names below it are Freestyle's to give away.
FREE = ".style.dev"


class _Domain(Body):
    domain: str = Field(max_length=253)


class _Cancelled(_Domain):
    code: str | None = Field(None, alias="verificationCode")


class _Which(Body):
    id: str | None = None
    domain: str | None = Field(None, max_length=253)


class _Mapping(Body):
    vm: str | None = Field(None, alias="vmId")
    port: int | None = Field(443, alias="vmPort", ge=1, le=65535)
    deployment: str | None = Field(None, alias="deploymentId")


class Domains:
    def __init__(self, control: ControlPlane) -> None:
        self._domains = control.domains

    # ── whose they are ───────────────────────────────────────────────────────────────────────────────────────────

    async def verify(self, call: Call) -> Response:
        """A request for it: the name is kept, with what a TXT record must say."""
        body = await call.body(_Domain, "INVALID_DOMAIN")
        try:
            made = await self._domains.add(DomainCreate(domain=body.domain))
        except Conflict:
            made = await self._found(body.domain)
        except (ValidationError, InvalidRequest) as error:
            raise Refused(400, "INVALID_DOMAIN", f"{body.domain[:253]!r} cannot be a domain here: {error}") from None
        return done({"id": made.domain, "verificationCode": made.record_value})

    async def complete(self, call: Call) -> Response:
        body = await call.body(_Which, "INVALID_DOMAIN")
        try:
            done_one = await self._domains.verify(body.domain or body.id or "")
        except DomainUnverified as error:
            raise Refused(400, "FAILED_TO_VERIFY_DOMAIN", error.message) from error
        return done({"domain": done_one.domain})

    async def verifications(self, _: Call) -> Response:
        rows = [
            {"verificationCode": one.record_value, "domain": one.domain, "createdAt": time_of(one.created_at)}
            for one in await self._domains.list()
            if not one.verified
        ]
        return done(rows)

    async def cancel(self, call: Call) -> Response:
        """Only what is not shown yet: a domain that is verified stays so, and mapped."""
        body = await call.body(_Cancelled, "INVALID_DOMAIN")
        found = await self._found(body.domain)
        if found.verified:
            raise Refused(400, "FAILED_TO_DELETE_VERIFICATION", f"the verification of {found.domain} is complete")
        if body.code is not None and body.code != found.record_value:
            message = f"the verification of {found.domain} has another code than {body.code[:80]!r}"
            raise Refused(404, "VERIFICATION_NOT_FOUND", message)
        await self._domains.remove(found.domain)
        return done({"domain": found.domain, "verificationCode": found.record_value})

    async def listed(self, call: Call) -> Response:
        limit, offset = call.number("limit", 100, 1, MOST), call.number("offset", 0, 0, MOST)
        verified = [one for one in await self._domains.list() if one.verified]
        return done([_domain_row(one) for one in verified[offset : offset + limit]])

    async def certificate(self, call: Call) -> Response:
        """They are made when they are needed."""
        return done({"domain": (await self._verified(call.path["domain"])).domain})

    # ── where they lead ──────────────────────────────────────────────────────────────────────────────────────────

    async def map(self, call: Call) -> Response:
        body = await call.body(_Mapping)
        if body.deployment is not None:
            raise not_served("a domain of a deployment")
        if body.vm is None:
            raise Refused(400, "INVALID_REQUEST", "vmId is needed")
        return done(_mapping_row(await self.mapped(call.path["domain"], body.vm, body.port or 443)))

    async def mapped(self, domain: str, vm: str, port: int) -> DomainInfo:
        await self._verified(domain)
        return await self._domains.map(domain, DomainMap(sandbox_id=vm, port=port))

    async def unmap(self, call: Call) -> Response:
        found = await self._found(call.path["domain"])
        if found.sandbox_id is None:
            raise Refused(404, "FAILED_REMOVE_DOMAIN_MAPPING", f"{found.domain} is mapped to nothing")
        await self._domains.unmap(found.domain)
        return done({"domain": found.domain})

    async def mappings(self, call: Call) -> Response:
        limit, offset = call.number("limit", 10, 1, MOST), call.number("offset", 0, 0, MOST)
        wanted = {given.lower() for name in ("domain", "domainOwnership") if (given := call.query(name)) is not None}
        found = [one for one in await self._domains.list() if one.sandbox_id is not None and wanted <= {one.domain}]
        return done([_mapping_row(one) for one in found[offset : offset + limit]])

    async def _found(self, domain: str) -> DomainInfo:
        for one in await self._domains.list():
            if one.domain == domain.lower():
                return one
        raise DomainNotFound(f"there is no domain {domain[:253]!r} here; begin with its verification")

    async def _verified(self, domain: str) -> DomainInfo:
        if domain.lower().endswith(FREE):
            message = f"names below {FREE[1:]} are not given away here; a VM has an address of its own in `domains`"
            raise Refused(400, "DOMAIN_OWNERSHIP_NOT_VERIFIED", message)
        try:
            found = await self._found(domain)
        except DomainNotFound as error:
            if not await self._domains.covered(domain):
                raise Refused(400, "DOMAIN_OWNERSHIP_NOT_VERIFIED", error.message) from error
            with ours("INVALID_DOMAIN"), contextlib.suppress(Conflict):
                await self._domains.add(DomainCreate(domain=domain))
            found = await self._found(domain)
        if not found.verified:
            message = f"set the TXT record {found.record_name} to {found.record_value}, then complete the verification"
            raise Refused(400, "DOMAIN_OWNERSHIP_NOT_VERIFIED", message)
        return found


def _domain_row(info: DomainInfo) -> dict[str, Any]:
    return {
        "domain": info.domain,
        "accountId": ACCOUNT,
        "createdAt": time_of(info.created_at),
        "id": info.domain,
        "verifiedDns": info.verified,
        "implicitlyOwned": False,
        "deployToDomain": True,
        "manageDns": False,
        "deployToSubdomains": False,
    }


def _mapping_row(info: DomainInfo) -> dict[str, Any]:
    return {
        "id": info.domain,
        "domain": info.domain,
        "vmId": info.sandbox_id,
        "vmPort": info.port,
        "ownershipId": info.domain,
        "createdAt": time_of(info.created_at),
    }
