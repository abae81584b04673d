"""Clients and servers of previews that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import httpx
import pytest

from forkyard.gateway import proxy, server, upstream

from .conftest import running_world
from .gateway_yard import HTML, Yard, backend, listening, read_request, running_yard

pytestmark = pytest.mark.anyio


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with running_world(tmp_path) as world, running_yard(world) as yard:
        yield yard


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nBad Header\r\n\r\n",
        b"HTTP/1.1 999 X\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\0b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"a" * (upstream.MAX_HEAD_BYTES * 3) + b"\r\n\r\n",
        b"",
    ],
)
async def test_a_server_that_does_not_speak_http_is_a_bad_answer(yard: Yard, reply: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(reply)
        await writer.drain()

    async with listening(handle) as port:
        answer = await yard.get(port)
        assert (answer.status_code, answer.json()["code"]) == (502, "bad_answer"), answer.text


@pytest.mark.parametrize(
    "request_",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nabc",
        b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n",
        b"GET  HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_malformed_requests_are_refused_before_anybody_reads_them(yard: Yard, request_: bytes) -> None:
    assert (await yard.raw(request_)).startswith(b"HTTP/1.1 400")


async def test_a_giant_head_is_refused_and_a_large_one_goes_through(yard: Yard) -> None:
    with contextlib.suppress(ConnectionResetError):  # it is closed while more comes
        answer = await yard.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 2_000_000)
        assert answer.startswith(b"HTTP/1.1 400")
    async with backend() as guest:
        large = "x" * 60_000
        await yard.get(guest.port, headers={"X-Large": large})
        assert guest.seen[0].headers["x-large"] == large


async def test_a_client_that_never_finishes_its_head_is_dropped(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.GuardedHttp, "head_s", 0.2)
    for beginning in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
        with contextlib.suppress(ConnectionResetError):
            assert await yard.raw(beginning) == b""


async def test_a_slow_reader_holds_back_its_server_and_nobody_else(yard: Yard) -> None:
    sent = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with listening(handle) as port, backend() as other:
        _, writer = await asyncio.open_connection("127.0.0.1", yard.port)
        writer.write(f"GET / HTTP/1.1\r\nHost: {yard.host(port)}\r\n\r\n".encode())
        before = -1
        async with asyncio.timeout(10):
            while sent == 0 or sent != before:
                before = sent
                await asyncio.sleep(0.2)
        assert sent < 32 * 2**20
        assert (await yard.get(other.port)).text == "hello"
        writer.transport.abort()


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server with more to say than anybody reads."""
    await read_request(reader)
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(65536))
        await writer.drain()


async def asking(yard: Yard, port: int) -> socket.socket:
    """A client that never reads its answer."""
    loop, made = asyncio.get_running_loop(), socket.socket()
    made.setblocking(False)
    await loop.sock_connect(made, ("127.0.0.1", yard.port))
    await loop.sock_sendall(made, f"GET / HTTP/1.1\r\nHost: {yard.host(port)}\r\n\r\n".encode())
    return made


async def test_a_client_that_never_reads_is_dropped_and_one_that_reads_slowly_is_not(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.Gathering, "stall_s", 0.5)
    ended = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await endless(reader, writer)
        finally:
            ended.set()

    async with listening(handle) as port, listening(endless) as other:
        with contextlib.closing(await asking(yard, port)), contextlib.closing(await asking(yard, other)) as slow:
            async with asyncio.timeout(10):
                while not ended.is_set():
                    await asyncio.get_running_loop().sock_recv(slow, 2**20)
                    await asyncio.sleep(0.01)
            assert yard.gateway._proxy._open[yard.sandbox_id] == 1


@pytest.mark.parametrize("size", [1000, 10_000_000])
async def test_a_client_that_is_sent_away_and_does_not_take_the_rest_is_dropped(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(server.Gathering, "stall_s", 0.3)
    transport = Stuck(size)
    gathering = server.Gathering(cast(asyncio.Transport, transport), asyncio.get_running_loop())
    gathering.close()
    async with asyncio.timeout(5):
        await transport.aborted.wait()


class Stuck:
    """A transport whose other end takes nothing."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.aborted = asyncio.Event()

    def close(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self._size

    def abort(self) -> None:
        self.aborted.set()


async def test_one_client_leaves_room_for_others_and_what_is_too_much_is_said(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "MAX_EXCHANGES", 3)
    monkeypatch.setattr(proxy, "MAX_EXCHANGES_OF_CLIENT", 2)
    async with listening(endless) as port, backend() as other:
        held = [await asking(yard, port) for _ in range(2)]
        async with asyncio.timeout(5):
            while yard.gateway._proxy._open[yard.sandbox_id] < 2:
                await asyncio.sleep(0.01)
        refused = await yard.get(other.port)
        assert (refused.status_code, refused.json()["code"]) == (503, "sandbox_busy")
        assert "2 requests of 127.0.0.1 to this sandbox" in refused.json()["detail"]
        assert "This sandbox is busy" in (await yard.get(other.port, headers=HTML)).text
        elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(transport=elsewhere, base_url=str(yard.client.base_url)) as client:
            assert (await client.get("/", headers={"Host": yard.host(other.port)})).text == "hello"
        for one in held:
            one.close()
        async with asyncio.timeout(5):
            while (await yard.get(other.port)).status_code != 200:
                await asyncio.sleep(0.05)
    assert not yard.gateway._proxy._open and not yard.gateway._proxy._of_client


async def test_a_client_that_leaves_in_the_middle_of_an_upload_leaves_nothing_whole(yard: Yard) -> None:
    ended = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1_000_000)
        ended.set()

    async with listening(handle) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", yard.port)
        writer.write(f"POST / HTTP/1.1\r\nHost: {yard.host(port)}\r\nContent-Length: 1000000\r\n\r\nabc".encode())
        await asyncio.sleep(0.1)
        writer.transport.abort()
        async with asyncio.timeout(5):
            await ended.wait()
    async with asyncio.timeout(5):
        while yard.world.control.ground.activity.in_use(yard.sandbox_id):
            await asyncio.sleep(0.01)


async def test_the_api_is_where_it_was(yard: Yard) -> None:
    assert (await yard.client.get("/api/v1/health")).json()["status"] == "ok"
    assert (await yard.client.get("/", headers={"Host": "localhost"})).headers["location"] == "/api/v1/docs"
    metrics = await yard.client.get("/metrics", headers={"Authorization": f"Bearer {yard.world.key}"})
    assert "forkyard_preview_requests" in metrics.text
