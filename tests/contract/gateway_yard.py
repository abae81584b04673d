"""A gateway in front of the API of a host that is only memory, served on loopback; and servers to stand behind it.

On the memory host the loopback of this machine is that of every guest: a server of the test is a server in a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import httpx

from forkyard.control.previews import Address
from forkyard.gateway.preview import Gateway
from forkyard.gateway.server import Server, configured

from .conftest import World

#: What a browser accepts.
HTML = {"Accept": "text/html,application/xhtml+xml"}

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Yard:
    world: World
    gateway: Gateway
    port: int
    client: httpx.AsyncClient
    sandbox_id: str

    def host(self, port: int, sandbox_id: str | None = None) -> str:
        return f"{port}-{sandbox_id or self.sandbox_id}.localhost:{self.port}"

    async def get(self, port: int, path: str = "/", **options: object) -> httpx.Response:
        return await self.request("GET", port, path, **options)

    async def request(
        self, method: str, port: int, path: str = "/", *, sandbox_id: str | None = None, **options: object
    ) -> httpx.Response:
        headers = {"Host": self.host(port, sandbox_id), **options.pop("headers", {})}  # type: ignore[dict-item]
        return await self.client.request(method, path, headers=headers, **options)  # type: ignore[arg-type]

    async def raw(self, data: bytes, *, timeout_s: float = 5) -> bytes:
        """Send these bytes as they are; everything that comes back until the connection is closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            async with asyncio.timeout(timeout_s):
                return await reader.read()
        finally:
            writer.close()

    async def set_access(self, access: str, sandbox_id: str | None = None) -> None:
        body = {"network": {"ingress": {"access": access}}}
        answer = await self.world.client.patch(f"/sandboxes/{sandbox_id or self.sandbox_id}", json=body)
        assert answer.status_code == 200, answer.text

    async def preview(self, port: int) -> dict[str, str]:
        answer = await self.world.client.get(f"/sandboxes/{self.sandbox_id}/previews/{port}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


@contextlib.asynccontextmanager
async def running_yard(world: World) -> AsyncIterator[Yard]:
    gateway = Gateway(world.app, world.control)
    config = configured(gateway, grace_s=1, shortcut=gateway.shortcut)
    config.host, config.port = "127.0.0.1", 0
    server = Server(config, signals=False)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    world.control.previews.address = Address(port=port)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as client:
        yield Yard(world, gateway, port, client, await world.sandbox())
    gateway.close()
    server.should_exit = True
    await serving


@dataclass
class Seen:
    """What a server in a sandbox was asked."""

    request: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Backend:
    """A server of the test: answers with what `reply` says, and remembers what it saw."""

    reply: Callable[[Seen], bytes] = lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                seen = await read_request(reader)
                self.seen.append(seen)
                writer.write(self.reply(seen))
                await writer.drain()
        writer.close()


async def read_request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *rest = head.strip().split("\r\n")
    headers = dict(item.split(": ", 1) for item in rest)
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    return Seen(line, headers, body)


@contextlib.asynccontextmanager
async def listening(handle: Handle) -> AsyncIterator[int]:
    """A server on a free port of the loopback. Its connections are dropped at the end, whatever they do."""
    tasks: set[asyncio.Task[None]] = set()

    async def kept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handle(reader, writer)
        except (asyncio.CancelledError, ConnectionError):
            pass
        finally:
            tasks.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(kept, "127.0.0.1", 0, limit=2**20)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5)


@contextlib.asynccontextmanager
async def backend(reply: Callable[[Seen], bytes] | None = None) -> AsyncIterator[Backend]:
    made = Backend() if reply is None else Backend(reply)
    async with listening(made.handle) as port:
        made.port = port
        yield made


def ok(body: bytes = b"hello", *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 200 OK", *headers, b"Content-Length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)
