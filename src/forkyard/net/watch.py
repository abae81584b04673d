"""What the parts of one door share: the policy in force, the meter, which name gave which address, and the records."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from typing import Literal

import structlog

from forkyard.errors import ForkyardError
from forkyard.guest.base import SocketOwner
from forkyard.models.network import EgressRecord, Verdict
from forkyard.net.base import Network, OwnerOf
from forkyard.net.denied import DeniedNames
from forkyard.net.limits import Bucket, Meter
from forkyard.net.outside import Outside, Request
from forkyard.net.policy import Decision, Gate

log = structlog.get_logger(__name__)

_REMEMBERED = 4096
_REMEMBERED_S = 6 * 3600.0
_NAMES_PER_ADDRESS = 16
_OWNER_TIMEOUT_S = 2.0
_OWNERS_ASKED_AT_ONCE = 32
#: Records of refusals beyond this rate are counted and not written one by one.
_RECORDS_PER_S, _RECORDS_BURST = 200.0, 2000.0
#: So are HTTP requests: of one connection there may be any number.
_REQUESTS_PER_S, _REQUESTS_BURST = 50.0, 500.0
_PATH_CHARS = 512
#: Names that no rule spells out can carry data out, letter by letter: so few new ones, and none that is very long.
_NEW_NAMES_PER_S, _NEW_NAMES_BURST = 2.0, 200.0
_LONGEST_UNNAMED = 128
#: What is proposed to those who had none.
_SOME_BUDGET_BYTES = 2**20
#: Stand for names that are only replayed. Nothing outside has such an address (RFC 2544).
_MADE_UP = IPv4Address("198.18.0.1")
_MADE_UP_COUNT = 1 << 16

Sink = Callable[[EgressRecord], None]


class PrivateOnly(Exception):
    """All addresses of a name are such that only a rule can open. The message is for the user."""


class Names:
    """Which names gave which address, for a while. A guest cannot make it grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._names: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._made_up: OrderedDict[str, str] = OrderedDict()
        self._next = 0

    def learn(self, name: str, addresses: list[str]) -> None:
        for address in addresses:
            names = self._names.setdefault(address, {})
            names.pop(name, None)
            names[name] = self._clock()
            if len(names) > _NAMES_PER_ADDRESS:
                del names[next(iter(names))]
            self._names.move_to_end(address)
        while len(self._names) > _REMEMBERED:
            self._names.popitem(last=False)

    def of(self, address: str) -> list[str]:
        """Latest first."""
        oldest = self._clock() - _REMEMBERED_S
        return [name for name, at in reversed(self._names.get(address, {}).items()) if at > oldest]

    def make_up(self, name: str) -> str:
        """An address for a name that is never looked up."""
        if (address := self._made_up.get(name)) is None:
            address = str(_MADE_UP + self._next)
            self._next = (self._next + 1) % _MADE_UP_COUNT
            self._made_up[name] = address
            if len(self._made_up) > _REMEMBERED:
                self._made_up.popitem(last=False)
        self.learn(name, [address])
        return address


