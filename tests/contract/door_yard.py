"""A door between a guest's sockets and servers of the test, all in this process; and its fixtures."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import dns.edns
import dns.message
import dns.rcode
import dns.rdatatype
import pytest

from forkyard.guest.base import SocketOwner
from forkyard.models.network import EgressPolicy, EgressRecord, EgressRule
from forkyard.net.base import Listeners, Network
from forkyard.net.door import Door
from forkyard.net.outside import Outside, tcp_connect
from forkyard.net.presets import Presets

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
