"""The door of one machine, on loopback: a client stands for the guest, servers on this machine stand for the world."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import dns.edns
import dns.message
import dns.rcode
import dns.rdatatype
import pytest

from forkyard.guest.base import SocketOwner
from forkyard.models.network import EgressPolicy, EgressRecord, EgressRule
from forkyard.net import connection as connection_module
from forkyard.net import door as door_module
from forkyard.net.base import DOOR_ADDRESS, Injection, Listeners, Network, Service
from forkyard.net.door import Door
from forkyard.net.outside import Intercepted, Outside, tcp_connect
from forkyard.net.presets import Presets

pytestmark = pytest.mark.anyio

GOOD, SHARED, EVIL, MIRROR = "1.0.0.1", "1.0.0.2", "1.0.0.3", "203.0.113.80"
NAMES = {
    "good.example": [GOOD],
    "shared.example": [SHARED],
    "evil.example": [EVIL],
    "rebound.example": ["10.0.0.5", "169.254.169.254"],
    "mixed.example": ["10.0.0.5", GOOD],
    "mirror.example": [MIRROR],
    "two.example": [GOOD, SHARED],
}
OWNER = SocketOwner("exec_1", "trace_1", 412, "curl")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@dataclass
class World:
    """What is outside, and one guest."""

    sandbox_id: str = "sbx_1"
    records: asyncio.Queue[EgressRecord] = field(default_factory=asyncio.Queue)
    resolved: list[str] = field(default_factory=list)
    connected: list[tuple[str, int]] = field(default_factory=list)
    servers: dict[tuple[str, int], int] = field(default_factory=dict)
    destinations: dict[int, tuple[str, int]] = field(default_factory=dict)
    owner: Callable[[], Awaitable[SocketOwner | None]] | None = None
    door: Door = field(init=False)
    listeners: Listeners = field(init=False)
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def resolve(self, name: str) -> list[str]:
        self.resolved.append(name)
        return NAMES.get(name, [])

    async def connect(self, address: str, port: int) -> socket.socket:
        self.connected.append((address, port))
        if (address, port) not in self.servers:
            raise ConnectionRefusedError(111, "Connection refused")
        return await tcp_connect("127.0.0.1", self.servers[address, port])

    async def owner_of(self, protocol: str, source_port: int, address: str, port: int) -> SocketOwner | None:
        return OWNER if self.owner is None else await self.owner()

    async def serve(self, address: str, port: int, handler: Handler) -> int:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(reader, writer)
            except (OSError, EOFError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        self.stack.callback(server.close)
        self.servers[address, port] = server.sockets[0].getsockname()[1]
        return self.servers[address, port]

    def network(self, *rules: EgressRule, **policy: object) -> Network:
        return Network(EgressPolicy.model_validate({"preset": "none", "rules": list(rules), **policy}))

    def start(self, network: Network, **outside: object) -> None:
        tcp, udp = socket.create_server(("127.0.0.1", 0), backlog=1024), socket.socket(type=socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        self.listeners = Listeners(tcp, udp, socket.create_server(("127.0.0.1", 0)))
        self.door = Door(
            self.sandbox_id,
            self.listeners,
            network,
            self.owner_of,
            self.records.put_nowait,
            Outside(self, Presets(frozenset({"mirror.example"})), connect=self.connect, **outside),  # type: ignore[arg-type]
            destination_of=lambda guest: self.destinations[guest.getpeername()[1]],
        )
        self.door.start()
        self.stack.push_async_callback(self.door.close)

    async def open(self, address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        self.stack.callback(sock.close)
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        self.destinations[sock.getsockname()[1]] = (address, port)
        await asyncio.get_running_loop().sock_connect(sock, self.listeners.tcp.getsockname())
        reader, writer = await asyncio.open_connection(sock=sock)
        self.stack.callback(writer.close)
        return reader, writer

    async def exchange(self, address: str, port: int, data: bytes) -> bytes:
        """What comes back until the end; `reset` if it was one."""
        received = b""
        try:
            reader, writer = await self.open(address, port)
        except ConnectionResetError:
            return b"reset"
        try:
            writer.write(data)
            while more := await reader.read(65536):
                received += more
        except ConnectionResetError:
            received += b"reset"
        finally:
            writer.close()
        return received

    async def ask(self, name: str, kind: str = "A", *, edns: bool = False) -> dns.message.Message:
        query = dns.message.make_query(name, kind, use_edns=edns)
        return dns.message.from_wire(await self.packet(query.to_wire()))

    async def packet(self, data: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        with socket.socket(type=socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.connect(self.listeners.dns_udp.getsockname())
            await loop.sock_sendall(sock, data)
            async with asyncio.timeout(5):
                return await loop.sock_recv(sock, 65536)

    async def addresses(self, name: str) -> list[str]:
        answer = await self.ask(name)
        return [str(item) for rrset in answer.answer for item in rrset]

    async def record(self, kind: str = "tcp") -> EgressRecord:
        async with asyncio.timeout(5):
            while (record := await self.records.get()).kind != kind:
                pass
        return record


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    async with world.stack, asyncio.timeout(60):
        yield world


def allow(domain: str) -> EgressRule:
    return EgressRule(domain=domain)


async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An HTTP server that shows the request it got."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(head), head))
        if b"Connection: close" in head:
            return


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


def get(host: str, *headers: str, close: bool = True) -> bytes:
    lines = ["GET / HTTP/1.1", f"Host: {host}", *headers, *(["Connection: close"] if close else [])]
    return "\r\n".join([*lines, "", ""]).encode()


def client_hello(name: str | None) -> bytes:
    outgoing = ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


# -- what is allowed passes ---------------------------------------------------------------------------------------------


async def test_an_allowed_request_passes_and_its_record_says_whose_it_was(world: World) -> None:
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example")))
    assert await world.addresses("good.example") == [GOOD]
    answer = await world.exchange(GOOD, 80, get("good.example"))
    assert answer.startswith(b"HTTP/1.1 200")
    record = await world.record()
    assert (record.verdict, record.name, record.address, record.port) == ("allowed", "good.example", GOOD, 80)
    assert (record.exec_id, record.trace_id, record.process) == ("exec_1", "trace_1", "curl (412)")
    assert (record.bytes_out, record.bytes_in) == (len(get("good.example")), len(answer))
    traffic = world.door.traffic
    assert (traffic.connections, traffic.denied) == (1, 0)
    assert (traffic.bytes_out, traffic.bytes_in) == (record.bytes_out, record.bytes_in)


async def test_a_name_is_enough_without_having_been_asked_for(world: World) -> None:
    """As after a fork: the guest still knows the address, this door does not."""
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example")))
    assert b"200 OK" in await world.exchange(GOOD, 80, get("good.example"))


async def test_a_protocol_we_do_not_know_passes_to_an_address_that_a_name_gave(world: World) -> None:
    await world.serve(GOOD, 22, echo)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 22)
    writer.write(b"SSH-2.0-test\r\n")
    assert await reader.readexactly(14) == b"SSH-2.0-test\r\n"
    writer.write_eof()
    assert await reader.read() == b""
    assert (await world.record()).name == "good.example"


async def test_a_server_that_speaks_first_is_heard_at_once(world: World) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        await echo(reader, writer)

    await world.serve(GOOD, 25, greet)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 25)
    assert await reader.readline() == b"220 ready\r\n"
    writer.write(b"EHLO me\r\n")
    assert await reader.readline() == b"EHLO me\r\n"


async def test_half_of_a_connection_may_be_closed(world: World) -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(str(len(await reader.read())).encode())

    await world.serve(GOOD, 9000, count)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 9000)
    writer.write(b"\0" * 3_000_000)
    writer.write_eof()
    assert await reader.read() == b"3000000"


async def test_a_reader_that_does_not_read_holds_the_sender_back(world: World) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.read(1)
        for _ in range(4096):
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536

    await world.serve(GOOD, 9000, flood)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 9000)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"\1")
    before = -1
    while sent != before:  # until nothing moves any more
        before = sent
        await asyncio.sleep(0.3)
    assert sent < 4096 * 65536 / 2
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    total = 0
    while data := await reader.read(1 << 20):
        total += len(data)
    assert total == 4096 * 65536


async def test_a_web_socket_passes_once_the_server_agrees(world: World) -> None:
    async def upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        await echo(reader, writer)

    await world.serve(GOOD, 80, upgrade)
    world.start(world.network(allow("good.example")))
    reader, writer = await world.open(GOOD, 80)
    writer.write(get("good.example", "Upgrade: websocket", "Connection: Upgrade", close=False) + b"\x81frame")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 101 Switching Protocols\r\n\r\n"
    assert await reader.readexactly(6) == b"\x81frame"
    writer.write(get("evil.example"))
    assert b"evil.example" in await reader.readuntil(b"\r\n\r\n")


async def test_requests_stay_checked_if_the_server_does_not_agree(world: World) -> None:
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example")))
    asked = get("good.example", "Upgrade: websocket", close=False)
    answer = await world.exchange(GOOD, 80, asked + get("evil.example"))
    assert b"evil.example" not in answer
    assert (await world.record()).verdict == "denied"


# -- what is not allowed does not ---------------------------------------------------------------------------------------


async def test_a_blocked_request_is_told_what_to_do(world: World) -> None:
    world.start(world.network(allow("good.example")))
    answer = await world.exchange(EVIL, 80, get("evil.example"))
    assert answer.startswith(b"HTTP/1.1 403")
    assert b"`forkyard egress allow sbx_1 evil.example`" in answer
    record = await world.record()
    assert (record.verdict, record.name, record.exec_id) == ("denied", "evil.example", "exec_1")
    assert "forkyard egress allow" in (record.reason or "")
    assert world.resolved == [] and world.connected == []
    assert world.door.traffic.denied == 1


async def test_a_blocked_tls_client_reads_access_denied(world: World) -> None:
    world.start(world.network(allow("good.example")))
    assert await world.exchange(EVIL, 443, client_hello("evil.example")) == bytes((21, 3, 3, 0, 2, 2, 49))
    assert (await world.record()).name == "evil.example"
    assert world.connected == []


async def test_a_forged_sni_leads_to_the_true_owner_of_the_name(world: World) -> None:
    await world.serve(GOOD, 443, echo)
    await world.serve(EVIL, 443, hello)
    world.start(world.network(allow("good.example")))
    reader, writer = await world.open(EVIL, 443)
    data = client_hello("good.example")
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    assert world.connected == [(GOOD, 443)]
    writer.close()
    assert (await world.record()).address == GOOD


async def test_a_denied_sni_at_an_allowed_address_is_refused(world: World) -> None:
    """A front: many names live at one address."""
    await world.serve(SHARED, 443, echo)
    world.start(world.network(allow("shared.example")))
    await world.addresses("shared.example")
    assert await world.exchange(SHARED, 443, client_hello("evil.example")) == bytes((21, 3, 3, 0, 2, 2, 49))


async def test_waiting_before_the_hello_does_not_get_around_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_UNJUSTIFIED_S", 0.05)
    seen = b""

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen = await reader.read()

    await world.serve(SHARED, 443, hear)
    world.start(world.network(allow("shared.example")))
    await world.addresses("shared.example")
    reader, writer = await world.open(SHARED, 443)
    await asyncio.sleep(0.2)
    for byte in client_hello("evil.example"):
        writer.write(bytes((byte,)))
        await asyncio.sleep(0)
    with contextlib.suppress(ConnectionError):
        await reader.read()
    record = await world.record()
    assert (record.verdict, record.name, seen) == ("denied", "evil.example", b"")


async def test_a_raw_address_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_UNJUSTIFIED_S", 0.05)
    world.start(world.network(allow("good.example")))
    for port, data in ((22, b"SSH-2.0-x\r\n"), (443, client_hello(None)), (80, get(GOOD)), (5432, b"")):
        await world.exchange(GOOD, port, data)
        record = await world.record()
        assert (record.verdict, record.name, record.port) == ("denied", None, port)
    assert world.connected == []


async def test_a_connection_that_leaves_without_a_word_is_still_recorded(world: World) -> None:
    world.start(world.network())
    _, writer = await world.open(EVIL, 80)
    writer.close()
    assert (await world.record()).verdict == "denied"


@pytest.mark.parametrize(
    "second",
    [get("evil.example"), get("good.example", "Host: evil.example"), b"GET / HTTP/1.1\nHost: evil.example\n\n"],
    ids=["another host", "two hosts", "bare newlines"],
)
async def test_every_request_of_a_connection_is_checked(world: World, second: bytes) -> None:
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example"), allow("shared.example")))
    reader, writer = await world.open(GOOD, 80)
    writer.write(get("good.example", close=False))
    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    writer.write(second + get("good.example"))
    with contextlib.suppress(ConnectionError):
        assert b"evil" not in await reader.read()
    assert (await world.record()).verdict == "denied"


@pytest.mark.parametrize(
    "first",
    [
        b"POST / HTTP/1.1\r\nHost: good.example\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: good.example\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: good.example\r\n evil: folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : good.example\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 8000,
    ],
)
async def test_what_could_be_read_in_two_ways_is_refused(world: World, first: bytes) -> None:
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    assert b"200 OK" not in await world.exchange(GOOD, 80, first)
    assert (await world.record()).verdict == "denied"


async def test_private_networks_and_this_host_need_a_rule_of_their_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_UNJUSTIFIED_S", 0.05)
    everything = EgressRule(cidr="0.0.0.0/0")
    world.start(world.network(everything, preset="open"))
    for address in ("10.0.0.5", "127.0.0.1", "169.254.169.254", "192.168.1.1", "100.64.0.1", "224.0.0.1"):
        await world.exchange(address, 80, get(address))
        assert (await world.record()).verdict == "denied"
    assert world.connected == []
    await world.serve("10.0.0.5", 80, hello)
    world.door.update(world.network(EgressRule(cidr="10.0.0.0/24", ports=[80])))
    assert b"200 OK" in await world.exchange("10.0.0.5", 80, get("10.0.0.5"))


async def test_everything_public_is_open_under_open(world: World) -> None:
    await world.serve(EVIL, 5432, echo)
    world.start(world.network(preset="open"))
    reader, writer = await world.open(EVIL, 5432)
    writer.write(b"\0\0\0\x08\x04\xd2\x16\x2f")
    assert await reader.readexactly(8) == b"\0\0\0\x08\x04\xd2\x16\x2f"


async def test_a_registry_of_this_host_may_be_on_a_private_network(world: World) -> None:
    await world.serve(MIRROR, 80, hello)
    world.start(world.network(preset="coding"))
    assert await world.addresses("mirror.example") == [MIRROR]
    assert b"200 OK" in await world.exchange(MIRROR, 80, get("mirror.example"))


async def test_a_server_that_is_not_there_is_a_failure_and_not_a_denial(world: World) -> None:
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    assert await world.exchange(GOOD, 81, b"x") == b"reset"
    record = await world.record()
    assert (record.verdict, "refused" in (record.reason or "")) == ("failed", True)


# -- limits -------------------------------------------------------------------------------------------------------------


async def test_a_byte_budget_ends_what_goes_beyond_it(world: World) -> None:
    await world.serve(GOOD, 9000, echo)
    world.start(world.network(allow("good.example"), byte_budget=100_000))
    await world.addresses("good.example")
    assert len(await world.exchange(GOOD, 9000, b"\0" * 200_000)) < 100_000
    record = await world.record()
    assert record.verdict == "denied" and "byte budget of 100000" in (record.reason or "")
    assert await world.exchange(GOOD, 9000, b"\0") == b"reset"


async def test_bytes_of_earlier_machines_count(world: World) -> None:
    world.start(Network(EgressPolicy(preset="open", byte_budget=100), spent_bytes=100))
    assert await world.exchange(GOOD, 9000, b"\0") == b"reset"


async def test_a_rate_is_kept(world: World) -> None:
    await world.serve(GOOD, 9000, echo)
    world.start(world.network(allow("good.example"), bytes_per_s=400_000))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 9000)
    began_s = time.monotonic()
    writer.write(b"\0" * 200_000)
    await reader.readexactly(200_000)
    # 400 kB both ways, of which 100 kB were free.
    assert 0.6 < time.monotonic() - began_s < 2


async def test_too_many_connections_in_a_minute_are_refused(world: World) -> None:
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example"), connections_per_minute=2))
    answers = [await world.exchange(GOOD, 80, get("good.example")) for _ in range(3)]
    assert [b"200 OK" in answer for answer in answers] == [True, True, False]


async def test_too_many_connections_at_once_are_refused_and_the_others_live(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MOST_CONNECTIONS", 20)
    await world.serve(GOOD, 9000, echo)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    over = asyncio.Event()
    answers: asyncio.Queue[bool] = asyncio.Queue()

    async def live() -> None:
        try:
            reader, writer = await world.open(GOOD, 9000)
            writer.write(b"\1")
            answers.put_nowait(await reader.read(1) == b"\1")
        except ConnectionError:
            answers.put_nowait(False)
        await over.wait()

    async with asyncio.TaskGroup() as group:
        for _ in range(30):
            group.create_task(live())
        assert sum([await answers.get() for _ in range(30)]) == 20
        over.set()


# -- changes ------------------------------------------------------------------------------------------------------------


async def test_a_change_ends_what_is_no_longer_allowed_and_only_that(world: World) -> None:
    await world.serve(GOOD, 9000, echo)
    await world.serve(SHARED, 9000, echo)
    world.start(world.network(allow("good.example"), allow("shared.example")))
    ends = []
    for name, address in (("good.example", GOOD), ("shared.example", SHARED)):
        await world.addresses(name)
        reader, writer = await world.open(address, 9000)
        writer.write(b"\1")
        assert await reader.readexactly(1) == b"\1"
        ends.append((reader, writer))
    world.door.update(world.network(allow("good.example")))
    with pytest.raises(ConnectionResetError):
        await ends[1][0].readexactly(1)
    ends[0][1].write(b"\2")
    assert await ends[0][0].readexactly(1) == b"\2"


async def test_a_closed_door_has_no_connections_and_no_sockets(world: World) -> None:
    await world.serve(GOOD, 9000, echo)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 9000)
    writer.write(b"\1")
    assert await reader.readexactly(1) == b"\1"
    await world.door.close()
    with pytest.raises(ConnectionError):
        await reader.readexactly(1)
    assert world.listeners.tcp.fileno() == world.listeners.dns_udp.fileno() == world.listeners.dns_tcp.fileno() == -1
    assert (await world.record()).bytes_out == 1
    await world.door.close()


async def test_a_guest_that_does_not_say_whose_it_is_is_served_all_the_same(world: World) -> None:
    world.owner = asyncio.Event().wait  # type: ignore[assignment]
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example")))
    began_s = time.monotonic()
    assert b"200 OK" in await world.exchange(GOOD, 80, get("good.example"))
    assert time.monotonic() - began_s < 1
    assert (await world.record()).exec_id is None


# -- services and interception ------------------------------------------------------------------------------------------


async def test_a_service_is_reached_by_name_with_headers_of_ours(world: World) -> None:
    port = await world.serve("service", 1, hello)
    network = world.network()
    service = Service("127.0.0.1", port, {"Authorization": "Bearer ours"})
    world.start(Network(network.egress, services={"git.forkyard.internal": service}))
    assert await world.addresses("git.forkyard.internal") == [DOOR_ADDRESS]
    asked = get("git.forkyard.internal", "authorization: Bearer theirs")
    answer = await world.exchange(DOOR_ADDRESS, 80, asked)
    assert b"Authorization: Bearer ours\r\n" in answer and b"theirs" not in answer
    assert (await world.record()).name == "git.forkyard.internal"
    assert (await world.ask("other.forkyard.internal")).rcode() == dns.rcode.NXDOMAIN
    assert b"403" in await world.exchange(DOOR_ADDRESS, 80, get("evil.example"))


class Puppet:
    """An interceptor that passes on, or answers by itself."""

    def __init__(self) -> None:
        self.seen: list[Intercepted] = []

    def wants(self, network: Network, name: str, tls: bool) -> bool:
        return name != "shared.example"

    async def replays(self, network: Network, name: str) -> bool:
        return name == "recorded.example"

    async def serve(self, guest: socket.socket, what: Intercepted) -> None:
        self.seen.append(what)
        reader, writer = await asyncio.open_connection(sock=guest)
        first = await reader.read(65536)
        if what.network.egress.replay is None:
            upstream_reader, upstream = await asyncio.open_connection(sock=await what.connect())
            upstream.write(first)
            writer.write(b"seen: " + await upstream_reader.read(65536))
            upstream.close()
        else:
            writer.write(b"replayed")
            what.note("allowed", "replayed")
        writer.close()


async def test_what_is_to_be_looked_into_is_handed_over_untouched(world: World) -> None:
    await world.serve(GOOD, 443, echo)
    await world.serve(SHARED, 443, echo)
    puppet = Puppet()
    injection = {"TOKEN": Injection("p", "v", ("good.example",), "Authorization", "Bearer {}")}
    policy = EgressPolicy(preset="none", rules=[allow("good.example"), allow("shared.example")])
    world.start(Network(policy, injections=injection), intercept=puppet)
    data = client_hello("good.example")
    assert await world.exchange(GOOD, 443, data) == b"seen: " + data
    assert [(what.name, what.port, what.tls) for what in puppet.seen] == [("good.example", 443, True)]
    record = await world.record()
    assert (record.verdict, record.bytes_out, record.bytes_in) == ("allowed", len(data), len(data) + 6)
    reader, writer = await world.open(SHARED, 443)
    data = client_hello("shared.example")
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    assert await world.exchange(EVIL, 443, client_hello("evil.example")) == bytes((21, 3, 3, 0, 2, 2, 49))
    assert len(puppet.seen) == 1


async def test_a_server_may_speak_first_to_a_sandbox_that_is_looked_into(world: World) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        await echo(reader, writer)

    await world.serve(GOOD, 25, greet)
    world.start(world.network(allow("good.example"), record="monday"), intercept=Puppet())
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 25)
    assert await reader.readline() == b"220 ready\r\n"
    writer.write(b"EHLO me\r\n")
    assert await reader.readline() == b"EHLO me\r\n"


async def test_the_connection_that_waited_is_the_one_that_is_looked_into(world: World) -> None:
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example"), record="monday"), intercept=Puppet())
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 80)
    while not world.connected:
        await asyncio.sleep(0.01)
    writer.write(get("good.example"))
    assert (await reader.read()).startswith(b"seen: HTTP/1.1 200")
    assert world.connected == [(GOOD, 80)]


async def test_a_replay_touches_nothing_outside(world: World) -> None:
    world.start(world.network(preset="evaluation", replay="monday"), intercept=Puppet())
    (address,) = await world.addresses("recorded.example")
    assert await world.exchange(address, 80, get("recorded.example")) == b"replayed"
    record = await world.record()
    assert (record.verdict, record.reason) == ("allowed", "replayed")
    assert await world.exchange(address, 22, b"SSH-2.0-x\r\n") == b"reset"
    assert world.connected == [] and world.resolved == []


async def test_a_replay_knows_no_names_but_those_recorded(world: World) -> None:
    world.start(world.network(preset="evaluation", replay="monday"), intercept=Puppet())
    assert (await world.ask("other.example")).rcode() == dns.rcode.NXDOMAIN
    record = await world.record("dns")
    assert (record.verdict, record.name) == ("denied", "other.example")
    assert "not in the recording 'monday'" in (record.reason or "")
    assert world.resolved == []


async def test_requests_of_plain_http_are_records_of_their_own(world: World) -> None:
    await world.serve(GOOD, 80, echo)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 80)
    asked = get("good.example").replace(b" / ", b" /a/b?token=x ") + get("good.example").replace(b"GET", b"DELETE")
    writer.write(asked)
    await reader.readexactly(len(asked))
    first, second = [await world.record("http") for _ in range(2)]
    assert (first.method, first.path, first.name, first.port) == ("GET", "/a/b", "good.example", 80)
    assert (second.method, second.path, second.verdict) == ("DELETE", "/", "allowed")
    assert first.exec_id == second.exec_id is not None
    assert "token" not in first.model_dump_json()


async def test_a_flood_of_requests_is_counted_and_not_listed_one_by_one(world: World) -> None:
    await world.serve(GOOD, 80, echo)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 80)
    asked = get("good.example") * 3000
    writer.write(asked)
    await reader.readexactly(len(asked))
    writer.close()
    listed = 0
    while (await world.records.get()).kind != "tcp":
        listed += 1
    assert 400 < listed < 2000


# -- names --------------------------------------------------------------------------------------------------------------


async def test_a_denied_name_does_not_exist_and_is_told_to_nobody(world: World) -> None:
    world.start(world.network(allow("good.example")))
    answer = await world.ask("secret-data.evil.example", edns=True)
    assert answer.rcode() == dns.rcode.NXDOMAIN
    assert any("forkyard egress allow" in str(option) for option in answer.options)
    record = await world.record("dns")
    assert (record.verdict, record.name, record.exec_id) == ("denied", "secret-data.evil.example", "exec_1")
    assert world.resolved == []


@pytest.mark.parametrize("kind", ["AAAA", "TXT", "HTTPS", "MX", "NULL", "ANY"])
async def test_only_ipv4_addresses_are_answered(world: World, kind: str) -> None:
    world.start(world.network(allow("good.example")))
    answer = await world.ask("good.example", kind)
    assert (answer.rcode(), answer.answer) == (dns.rcode.NOERROR, [])
    assert world.resolved == []


async def test_a_name_that_leads_inside_is_refused(world: World) -> None:
    world.start(world.network(preset="open"))
    assert (await world.ask("rebound.example")).rcode() == dns.rcode.NXDOMAIN
    assert "private" in ((await world.record("dns")).reason or "")
    assert await world.addresses("mixed.example") == [GOOD]


async def test_both_questions_of_a_lookup_are_one_record(world: World) -> None:
    world.start(world.network(allow("good.example")))
    loop = asyncio.get_running_loop()
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.connect(world.listeners.dns_udp.getsockname())
        for kind in ("A", "AAAA"):
            await loop.sock_sendall(sock, dns.message.make_query("good.example", kind).to_wire())
            await loop.sock_recv(sock, 4096)
    assert (await world.record("dns")).address == GOOD
    assert world.records.empty()


async def test_names_may_be_asked_for_over_tcp(world: World) -> None:
    world.start(world.network(allow("two.example")))
    reader, writer = await asyncio.open_connection(*world.listeners.dns_tcp.getsockname())
    for _ in range(2):
        query = dns.message.make_query("two.example", "A").to_wire()
        writer.write(struct.pack("!H", len(query)) + query)
        (size,) = struct.unpack("!H", await reader.readexactly(2))
        answer = dns.message.from_wire(await reader.readexactly(size))
        assert sorted(str(item) for item in answer.answer[0]) == [GOOD, SHARED]
    writer.write(b"\0\3abc")
    assert await reader.read() == b""
    writer.close()


async def test_garbage_gets_no_answer_and_does_no_harm(world: World) -> None:
    world.start(world.network(allow("good.example")))
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        for data in (b"", b"\0", b"\xff" * 600, b"\xc0\x0c" * 100, bytes(4000)):
            sock.sendto(data, world.listeners.dns_udp.getsockname())
    assert await world.addresses("good.example") == [GOOD]


async def test_letters_cannot_be_carried_out_one_name_at_a_time(world: World) -> None:
    world.start(world.network(allow("*.evil.example")))
    assert (await world.ask(f"{'a' * 60}.{'b' * 60}.evil.example")).rcode() == dns.rcode.REFUSED
    for number in range(400):
        await world.ask(f"x{number}.evil.example")
    assert len(world.resolved) < 250
    assert (await world.ask("x0.evil.example")).rcode() == dns.rcode.NXDOMAIN  # was asked before: not refused


async def test_a_decision_about_a_name_takes_less_than_5_ms(world: World) -> None:
    world.start(world.network(*[allow(f"n{number}.example") for number in range(255)], allow("good.example")))
    times = []
    for _ in range(100):
        began_s = time.perf_counter()
        await world.addresses("good.example")
        times.append(time.perf_counter() - began_s)
    assert sorted(times)[50] < 0.005