def is_own(address: IPv4Address) -> bool:
    """Whether it is an address of this host: the kernel would speak to it from itself. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))
            return address.is_loopback or bool(probe.getsockname()[0] == str(address))
        except OSError:
            return False


class Watch:
    def __init__(self, sandbox_id: str, network: Network, owner_of: OwnerOf, sink: Sink, outside: Outside) -> None:
        self.sandbox_id = sandbox_id
        self.outside = outside
        self.meter = Meter()
        self.names = Names()
        self._owner_of = owner_of
        self._owners = asyncio.Semaphore(_OWNERS_ASKED_AT_ONCE)
        self._sink = sink
        self._records = Bucket(_RECORDS_PER_S, _RECORDS_BURST)
        self._unwritten = 0
        self._requests = Bucket(_REQUESTS_PER_S, _REQUESTS_BURST)
        self._unwritten_requests = 0
        self._new_names = Bucket(_NEW_NAMES_PER_S, _NEW_NAMES_BURST)
        self._asked: dict[str, float] = {}
        self._denied = DeniedNames(outside.resolver)
        self.network = network
        self.gate = Gate(sandbox_id, network.egress, outside.presets)
        self.update(network)

    def update(self, network: Network) -> None:
        self.network = network
        self.gate = Gate(self.sandbox_id, network.egress, self.outside.presets)
        self.meter.limit(self.gate.allowance, network.spent_bytes)

    @property
    def replays(self) -> bool:
        return self.network.egress.replay is not None

    async def replayed(self, name: str) -> bool:
        """Whether what is replayed has anything of this host."""
        try:
            return self.outside.intercept is not None and await self.outside.intercept.replays(self.network, name)
        except ForkyardError as error:
            log.error("a recording cannot be read", sandbox_id=self.sandbox_id, error=error.message)
            return False

    def decide(self, name: str | None, address: str, port: int) -> Decision:
        """Without a name: as far as is known where the names lead that are denied (`learn_denied`)."""
        parsed = IPv4Address(address)
        own = is_own(parsed)
        decision = self.gate.connection(name, parsed, port, own=own)
        if decision.unless_named:
            for denied in self._denied.leading_to(self.gate.denied_names, address):
                if not (other := self.gate.connection(denied, parsed, port, own=own)).allowed:
                    return other
        return decision

    async def learn_denied(self) -> None:
        await self._denied.learn(self.gate.denied_names)

    def too_much(self, name: str) -> str | None:
        """Why a name may not be looked up although the policy allows it."""
        if self.gate.exactly(name):
            return None
        if len(name) > _LONGEST_UNNAMED:
            return f"a name of more than {_LONGEST_UNNAMED} letters that no rule spells out"
        now = time.monotonic()
        if now - self._asked.pop(name, now - 1e9) > 3600 and not self._new_names.take():
            return "too many different names in a short time"
        self._asked[name] = now
        if len(self._asked) > 4096:
            del self._asked[next(iter(self._asked))]
        return None

    async def close(self) -> None:
        await self._denied.close()

    async def addresses(self, name: str) -> list[str]:
        """Of an allowed name: those that may be given to the guest. Raises `OSError`, `PrivateOnly`."""
        found = await self.outside.resolver.resolve(name)
        gate = self.gate
        kept = [address for address in found if _answers(gate, name, address)]
        if found and not kept:
            # Nothing but a rule that names the network: a name in somebody else's hands must not open ours.
            raise PrivateOnly(f"{name} leads to {found[0]}, in a private or reserved network; {gate.how(found[0])}")
        self.names.learn(name, kept)
        return kept

    def out_of_budget(self) -> str | None:
        if not self.meter.spent():
            return None
        budget = self.gate.allowance.byte_budget or 0
        more = self.how(f"--budget {max(2 * budget, _SOME_BUDGET_BYTES)}")
        return f"the byte budget of {budget} bytes is used up; {more}"

    def how(self, more: str) -> str:
        """To be told with a refusal by a limit: a command that is complete, and leaves the rest of the policy as it is."""
        return f"for more: `forkyard egress set {self.sandbox_id} {more}`"

    async def owner(
        self, protocol: Literal["tcp", "udp"], source_port: int, address: str, port: int
    ) -> SocketOwner | None:
        """None if the guest does not say, or not in time."""
        with contextlib.suppress(ForkyardError, TimeoutError, OSError):
            async with asyncio.timeout(_OWNER_TIMEOUT_S), self._owners:
                return await self._owner_of(protocol, source_port, address, port)
        return None

    def record(
        self,
        kind: Literal["tcp", "dns"],
        verdict: Verdict,
        reason: str | None,
        *,
        owner: SocketOwner | None = None,
        name: str | None = None,
        address: str | None = None,
        port: int | None = None,
        bytes_out: int = 0,
        bytes_in: int = 0,
        duration_s: float = 0.0,
    ) -> None:
        if verdict == "denied":
            self.meter.denied += 1
        if verdict != "allowed" and not self._records.take():
            self._unwritten += 1
            return
        if self._unwritten:
            reason = f"{reason or verdict} (and {self._unwritten} more that were refused and are not listed)"
            self._unwritten = 0
        self.write(
            EgressRecord(
                at=datetime.now(UTC) - timedelta(seconds=duration_s),
                sandbox_id=self.sandbox_id,
                kind=kind,
                name=name,
                address=address,
                port=port,
                bytes_out=bytes_out,
                bytes_in=bytes_in,
                duration_ms=round(duration_s * 1000, 3),
                verdict=verdict,
                reason=reason,
            ),
            owner,
        )

    def request(
        self, request: Request, owner: SocketOwner | None, *, name: str | None, address: str, port: int
    ) -> None:
        """One HTTP request on a connection, which has its own record."""
        if not self._requests.take():
            self._unwritten_requests += 1
            return
        reason, unwritten = request.reason, self._unwritten_requests
        if unwritten:
            reason = f"{reason or request.verdict} (and {unwritten} more requests that are not listed)"
            self._unwritten_requests = 0
        self.write(
            EgressRecord(
                at=datetime.now(UTC) - timedelta(seconds=request.duration_s),
                sandbox_id=self.sandbox_id,
                kind="http",
                name=name,
                address=address,
                port=port,
                bytes_out=request.bytes_out,
                bytes_in=request.bytes_in,
                duration_ms=round(request.duration_s * 1000, 3),
                verdict=request.verdict,
                reason=reason,
                method=request.method[:32],
                path=request.target.partition("?")[0].partition("#")[0][:_PATH_CHARS],
                status=request.status,
            ),
            owner,
        )

    def write(self, record: EgressRecord, owner: SocketOwner | None) -> None:
        if owner is not None:
            process = f"{owner.process} ({owner.pid})" if owner.process and owner.pid else owner.process
            record = record.model_copy(
                update={"exec_id": owner.exec_id, "trace_id": owner.trace_id, "process": process}
            )
        try:
            self._sink(record)
        except Exception:
            log.exception("a record of egress was lost", sandbox_id=self.sandbox_id)


def _answers(gate: Gate, name: str, address: str) -> bool:
    parsed = IPv4Address(address)
    return gate.answers(name, parsed, own=is_own(parsed))
