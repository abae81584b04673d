"""Requests through the gateway to servers behind it: what arrives, by which name, over which connections."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from .conftest import running_world
from .gateway_yard import Seen, Yard, backend, listening, ok, read_request, running_yard

pytestmark = pytest.mark.anyio


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with running_world(tmp_path) as world, running_yard(world) as yard:
        yield yard


# ── through ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_reaches_the_server_as_the_client_sent_it(yard: Yard) -> None:
    async with backend() as guest:
        answer = await yard.get(guest.port, "/a%20b/c?x=1&y=%2F", headers={"X-Mine": "1", "Cookie": "a=b"})
        assert (answer.status_code, answer.text) == (200, "hello")
        (seen,) = guest.seen
        assert seen.request == "GET /a%20b/c?x=1&y=%2F HTTP/1.1"
        assert (seen.headers["x-mine"], seen.headers["cookie"]) == ("1", "a=b")
        assert seen.headers["host"] == yard.host(guest.port)


async def test_the_gateway_says_where_a_request_came_from_and_nobody_else_does(yard: Yard) -> None:
    forged = {"X-Forwarded-Host": "other", "X-Forwarded-For": "9.9.9.9", "Forwarded": "host=x", "X-Real-IP": "9.9.9.9"}
    async with backend() as guest:
        await yard.get(guest.port, headers=forged)
        headers = guest.seen[0].headers
    assert headers["x-forwarded-host"] == yard.host(guest.port)
    assert headers["x-forwarded-for"] == "127.0.0.1"
    assert (headers["x-forwarded-proto"], headers["x-forwarded-port"]) == ("http", str(yard.port))
    assert not {"forwarded", "x-real-ip", "x-forwarded-prefix"} & headers.keys()


async def test_hop_by_hop_headers_stay_on_their_hop(yard: Yard) -> None:
    async with backend(lambda _: ok(b"", b"Connection: X-Secret", b"X-Secret: 1", b"Keep-Alive: timeout=5")) as guest:
        headers = {"Connection": "keep-alive, X-Hop", "X-Hop": "1", "TE": "trailers", "Proxy-Authorization": "x"}
        answer = await yard.get(guest.port, headers=headers)
        assert not {"x-hop", "te", "proxy-authorization", "connection"} & guest.seen[0].headers.keys()
        assert not {"x-secret", "keep-alive", "connection"} & answer.headers.keys()


async def test_the_answer_keeps_its_headers_and_gets_no_second_ones(yard: Yard) -> None:
    reply = ok(b"x", b"Server: mine", b"Date: Thu, 01 Jan 1970 00:00:00 GMT", b"Set-Cookie: a=1", b"Set-Cookie: b=2")
    async with backend(lambda _: reply) as guest:
        answer = await yard.get(guest.port)
    assert answer.headers.get_list("server") == ["mine"]
    assert len(answer.headers.get_list("date")) == 1
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]


async def test_a_cookie_cannot_be_set_for_the_neighbours(yard: Yard) -> None:
    async with backend(lambda _: ok(b"", b"Set-Cookie: a=1; Domain=localhost; Path=/x; HttpOnly")) as guest:
        answer = await yard.get(guest.port)
    assert answer.headers["set-cookie"] == "a=1; Path=/x; HttpOnly"


@pytest.mark.parametrize("method", ["OPTIONS", "DELETE", "PATCH", "PUT", "POST", "PROPFIND"])
async def test_every_method_goes_through(yard: Yard, method: str) -> None:
    async with backend() as guest:
        assert (await yard.request(method, guest.port, "/x")).text == "hello"
        assert guest.seen[0].request.startswith(f"{method} /x ")


async def test_head_has_a_length_and_no_body(yard: Yard) -> None:
    async with backend(lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n") as guest:
        for _ in range(3):
            answer = await yard.request("HEAD", guest.port)
            assert (answer.headers["content-length"], answer.content) == ("12345", b"")
        assert guest.connections == 1


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_content_end_at_their_head(yard: Yard, status: int) -> None:
    async with backend(lambda _: b"HTTP/1.1 %d X\r\nContent-Length: 3\r\nETag: x\r\n\r\n" % status) as guest:
        for _ in range(2):
            assert (await yard.get(guest.port)).status_code == status


async def test_a_body_that_ends_with_the_connection_is_whole(yard: Yard) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.0 200 OK\n\n" + b"x" * 100_000)  # as a server of three lines of shell does
        await writer.drain()

    async def finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await handle(reader, writer)
        writer.write_eof()
        await reader.read()

    async with listening(finish) as port:
        assert len((await yard.get(port)).content) == 100_000


async def test_trailers_and_early_hints_are_left_out(yard: Yard) -> None:
    reply = (
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n"
    )
    async with backend(lambda _: reply) as guest:
        for _ in range(2):
            answer = await yard.get(guest.port)
            assert answer.text == "abc"
            assert not {"link", "x-trailer"} & answer.headers.keys()
        assert guest.connections == 1


async def test_events_arrive_as_they_are_sent(yard: Yard) -> None:
    go = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n")
        await go.wait()
        writer.write(b"data: 2\n\n")
        await reader.read()

    async with listening(handle) as port:
        headers = {"Host": yard.host(port), "Accept": "text/event-stream"}
        async with yard.client.stream("GET", "/", headers=headers) as answer:
            pieces = answer.aiter_text()
            assert await anext(pieces) == "data: 1\n\n"
            assert not yard.world.control.ground.activity.in_use(yard.sandbox_id)
            go.set()
            assert await anext(pieces) == "data: 2\n\n"


async def test_the_server_learns_that_the_client_has_gone(yard: Yard) -> None:
    gone = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n\n")
        await reader.read()
        gone.set()

    async with listening(handle) as port:
        async with yard.client.stream("GET", "/", headers={"Host": yard.host(port)}) as answer:
            await anext(answer.aiter_bytes())
        async with asyncio.timeout(5):
            await gone.wait()


async def test_an_upload_of_100_mb_is_streamed_and_the_answer_too(yard: Yard) -> None:
    size, sent, received = 100 * 2**20, hashlib.sha256(), hashlib.sha256()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        left = size
        while left:
            piece = await reader.read(2**16)
            left -= len(piece)
            writer.write(piece)  # back at once: both directions flow together
            await writer.drain()

    block = os.urandom(2**20)
    async with listening(handle) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", yard.port)
        writer.write(f"POST / HTTP/1.1\r\nHost: {yard.host(port)}\r\nContent-Length: {size}\r\n\r\n".encode())

        async def upload() -> None:
            for _ in range(100):
                sent.update(block)
                writer.write(block)
                await writer.drain()

        uploading = asyncio.create_task(upload())
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        left = size
        while left:
            piece = await reader.read(2**18)
            assert piece
            received.update(piece)
            left -= len(piece)
        await uploading
        writer.close()
    assert received.digest() == sent.digest()


async def test_a_body_of_unknown_length_stays_chunked(yard: Yard) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"one"
        await asyncio.sleep(0)
        yield b"two"

    async with backend() as guest:
        assert (await yard.request("POST", guest.port, content=body())).text == "hello"
        assert guest.seen[0].body == b"onetwo"
        assert guest.seen[0].headers["transfer-encoding"] == "chunked"
        assert "content-length" not in guest.seen[0].headers


async def test_an_answer_may_come_before_the_body_is_read(yard: Yard) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno")
        await writer.drain()
        await asyncio.sleep(5)

    async def body() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        await asyncio.sleep(0.2)
        yield b"x" * 1000

    async with listening(handle) as port:
        answer = await yard.request("POST", port, content=body())
        assert (answer.status_code, answer.text) == (413, "no")


async def test_an_answer_that_breaks_off_is_not_taken_for_whole(yard: Yard) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        await writer.drain()

    async with listening(handle) as port:
        with pytest.raises(httpx.RemoteProtocolError):
            await yard.get(port)


# ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_connections_to_the_server_are_used_again(yard: Yard) -> None:
    async with backend() as guest:
        for _ in range(5):
            await yard.get(guest.port)
        assert guest.connections == 1


async def test_a_connection_that_was_closed_meanwhile_is_replaced_unseen(yard: Yard) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(ok())
        await writer.drain()
        with_second = await reader.read(1)  # the next request arrives: too late, it is closed without an answer
        assert with_second

    async with listening(handle) as port:
        for _ in range(3):
            assert (await yard.get(port)).text == "hello"


async def test_what_must_not_happen_twice_gets_a_new_connection(yard: Yard) -> None:
    async with backend() as guest:
        await yard.get(guest.port)
        await yard.request("POST", guest.port, content=b"x")
        await yard.request("POST", guest.port, content=b"x")
        assert guest.connections == 3


async def test_a_machine_that_slept_is_reached_by_new_connections(yard: Yard) -> None:
    async with backend() as guest:
        await yard.get(guest.port)
        await yard.world.client.post(f"/sandboxes/{yard.sandbox_id}/pause")
        assert (await yard.get(guest.port)).text == "hello"
        assert guest.connections == 2
        info = (await yard.world.client.get(f"/sandboxes/{yard.sandbox_id}")).json()
        assert (info["state"], info["cause"]) == ("running", "woken")


async def test_a_warm_request_costs_no_query(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    async with backend() as guest:
        await yard.get(guest.port)
        store = yard.world.control.ground.store
        monkeypatch.setattr(type(store), "_read", None)
        assert (await yard.get(guest.port)).text == "hello"


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_by_path_for_clients_without_wildcard_names(yard: Yard) -> None:
    def reply(seen: Seen) -> bytes:
        match seen.request.split()[1]:
            case "/here":
                return ok(b"here", b"Set-Cookie: a=1; Path=/x", b"Set-Cookie: b=2", b"Clear-Site-Data: *")
            case "/absolute":
                return b"HTTP/1.1 302 X\r\nLocation: http://%b/here\r\nContent-Length: 0\r\n\r\n" % host.encode()
            case other:
                where = {"/": b"/here", "/away": b"https://example.com/x", "/relative": b"here"}[other]
                return b"HTTP/1.1 302 X\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % where

    host = f"127.0.0.1:{yard.port}"
    async with backend(reply) as guest:
        base = f"/s/{yard.sandbox_id}/{guest.port}"
        assert (await yard.client.get(base)).headers["location"] == f"{base}/"
        for path, where in {
            "/": f"{base}/here",
            "/away": "https://example.com/x",
            "/relative": "here",
            "/absolute": f"{base}/here",
        }.items():
            assert (await yard.client.get(base + path)).headers["location"] == where
        answer = await yard.client.get(f"{base}/here")
        assert answer.headers.get_list("set-cookie") == [f"a=1; Path={base}/x", f"b=2; Path={base}/"]
        assert answer.headers["content-security-policy"].startswith("sandbox allow-scripts")
        assert "clear-site-data" not in answer.headers
        assert guest.seen[-1].request == "GET /here HTTP/1.1"
        assert guest.seen[-1].headers["x-forwarded-prefix"] == base


async def test_below_a_public_domain(yard: Yard) -> None:
    yard.world.control.previews.address = preview_address = type(yard.world.control.previews.address)(
        "preview.example.com", "https", 443
    )
    async with backend() as guest:
        name = f"{guest.port}-{yard.sandbox_id}.preview.example.com"
        assert (await yard.client.get("/", headers={"Host": name})).text == "hello"
        assert guest.seen[0].headers["x-forwarded-proto"] == "https"
        assert guest.seen[0].headers["x-forwarded-port"] == "443"
        assert (
            (await yard.preview(guest.port))["url"]
            == f"https://{name}"
            == preview_address.url(yard.sandbox_id, guest.port)
        )


async def test_whoever_asks_by_an_address_gets_one_that_works_there(yard: Yard) -> None:
    answer = await yard.world.client.get(
        f"/sandboxes/{yard.sandbox_id}/previews/3000", headers={"Host": "192.0.2.7:7070"}
    )
    assert answer.json()["url"] == f"http://192.0.2.7:7070/s/{yard.sandbox_id}/3000/"
    assert (await yard.preview(3000))["url"] == f"http://3000-{yard.sandbox_id}.localhost:{yard.port}"


@pytest.mark.parametrize("port", ["0", "70000", "x"])
async def test_an_impossible_port_is_said_so(yard: Yard, port: str) -> None:
    named = await yard.client.get("/", headers={"Host": f"{port}-{yard.sandbox_id}.localhost"})
    by_path = await yard.client.get(f"/s/{yard.sandbox_id}/{port}/")
    api = await yard.world.client.get(f"/sandboxes/{yard.sandbox_id}/previews/{port}")
    assert [answer.status_code for answer in (named, by_path, api)] == [422, 422, 422]
    assert (
        f"'{port}' is no port; ports are numbers from 1 to 65535" in named.json()["detail"] == by_path.json()["detail"]
    )


async def test_on_the_host_of_a_preview_only_the_sandbox_answers(yard: Yard) -> None:
    async with backend() as guest:
        answer = await yard.get(guest.port, "/api/v1/health")
        assert answer.text == "hello"
        assert guest.seen[0].request == "GET /api/v1/health HTTP/1.1"


async def test_a_header_cannot_name_another_sandbox(yard: Yard) -> None:
    other = await yard.world.sandbox()
    async with backend() as guest:
        forged = {"X-Forwarded-Host": yard.host(guest.port, other), "X-Original-URL": f"/s/{other}/1/"}
        await yard.get(guest.port, headers=forged)
        assert guest.seen[0].headers["x-forwarded-host"] == yard.host(guest.port)
        twice = b"GET / HTTP/1.1\r\nHost: %b\r\nHost: %b\r\nConnection: close\r\n\r\n"
        both = twice % (yard.host(guest.port).encode(), yard.host(guest.port, other).encode())
        assert (await yard.raw(both)).startswith(b"HTTP/1.1 422")


async def test_a_page_of_a_preview_cannot_use_the_api(yard: Yard) -> None:
    headers = {"Authorization": f"Bearer {yard.world.key}", "Origin": f"http://{yard.host(3000)}"}
    answer = await yard.client.get("/api/v1/sandboxes", headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    headers["Origin"] = "http://localhost:7070"
    assert (await yard.client.get("/api/v1/sandboxes", headers=headers)).status_code == 200
