"""Domains of users: mapped to a port of a sandbox once a TXT record has shown whose they are.

Owns: which names may be mapped, and the look-up of the record. Never does: HTTP (`gateway`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime

import dns.asyncresolver
import dns.exception
import dns.resolver

from forkyard.control.ground import Ground
from forkyard.control.previews import Previews
from forkyard.errors import Conflict, DomainNotFound, DomainUnverified, InvalidRequest, OperationTimeout
from forkyard.models.network import DomainCreate, DomainInfo, DomainMap
from forkyard.store.records import DomainRecord

RECORD_PREFIX = "_forkyard"
#: What clients of other services tell their users to set.
OTHER_PREFIXES = ("_freestyle_custom_hostname",)
LOOKUP_S = 10.0
_OURS = "localhost"


class Domains:
    def __init__(self, ground: Ground, previews: Previews) -> None:
        self._ground = ground
        self._previews = previews
        #: Name servers asked for the record, as (address, port). Empty: those of this machine.
        self.nameservers: Sequence[tuple[str, int]] = ()
        self._news: asyncio.Event | None = None
        self._known: dict[str, DomainRecord] = {}

    async def add(self, request: DomainCreate) -> DomainInfo:
        """A name below one that is verified is so too."""
        self._check_name(request.domain)
        if request.sandbox_id is not None:
            await self._ground.record(request.sandbox_id)
        token = "forkyard-" + secrets.token_hex(16)
        now = datetime.now(UTC)
        verified_at = now if await self.covered(request.domain) else None
        record = DomainRecord(request.domain, request.sandbox_id, request.port, token, verified_at, now)
        if not await self._ground.store.add_domain(record):
            raise Conflict(
                f"the domain {request.domain} is added already; map it to another sandbox with "
                f"`forkyard domains map {request.domain} ID PORT`"
            )
        return domain_info(record)

    async def map(self, domain: str, request: DomainMap) -> DomainInfo:
        """Requests that come from now on go there. Those under way end where they began."""
        await self._ground.record(request.sandbox_id)
        mapped = await self._ground.store.map_domain(domain.lower(), request.sandbox_id, request.port)
        await self.refresh()
        return domain_info(_there(mapped, domain))

    async def unmap(self, domain: str) -> DomainInfo:
        """It stays, and so does that it was verified."""
        unmapped = await self._ground.store.map_domain(domain.lower(), None, None)
        await self.refresh()
        return domain_info(_there(unmapped, domain))

    async def verify(self, domain: str) -> DomainInfo:
        """Look for the record. A domain that was verified stays so."""
        record = _there(await self.find(domain.lower()), domain)
        if record.verified_at is None:
            found = [text for name in _record_names(record.domain) for text in await self._lookup(name)]
            if record.token not in found:
                seen = f"it holds {', '.join(map(repr, found[:3]))}" if found else "there is none"
                raise DomainUnverified(
                    f"the TXT record {_record_name(record.domain)} must hold {record.token!r}, and {seen}; set it where "
                    "the domain is managed, wait until it is published, then verify again",
                    record_name=_record_name(record.domain),
                    record_value=record.token,
                )
            record = _there(await self._ground.store.verify_domain(record.domain), domain)
            await self.refresh()
        return domain_info(record)

    async def remove(self, domain: str) -> None:
        if not await self._ground.store.remove_domain(domain.lower()):
            raise _missing(domain)
        await self.refresh()

    async def list(self) -> list[DomainInfo]:
        return [domain_info(record) for record in await self._ground.store.list_domains()]

    async def covered(self, domain: str) -> bool:
        """Whether a name above it is verified."""
        parts = domain.lower().split(".")
        above = {".".join(parts[start:]) for start in range(1, len(parts) - 1)}
        return any(one.verified for one in await self.list() if one.domain in above)

    async def find(self, domain: str) -> DomainRecord | None:
        """Costs no query unless something was committed since the last."""
        if not self.fresh:
            await self.refresh()
        return self.known(domain)

    @property
    def fresh(self) -> bool:
        """Whether `known` says what is."""
        return self._news is self._ground.store.news

    def known(self, domain: str) -> DomainRecord | None:
        return self._known.get(domain)

    async def refresh(self) -> None:
        news = self._ground.store.news
        self._known = {record.domain: record for record in await self._ground.store.list_domains()}
        self._news = news

    def is_verified(self, domain: str) -> bool:
        """As far as is known at once: of use in a TLS handshake, which cannot wait."""
        record = self._known.get(domain)
        return record is not None and record.verified_at is not None

    def _check_name(self, domain: str) -> None:
        ours = self._previews.address.domain
        for suffix in {_OURS, ours}:
            if domain == suffix or domain.endswith(f".{suffix}"):
                raise InvalidRequest(f"{domain} is below {suffix}, where previews have their names", field="domain")
        if "*" in domain:
            raise InvalidRequest(f"{domain}: a wildcard cannot be mapped; add each name by itself", field="domain")
        if "." not in domain or _is_address(domain):
            raise InvalidRequest(f"{domain} is no domain; one looks like app.example.com", field="domain")

    async def _lookup(self, name: str) -> Sequence[str]:
        try:
            resolver = dns.asyncresolver.Resolver(configure=not self.nameservers)
            if self.nameservers:
                resolver.nameservers = [address for address, _ in self.nameservers]
                resolver.nameserver_ports = dict(self.nameservers)
            async with asyncio.timeout(LOOKUP_S):
                answer = await resolver.resolve(name, "TXT", lifetime=LOOKUP_S, search=False)
            return [b"".join(row.strings).decode("utf-8", "replace") for row in answer]
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return []
        except (TimeoutError, dns.exception.DNSException, OSError) as error:
            raise OperationTimeout(f"the TXT record {name} could not be looked up: {error}; try again later") from error


def domain_info(record: DomainRecord) -> DomainInfo:
    return DomainInfo(
        domain=record.domain,
        sandbox_id=record.sandbox_id,
        port=record.port,
        verified=record.verified_at is not None,
        record_name=_record_name(record.domain),
        record_value=record.token,
        created_at=record.created_at,
    )


def _record_name(domain: str) -> str:
    return f"{RECORD_PREFIX}.{domain}"


def _record_names(domain: str) -> list[str]:
    return [f"{prefix}.{domain}" for prefix in (RECORD_PREFIX, *OTHER_PREFIXES)]


def _there(record: DomainRecord | None, domain: str) -> DomainRecord:
    if record is None:
        raise _missing(domain)
    return record


def _missing(domain: str) -> DomainNotFound:
    return DomainNotFound(f"there is no domain {domain!r} here; `forkyard domains ls` lists those there are")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
