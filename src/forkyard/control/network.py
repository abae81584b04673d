"""The network of a sandbox: from its record to what its door enforces.

Owns: the `Network` of a record (policy, secrets opened, services, budget spent), telling the host of changes, which
guests trust our certificate authority, and the bytes each sandbox has moved over all its machines. Never does: deciding
about a connection (`net`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial

import structlog

from forkyard.control.ground import Ground, ended, known, machine, refusal
from forkyard.control.secrets import Secrets
from forkyard.control.trust import distrust, environment, trust
from forkyard.errors import ForkyardError, InvalidRequest, OperationTimeout, SandboxNotFound
from forkyard.hosts.base import Incarnation
from forkyard.lifecycle import ENDED, State
from forkyard.models.network import MAX_RULES, EgressRule, NetworkPolicy
from forkyard.net.authority import Authority
from forkyard.net.base import Header, Injection, Network, Service, Traffic
from forkyard.net.recordings import Recordings
from forkyard.store.records import SandboxRecord

log = structlog.get_logger(__name__)

SET_DEADLINE_S = 30.0
TRUST_DEADLINE_S = 60.0
#: Traffic is written down this often; a daemon that is killed forgets so much of it.
SAVE_EVERY_S = 5.0
_RESTORED_AT_ONCE = 16

#: Names inside a sandbox that lead to something on this host.
Services = Callable[[SandboxRecord], Awaitable[Mapping[str, Service]]]


class Networks:
    def __init__(
        self, ground: Ground, secrets: Secrets, authority: Authority | None, recordings: Recordings | None
    ) -> None:
        self._ground = ground
        self._secrets = secrets
        self._ca_pem = None if authority is None else authority.certificate_pem
        self._recordings = recordings
        #: Others may add to what every sandbox reaches.
        self.services: list[Services] = []
        self._seen: dict[Incarnation, Traffic] = {}
        self._unsaved: dict[str, Traffic] = {}
        self._saved_at = ground.activity.clock()

    # ── what a machine is given ──────────────────────────────────────────────────────────────────────────────────

    async def of(self, record: SandboxRecord, *, fresh: bool = False) -> Network:
        """`fresh`: for a new machine, whose door counts from zero."""
        injections = {}
        for name, secret in record.secrets.items():
            try:
                value = await self._secrets.value(name, secret)
            except ForkyardError as error:  # the sandbox lives on without it
                log.error("secret left out", sandbox=record.id, secret=name, error=error.message)
                continue
            if value is not None:
                injections[name] = Injection(secret.placeholder, value, secret.hosts, secret.header, secret.format)
        headers = [header async for header in self._headers(record)]
        services: dict[str, Service] = {}
        for some in self.services:
            services |= await some(record)
        total = self.traffic(record)
        spent_bytes = total.bytes_out + total.bytes_in
        if not fresh:  # its door counts these itself; one that is shut has none
            here = self._ground.host.traffic(machine(record))
            spent_bytes -= here.bytes_out + here.bytes_in
        return Network(record.network.egress, injections, services, tuple(headers), max(0, spent_bytes))

    async def _headers(self, record: SandboxRecord) -> AsyncIterator[Header]:
        for wanted in record.network.egress.headers:
            try:
                header = await self._secrets.header(wanted)
            except ForkyardError as error:  # the sandbox lives on without it
                log.error("header left out", sandbox=record.id, header=wanted.name, error=error.message)
                continue
            if header is not None:
                yield header

    def env(self, record: SandboxRecord) -> dict[str, str]:
        """For every exec: its own, and where secrets are meant, their placeholders."""
        return {
            **(environment() if intercepts(record) else {}),
            **record.env,
            **{name: secret.placeholder for name, secret in record.secrets.items()},
        }

    # ── trust ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def prepare(self, record: SandboxRecord, incarnation: Incarnation, *, unsure: bool = False) -> None:
        """A machine has just come to life: its guest trusts our authority if its network looks into TLS, else not.
        `unsure`: what it was told before is not what the record says. A guest that cannot be told lives on; it is told
        when it next comes to life."""
        wanted = intercepts(record)
        if self._ca_pem is None or (record.trusts_ca is wanted and not unsure):
            return
        try:
            guest = self._ground.host.guest(incarnation)
            async with asyncio.timeout(TRUST_DEADLINE_S):
                await (trust(guest, self._ca_pem) if wanted else distrust(guest, self._ca_pem))
        except (ForkyardError, TimeoutError) as error:
            log.warning("the guest was not told whom to trust", sandbox=record.id, error=str(error))
            await self._ground.store.note_trust(record.id, None)  # it may know half of it
        else:
            await self._ground.store.note_trust(record.id, wanted)

    async def check(self, network: NetworkPolicy) -> None:
        """Before it is taken on."""
        await self._secrets.check_headers(network.egress.headers)
        replay = network.egress.replay
        if replay is not None and self._recordings is not None and not self._recordings.exists(replay):
            raise InvalidRequest(
                f"network.egress.replay: there is no recording {replay!r}; record it first, with record={replay!r}, or "
                "see `forkyard recordings ls`",
                field="network.egress.replay",
            )

    # ── changes ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def set(self, sandbox_id: str, network: NetworkPolicy) -> None:
        """From now on, also for open connections; of one that sleeps, when it wakes."""
        network.egress.check_rules()
        await self.check(network)
        await self._change(sandbox_id, lambda _: network)

    async def add_rule(self, sandbox_id: str, rule: EgressRule) -> None:
        """Ahead of the others; what was said of the same destination before is forgotten."""
        if (found := rule.in_vain()) is not None:
            raise InvalidRequest(f"{found[0]}: {found[1]}", field=found[0])
        await self._change(sandbox_id, partial(_with_rule, rule))

    async def _change(self, sandbox_id: str, change: Callable[[NetworkPolicy], NetworkPolicy]) -> None:
        await self._ground.turns.run(sandbox_id, "network", partial(self._changed, sandbox_id, change))

    async def _changed(self, sandbox_id: str, change: Callable[[NetworkPolicy], NetworkPolicy]) -> None:
        ground = self._ground
        record = await ground.record(sandbox_id)
        living = [state for state in State if state not in (State.DELETING, State.DELETED)]
        values = {"network": change(record.network).model_dump(mode="json")}
        if not await ground.store.update_sandbox(sandbox_id, values, states=living):
            raise ended(await ground.record(sandbox_id))
        await self._apply(sandbox_id)

    async def _apply(self, sandbox_id: str) -> None:
        """In its turn, so that no other verb changes the machine meanwhile."""
        record = await self._ground.record(sandbox_id)
        if record.state is not State.RUNNING:
            return
        incarnation = machine(record)
        try:
            async with asyncio.timeout(SET_DEADLINE_S):
                await self._ground.host.set_network(incarnation, await self.of(record))
            await self.prepare(record, incarnation)
        except SandboxNotFound:
            raise refusal(await self._ground.record(sandbox_id), "its machine has just ended") from None
        except TimeoutError:
            raise OperationTimeout(
                f"the new policy of sandbox {sandbox_id} was not in force within {SET_DEADLINE_S:.0f} s; set it again"
            ) from None
        except Exception as error:
            raise known(error, "set network", sandbox_id) from error

    async def renew(self, sandbox_id: str) -> None:
        """Something of its record that makes its network has changed."""
        await self._ground.turns.run(sandbox_id, "network", partial(self._apply, sandbox_id))

    async def secret_changed(self, name: str) -> None:
        """Of the stored secrets; sandboxes that use it get what it is now."""
        for record in await self._ground.store.list_sandboxes(states=[State.RUNNING]):
            named = any(name in header.secret_names for header in record.network.egress.headers)
            if named or (name in record.secrets and record.secrets[name].sealed is None):
                await self._reapply(record.id)

    async def restore(self) -> None:
        """The daemon starts: machines that were taken over reach nothing until this."""
        running = await self._ground.store.list_sandboxes(states=[State.RUNNING])
        limit = asyncio.Semaphore(_RESTORED_AT_ONCE)

        async def one(sandbox_id: str) -> None:
            async with limit:
                await self._reapply(sandbox_id)

        await asyncio.gather(*(one(record.id) for record in running))

    async def _reapply(self, sandbox_id: str) -> None:
        try:
            await self._ground.turns.run(sandbox_id, "network", partial(self._apply, sandbox_id))
        except ForkyardError as error:  # its door stays as it was: shut, if it is an adopted one
            log.error("network not set", sandbox=sandbox_id, error=error.message)

    # ── traffic ──────────────────────────────────────────────────────────────────────────────────────────────────

    def traffic(self, record: SandboxRecord) -> Traffic:
        """Of all its machines, up to now."""
        self.last_look(machine(record))
        self._take_ingress()
        return record.traffic + self._unsaved.get(record.id, Traffic())

    async def moved(self, sandbox_id: str) -> Traffic:
        return self.traffic(await self._ground.record(sandbox_id))

    def last_look(self, incarnation: Incarnation) -> None:
        """Take over what its door has counted by now."""
        now, before = self._ground.host.traffic(incarnation), self._seen.get(incarnation, Traffic())
        if now == before:
            return
        # Less than before: the count began anew, with a machine that was resumed or taken over.
        fresh = now if now.bytes_out < before.bytes_out or now.bytes_in < before.bytes_in else now - before
        self._seen[incarnation] = now
        self._add(incarnation.sandbox_id, fresh)

    def _take_ingress(self) -> None:
        for sandbox_id, fresh in self._ground.ingress.take().items():
            self._add(sandbox_id, fresh)

    def _add(self, sandbox_id: str, fresh: Traffic) -> None:
        self._unsaved[sandbox_id] = self._unsaved.get(sandbox_id, Traffic()) + fresh

    async def look(self, records: list[SandboxRecord]) -> None:
        """Called every second or so with all living sandboxes."""
        current = {machine(record) for record in records if record.state not in ENDED}
        for incarnation in current:
            self.last_look(incarnation)
        for gone in self._seen.keys() - current:
            del self._seen[gone]
        if self._ground.activity.clock() - self._saved_at >= SAVE_EVERY_S:
            await self.save()

    async def save(self) -> None:
        self._take_ingress()
        unsaved, self._unsaved = self._unsaved, {}
        self._saved_at = self._ground.activity.clock()
        if unsaved:
            await self._ground.store.add_traffic(unsaved)


def intercepts(record: SandboxRecord) -> bool:
    egress = record.network.egress
    return bool(record.secrets or egress.headers) or egress.record is not None or egress.replay is not None


def _with_rule(rule: EgressRule, policy: NetworkPolicy) -> NetworkPolicy:
    def same(other: EgressRule) -> bool:
        return (other.domain, other.cidr, other.ports) == (rule.domain, rule.cidr, rule.ports)

    rules = [rule, *(other for other in policy.egress.rules if not same(other))]
    if len(rules) > MAX_RULES:
        raise InvalidRequest(f"a policy has at most {MAX_RULES} rules; set a new one, with fewer", field="rules")
    return policy.model_copy(update={"egress": policy.egress.model_copy(update={"rules": rules})})
