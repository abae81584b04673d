"""Names, for one machine. Answers what the policy allows and remembers which name gave which address.

Only the IPv4 addresses of allowed names are ever looked up; nothing else of a question leaves this host. All input is a
guest's: small, bounded in rate, and whatever cannot be read is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from dataclasses import dataclass

import dns.edns
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from forkyard.guest.base import SocketOwner
from forkyard.models.network import Verdict
from forkyard.net.base import DOOR_ADDRESS, INTERNAL_DOMAIN
from forkyard.net.limits import Bucket
from forkyard.net.policy import normal
from forkyard.net.watch import PrivateOnly, Watch

_TTL_S = 30
_PORT = 53
#: The answer waits at most this long for the guest to say who asked: once it is answered the socket may be gone.
_OWNER_GRACE_S = 0.1
_QUERY_BYTES = 1232
_ANSWER_ADDRESSES = 24
_AT_ONCE = 64
_TCP_AT_ONCE = 16
_TCP_IDLE_S = 10.0
_PER_TURN = 32
_QUERIES_PER_S, _QUERIES_BURST = 100.0, 500.0
_TWINS = 256


@dataclass(frozen=True)
class Answer:
    rcode: dns.rcode.Rcode
    addresses: tuple[str, ...] = ()
    reason: str | None = None  # of a refusal
    failed: bool = False


class DnsServer:
    def __init__(self, watch: Watch, udp: socket.socket, tcp: socket.socket) -> None:
        self._watch = watch
        self._udp, self._tcp = udp, tcp
        self._tasks: set[asyncio.Task[None]] = set()
        self._owners: set[asyncio.Task[SocketOwner | None]] = set()
        self._queries = Bucket(_QUERIES_PER_S, _QUERIES_BURST)
        self._twins: dict[tuple[int, str], asyncio.Task[SocketOwner | None]] = {}
        self._tcp_open = 0
        self._open = False

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._open = True
        for sock, ready in ((self._udp, self._packets), (self._tcp, self._accept)):
            sock.setblocking(False)
            loop.add_reader(sock.fileno(), ready)

    async def close(self) -> None:
        if self._open:
            self._open = False
            for sock in (self._udp, self._tcp):
                asyncio.get_running_loop().remove_reader(sock.fileno())
        self._udp.close()
        self._tcp.close()
        tasks = [*self._tasks, *self._owners]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _packets(self) -> None:
        for _ in range(_PER_TURN):
            try:
                data, peer = self._udp.recvfrom(4096)
            except OSError:
                return
            if len(self._tasks) >= _AT_ONCE or not self._queries.take():
                self._watch.record("dns", "denied", "too many DNS queries at once", port=_PORT)
                continue
            self._run(asyncio.create_task(self._answer_packet(data, peer)))

    async def _answer_packet(self, data: bytes, peer: tuple[str, int]) -> None:
        answer = await self.answer(data, peer[1], tcp=False)
        if answer is not None and self._open:
            with contextlib.suppress(OSError):
                self._udp.sendto(answer, peer)

    def _accept(self) -> None:
        for _ in range(_PER_TURN):
            try:
                guest, peer = self._tcp.accept()
            except OSError:
                return
            if self._tcp_open >= _TCP_AT_ONCE:
                guest.close()
                continue
            self._tcp_open += 1
            guest.setblocking(False)
            self._run(asyncio.create_task(self._serve_stream(guest, peer[1])))

    async def _serve_stream(self, guest: socket.socket, source_port: int) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=guest)
        except OSError:
            guest.close()
            self._tcp_open -= 1
            return
        try:
            while True:
                async with asyncio.timeout(_TCP_IDLE_S):
                    (size,) = struct.unpack("!H", await reader.readexactly(2))
                    data = await reader.readexactly(size)
                if not self._queries.take():
                    return
                answer = await self.answer(data, source_port, tcp=True)
                if answer is None:
                    return
                writer.write(struct.pack("!H", len(answer)) + answer)
                async with asyncio.timeout(_TCP_IDLE_S):
                    await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            self._tcp_open -= 1
            writer.transport.abort()

    # -- one question ------------------------------------------------------------------------------------------------

    async def answer(self, data: bytes, source_port: int, *, tcp: bool) -> bytes | None:
        """The packet to send back; None: none. Records the question."""
        started_s = time.monotonic()
        query = parse(data)
        if query is None:
            self._watch.record("dns", "denied", "a DNS packet that cannot be read", port=_PORT)
            return None
        question = query.question[0]
        raw_name = question.name.to_text(omit_final_dot=True)
        name = normal(raw_name)
        twin, owner = self._owner(name or "", question.rdtype, source_port, tcp)
        if name is None:
            found = Answer(dns.rcode.NXDOMAIN, reason="not a host name")
        else:
            found = await self._look_up(name, question.rdtype)
        packet = encode(query, found, tcp=tcp)
        if not twin:
            verdict: Verdict = "failed" if found.failed else "denied" if found.reason else "allowed"
            if verdict == "allowed":
                self._watch.meter.passed(bytes_out=len(data), bytes_in=len(packet))
            duration_s = 0.0

            def record(asked: asyncio.Task[SocketOwner | None]) -> None:
                self._watch.record(
                    "dns",
                    verdict,
                    found.reason,
                    owner=None if asked.cancelled() or asked.exception() else asked.result(),
                    name=name or raw_name[:253],
                    address=found.addresses[0] if found.addresses else None,
                    port=_PORT,
                    bytes_out=len(data),
                    bytes_in=len(packet),
                    duration_s=duration_s,
                )

            try:
                await asyncio.wait((owner,), timeout=_OWNER_GRACE_S)
            finally:
                duration_s = time.monotonic() - started_s  # until the answer goes out
                owner.add_done_callback(record)
        return packet

    def _owner(
        self, name: str, kind: dns.rdatatype.RdataType, source_port: int, tcp: bool
    ) -> tuple[bool, asyncio.Task[SocketOwner | None]]:
        """Who asked. A resolver asks for A and then AAAA from one socket: that is one question to us, and one record."""
        key = (source_port, name)
        task = self._twins.pop(key, None)
        if task is not None and kind == dns.rdatatype.AAAA:
            return True, task
        task = asyncio.create_task(self._watch.owner("tcp" if tcp else "udp", source_port, DOOR_ADDRESS, _PORT))
        self._owners.add(task)
        task.add_done_callback(self._owners.discard)
        if kind == dns.rdatatype.A:
            self._twins[key] = task
            if len(self._twins) > _TWINS:
                del self._twins[next(iter(self._twins))]
        return False, task

    async def _look_up(self, name: str, kind: dns.rdatatype.RdataType) -> Answer:
        watch = self._watch
        if (reason := watch.out_of_budget()) is not None:
            return Answer(dns.rcode.REFUSED, reason=reason)
        wants_address = kind == dns.rdatatype.A
        if name == INTERNAL_DOMAIN or name.endswith(f".{INTERNAL_DOMAIN}") or name in watch.network.services:
            if name in watch.network.services:
                return Answer(dns.rcode.NOERROR, (DOOR_ADDRESS,) if wants_address else ())
            return Answer(dns.rcode.NXDOMAIN, reason=f"there is no {name}")
        if watch.replays:
            if not await watch.replayed(name):
                reason = f"{name} is not in the recording {watch.network.egress.replay!r}"
                return Answer(dns.rcode.NXDOMAIN, reason=reason)
            return Answer(dns.rcode.NOERROR, (watch.names.make_up(name),) if wants_address else ())
        decision = watch.gate.name(name)
        if not decision.allowed:
            return Answer(dns.rcode.NXDOMAIN, reason=decision.reason)
        if not wants_address:
            return Answer(dns.rcode.NOERROR)
        if (refusal := watch.too_much(name)) is not None:
            return Answer(dns.rcode.REFUSED, reason=refusal)
        try:
            addresses = await watch.addresses(name)
        except OSError as error:
            return Answer(dns.rcode.SERVFAIL, reason=f"{name} could not be resolved: {error}", failed=True)
        except PrivateOnly as error:
            return Answer(dns.rcode.NXDOMAIN, reason=str(error))
        if not addresses:
            return Answer(dns.rcode.NXDOMAIN, reason=f"{name} has no IPv4 address, says this host", failed=True)
        return Answer(dns.rcode.NOERROR, tuple(addresses[:_ANSWER_ADDRESSES]))


def parse(data: bytes) -> dns.message.QueryMessage | None:
    """A question that we can answer."""
    if not 17 <= len(data) <= _QUERY_BYTES:
        return None
    try:
        query = dns.message.from_wire(data, ignore_trailing=True, one_rr_per_rrset=True)
    except (dns.exception.DNSException, ValueError, struct.error, UnicodeError, IndexError):
        return None
    if (
        not isinstance(query, dns.message.QueryMessage)
        or query.flags & dns.flags.QR
        or query.opcode() != dns.opcode.QUERY
        or len(query.question) != 1
        or query.question[0].rdclass != dns.rdataclass.IN
    ):
        return None
    return query


def encode(query: dns.message.QueryMessage, found: Answer, *, tcp: bool) -> bytes:
    answer = dns.message.make_response(query, recursion_available=True, our_payload=_QUERY_BYTES)
    answer.set_rcode(found.rcode)
    question = query.question[0]
    if found.addresses:
        answer.answer.append(dns.rrset.from_text(question.name, _TTL_S, "IN", "A", *found.addresses))
    if found.reason and not found.failed and query.edns >= 0:
        hint = dns.edns.EDEOption(dns.edns.EDECode.BLOCKED, found.reason[:400])
        answer.use_edns(edns=0, payload=_QUERY_BYTES, options=[hint])
    most = 65535 if tcp else min(max(query.payload if query.edns >= 0 else 512, 512), _QUERY_BYTES)
    try:
        return answer.to_wire(max_size=most)
    except dns.exception.TooBig:
        short = dns.message.make_response(query, recursion_available=True)
        short.flags |= dns.flags.TC
        return short.to_wire(max_size=most)
