"""Clients and servers of previews that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forkyard.gateway import server, upstream

from .conftest import running_world
from .gateway_yard import Yard, backend, listening, read_request, running_yard

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
