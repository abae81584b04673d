"""One TCP connection of a guest, from accept to its record.

The guest connected to an address; what it *means* is told by the name that gave this address (DNS answer), and by the
first bytes it sends (SNI, Host). All of them must be allowed, and where a name is known the connection goes to an address
that we found for that name: a name that is only claimed leads to its true owner.

The guest's first bytes are looked at without taking them off the socket. They are looked at whenever they come, so
waiting does not get around it; a server that speaks first is heard meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import assert_never

from forkyard.guest.base import SocketOwner
from forkyard.models.network import Verdict
from forkyard.net.base import DOOR_ADDRESS, INTERNAL_DOMAIN, SANDBOX_HEADER, Network, Service
from forkyard.net.checked import Check, Checked
from forkyard.net.outside import Intercepted, Request, tcp_connect
from forkyard.net.peek import Peek
from forkyard.net.policy import Decision, address_of
from forkyard.net.relay import BudgetSpent, Relay, reset
from forkyard.net.requests import BadRequest, Head, parse_head
from forkyard.net.sniff import Http, Malformed, Opaque, Sight, Tls, sniff
from forkyard.net.watch import PrivateOnly, Watch

#: How long a connection that only its first bytes can justify may stay silent.
_UNJUSTIFIED_S = 2.0
#: How long first bytes may stay incomplete.
_INCOMPLETE_S = 30.0
#: A record should say whose connection it was, and only while it is open can the guest tell.
_OWNER_GRACE_S = 0.25
_COURTESY_S = 0.5
_LAST_WORDS_S = 5.0
_HTTP = b"HTTP/"

_TLS_ACCESS_DENIED = bytes((0x15, 3, 3, 0, 2, 2, 49))


class Denied(Exception):
    """The policy does not allow it. The message is for the user."""


class Connection:
    def __init__(self, watch: Watch, guest: socket.socket, source_port: int, address: str, port: int) -> None:
        self._watch = watch
        self._guest = guest
        self._source_port = source_port
        self._address, self._port = address, port
        self._target = address  # where it really goes
        self._name: str | None = None
        self._host = address  # what it means, as far as is known: a name, or an address
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._began_s = time.monotonic()
        self._relay: Relay | None = None
        self._sight: Sight | None = None
        self._answer = b""
        self._service: Service | None = None
        self._intercepted: Network | None = None
        self._noted: tuple[Verdict, str | None] = ("allowed", None)

    @property
    def last_s(self) -> float:
        """When it last carried anything."""
        return self._relay.last_s if self._relay is not None else self._started_s

    async def run(self) -> None:
        """Serve it to its end, and record it."""
        watch = self._watch
        owner = asyncio.create_task(watch.owner("tcp", self._source_port, self._address, self._port))
        verdict: Verdict = "failed"
        reason: str | None = "an unexpected error in the daemon; its log has the details"
        try:
            await self._serve(owner)
            verdict, reason = self._noted
        except Denied as refusal:
            verdict, reason = "denied", str(refusal)
            await asyncio.wait((owner,), timeout=_OWNER_GRACE_S)
            await self._refuse(str(refusal))
        except BadRequest as error:
            verdict, reason = "denied", f"{self._shown}: {error}"
        except BudgetSpent:
            verdict, reason = "denied", watch.out_of_budget()
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
            verdict, reason = "failed", f"the connection to {self._shown} failed: {why}"
        except asyncio.CancelledError:
            verdict, reason = "failed", "the sandbox's network was shut"
            owner.cancel()
            raise
        finally:
            if self._relay is not None:
                self._relay.close()
            reset(self._guest)
            found = await _owner_or_none(owner)
            relay = self._relay
            watch.record(
                "tcp",
                verdict,
                reason,
                owner=found,
                name=self._name,
                address=self._target,
                port=self._port,
                bytes_out=relay.bytes_out if relay else 0,
                bytes_in=relay.bytes_in if relay else 0,
                duration_s=time.monotonic() - self._began_s,
            )

    def end(self, error: Exception) -> None:
        if self._relay is not None:
            self._relay.abort(error)

    def reconsider(self) -> None:
        """The policy has changed: end what it no longer allows."""
        watch = self._watch
        if self._relay is None:
            return  # the new policy is asked anyway
        if self._service is not None:
            if watch.network.services.get(self._name or "") != self._service:
                self.end(Denied(f"{self._name} is no longer what it was; connect again"))
        elif (reason := watch.out_of_budget()) is not None:
            self.end(Denied(reason))
        elif self._intercepted is not None and _terms(self._intercepted) != _terms(watch.network):
            self.end(Denied("the terms of this connection have changed; connect again"))
        elif self._intercepted is None and self._wanted():
            self.end(Denied("this connection is to be looked into from now on; connect again"))
        elif not watch.replays and not (decision := watch.decide(self._name, self._target, self._port)).allowed:
            self.end(Denied(decision.reason))

    @property
    def _shown(self) -> str:
        return f"{self._name} ({self._target}) port {self._port}" if self._name else f"{self._target} port {self._port}"

    # -- deciding ----------------------------------------------------------------------------------------------------

    async def _serve(self, owner: asyncio.Task[SocketOwner | None]) -> None:
        watch = self._watch
        if (reason := watch.out_of_budget()) is not None:
            raise Denied(reason)
        known, by_address = await self._by_answer()
        # What is said need not make sense: there is no name under which it would not be allowed, or should be seen.
        free = by_address.allowed and not by_address.unless_named and watch.network.egress.record is None
        early: asyncio.Task[socket.socket] | None = None
        if known.allowed and not watch.replays:
            early = asyncio.create_task(watch.outside.connect(self._address, self._port))
        try:
            look = asyncio.create_task(self._look(early is not None, free))
            try:
                await self._hear(look, early, owner)
                self._sight = look.result()
            finally:
                look.cancel()
            await self._proceed(self._sight, known, by_address, free, early, owner)
        finally:
            if early is not None:
                await _discard(early)

    async def _by_answer(self) -> tuple[Decision, Decision]:
        """What the address alone says: by the names that gave it, and by itself."""
        watch = self._watch
        if self._address == DOOR_ADDRESS:
            refusal = Decision(False, f"there is nothing at {DOOR_ADDRESS} but the services of {INTERNAL_DOMAIN}")
            return refusal, refusal
        by_address = watch.decide(None, self._address, self._port)
        names = watch.names.of(self._address)
        if by_address.unless_named and not names:
            await watch.learn_denied()
            by_address = watch.decide(None, self._address, self._port)
        decision: Decision = by_address
        for name in names:
            decision = watch.decide(name, self._address, self._port)
            if decision.allowed:
                self._name = name
                return decision, by_address
        if names:
            self._name = names[0]
            if by_address.unless_named:
                by_address = decision
        return (by_address if by_address.allowed else decision), by_address

    async def _hear(
        self,
        look: asyncio.Task[Sight],
        early: asyncio.Task[socket.socket] | None,
        owner: asyncio.Task[SocketOwner | None],
    ) -> None:
        """Wait for the guest's first bytes, while a server that speaks first is heard."""
        if early is not None:
            await asyncio.wait((look, early), return_when=asyncio.FIRST_COMPLETED)
            if not look.done():
                upstream = early.result()  # a failure to connect ends it here
                await asyncio.wait((owner,), timeout=_OWNER_GRACE_S)
                self._relay = Relay(self._guest, upstream, self._watch.meter)
                self._relay.down.resume()
                broken = self._relay.over
                await asyncio.wait((look, broken), return_when=asyncio.FIRST_COMPLETED)
                if not look.done():
                    broken.result()
        await asyncio.wait((look,))

    async def _look(self, allowed: bool, free: bool) -> Sight:
        """What the guest's first bytes are. A connection that is free need not wait for them to make sense; one that is
        not allowed as it is must not wait for them long."""
        peek = Peek(self._guest)
        data = b""
        deadline_s = None if allowed else self._loop.time() + _UNJUSTIFIED_S
        try:
            while True:
                async with asyncio.timeout_at(deadline_s):
                    more = await peek.beyond(len(data))
                if len(more) == len(data):
                    break  # no more will come
                if not data:
                    deadline_s = self._loop.time() + (_UNJUSTIFIED_S if free else _INCOMPLETE_S)
                data = more
                if (sight := sniff(data)) is not None:
                    return sight
        except (TimeoutError, ConnectionError):
            pass
        finally:
            peek.close()
        return Malformed("its first bytes make no sense") if data and not free else Opaque()

    async def _proceed(
        self,
        sight: Sight,
        known: Decision,
        by_address: Decision,
        free: bool,
        early: asyncio.Task[socket.socket] | None,
        owner: asyncio.Task[SocketOwner | None],
    ) -> None:
        head: Head | None = None
        match sight:
            case Tls(name=name):
                claimed = name
            case Http(head=raw):
                try:
                    head, _ = parse_head(raw)
                    claimed = head.host
                except BadRequest as error:
                    if not free:
                        raise Denied(f"{self._shown}: {error}") from None
                    claimed = None
            case Malformed(why=why):
                if not free:
                    raise Denied(f"{self._shown}: {why}")
                claimed = None
            case Opaque():
                claimed = None
            case _:
                assert_never(sight)
        if claimed is not None and (service := self._watch.network.services.get(claimed)) is not None:
            self._name, self._service = claimed, service
            if head is None:
                raise Denied(f"{claimed} speaks plain HTTP only; use http://{claimed}")
            upstream = await tcp_connect(service.address, service.port)
            headers = {**service.headers, SANDBOX_HEADER: self._watch.sandbox_id}
            await self._carry(upstream, owner, self._only(claimed, headers))
            return
        if claimed is None and isinstance(sight, Tls) and self._watch.replays:
            claimed = self._name or self._address
        self._host = claimed or self._name or self._address
        if claimed is not None and self._watch.replays:
            self._name = claimed
        elif claimed is not None and address_of(claimed) is None:
            await self._settle(claimed, by_address)
        elif claimed is not None and (claimed != self._address or not by_address.allowed):
            self._name = None
            raise Denied(by_address.reason if claimed == self._address else f"{self._shown} is not {claimed}")
        elif not known.allowed:
            raise Denied(known.reason)
        intercepted = self._wanted()
        if self._watch.replays and not intercepted:
            raise Denied(f"{self._shown} is not in the recording: only HTTP and HTTPS are replayed")
        if self._relay is not None and self._relay.bytes_in and (intercepted or self._target != self._address):
            raise Denied(f"{self._address} has already answered, before it was clear that {self._host} is meant")
        if self._target != self._address:
            early = None
        if intercepted:
            await self._intercept(owner, early)
            return
        upstream = await (early or self._watch.outside.connect(self._target, self._port))
        opaque = isinstance(sight, Opaque) and not free
        await self._carry(upstream, owner, None if head is None else self._only(head.host), opaque=opaque)

    async def _settle(self, name: str, by_address: Decision) -> None:
        """Find where a connection to `name` goes, or deny it. Nothing of a denied name reaches a resolver."""
        watch, known_names = self._watch, self._watch.names.of(self._address)
        self._name = name
        if name not in known_names and (by_address.unless_named or not by_address.allowed):
            if not (decision := watch.gate.name(name)).allowed:
                raise Denied(decision.reason)
            if (reason := watch.too_much(name)) is not None:
                raise Denied(f"{name}: {reason}")
            try:
                addresses = await watch.addresses(name)
            except PrivateOnly as error:
                raise Denied(str(error)) from None
            if not addresses:
                raise Denied(f"{name} has no address that this sandbox may reach")
            if self._address not in addresses:
                self._target = addresses[0]
        if not (decision := watch.decide(name, self._target, self._port)).allowed:
            raise Denied(decision.reason)

    def _wanted(self) -> bool:
        interceptor = self._watch.outside.intercept
        network = self._watch.network
        return (
            network.intercepts
            and interceptor is not None
            and isinstance(self._sight, Tls | Http)
            and interceptor.wants(network, self._host, isinstance(self._sight, Tls))
        )

    def _only(self, host: str, replaced: Mapping[str, str] = MappingProxyType({})) -> Check:
        """Every request of a connection must be to the host of the first."""

        def check(head: Head) -> Mapping[str, str]:
            if head.host != host:
                raise Denied(f"a request to {head.host} on a connection to {host}; use a connection of its own")
            return replaced

        return check

    def _log(self, owner: asyncio.Task[SocketOwner | None], request: Request) -> None:
        found = owner.result() if owner.done() and not owner.cancelled() and not owner.exception() else None
        self._watch.request(request, found, name=self._name, address=self._target, port=self._port)

    # -- carrying ----------------------------------------------------------------------------------------------------

    async def _carry(
        self,
        upstream: socket.socket,
        owner: asyncio.Task[SocketOwner | None],
        check: Check | None = None,
        *,
        opaque: bool = False,
    ) -> None:
        relay = self._relay
        if relay is None or relay.outer is not upstream:
            if relay is not None:
                relay.stop()
            relay = self._relay = Relay(self._guest, upstream, self._watch.meter)
        await asyncio.wait((owner,), timeout=_OWNER_GRACE_S)
        checked = None if check is None else Checked(relay, check, partial(self._log, owner))
        if opaque and not relay.bytes_in:
            relay.down.filter = partial(self._no_http, relay)
        self.reconsider()  # what was decided may have changed since
        try:
            await relay.run()
        finally:
            if checked is not None:
                checked.over()

    def _no_http(self, relay: Relay, data: memoryview) -> memoryview:
        """A server that answers in HTTP has found a request in what we could not read."""
        self._answer += bytes(data[: len(_HTTP) - len(self._answer)])
        if self._answer == _HTTP:
            raise Denied(f"{self._shown} speaks HTTP, and what it was sent is no request that could be checked")
        if not _HTTP.startswith(self._answer):
            relay.down.filter = None
        return data

    async def _intercept(
        self, owner: asyncio.Task[SocketOwner | None], early: asyncio.Task[socket.socket] | None
    ) -> None:
        interceptor, network = self._watch.outside.intercept, self._watch.network
        assert interceptor is not None
        if self._relay is not None:
            self._relay.stop()  # from here on the interceptor hears the server
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)

        async def connect() -> socket.socket:
            nonlocal early
            if self._watch.replays:
                raise PermissionError("nothing but the recording may answer")
            if early is not None:
                opened, early = await early, None
                return opened.dup()  # ours is closed when this is over
            return await self._watch.outside.connect(self._target, self._port)

        def note(verdict: Verdict, reason: str | None) -> None:
            self._noted = (verdict, reason)

        self._intercepted = network
        what = Intercepted(
            self._watch.sandbox_id,
            self._host,
            self._port,
            isinstance(self._sight, Tls),
            network,
            connect,
            note,
            partial(self._log, owner),
        )
        served = asyncio.create_task(interceptor.serve(theirs, what))
        carried = asyncio.create_task(self._carry(ours, owner))
        try:
            await asyncio.wait((served, carried), return_when=asyncio.FIRST_COMPLETED)
            # The end of one is news to the other, which may still have something to pass on.
            await asyncio.wait((served, carried), timeout=_LAST_WORDS_S)
            if carried.done():
                carried.result()
            if served.done() and (error := served.exception()) is not None:
                raise OSError(f"{type(error).__name__}: {error}") from error
        finally:
            for task in (served, carried):
                task.cancel()
            await asyncio.gather(served, carried, return_exceptions=True)
            theirs.close()

    async def _refuse(self, reason: str) -> None:
        """Say why where the guest can see it, and hang up."""
        if self._relay is not None:
            return
        match self._sight:
            case Http():
                body = f"Forkyard: blocked. {reason}\n".encode()
                answer = (
                    b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
                    b"X-Forkyard-Blocked: 1\r\nContent-Length: %d\r\n\r\n" % len(body)
                ) + body
            case Tls():
                answer = _TLS_ACCESS_DENIED
            case _:
                return
        with contextlib.suppress(OSError):
            self._guest.send(answer)
            self._guest.shutdown(socket.SHUT_WR)
            # What is still unread would turn the close into a reset, which can overtake the answer.
            async with asyncio.timeout(_COURTESY_S):
                for _ in range(64):
                    if not await self._loop.sock_recv(self._guest, 65536):
                        break


def _terms(network: Network) -> tuple[object, ...]:
    return network.injections, network.headers, network.egress.record, network.egress.replay


async def _discard(opening: asyncio.Task[socket.socket]) -> None:
    opening.cancel()
    with contextlib.suppress(OSError, asyncio.CancelledError):
        (await opening).close()


async def _owner_or_none(owner: asyncio.Task[SocketOwner | None]) -> SocketOwner | None:
    """The question has its own deadline; it is cut short only if we are."""
    try:
        return await owner
    except (asyncio.CancelledError, Exception):
        return None
