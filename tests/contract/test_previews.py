"""Previews over HTTP, with real servers on loopback behind them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from forkyard.gateway import preview, proxy, server, upstream

from .conftest import running_world
from .gateway_yard import Seen, Yard, backend, listening, read_request, running_yard

pytestmark = pytest.mark.anyio

HTML = {"Accept": "text/html,application/xhtml+xml"}


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with running_world(tmp_path) as world, running_yard(world) as yard:
        yield yard


def ok(body: bytes = b"hello", *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 200 OK", *headers, b"Content-Length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


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


# ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_nothing_listens_yet_is_a_page_that_tries_again(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "LISTEN_WAIT_S", 0.1)
    page = await yard.get(9, headers=HTML)
    assert (page.status_code, page.headers["retry-after"]) == (502, "1")
    assert '<meta http-equiv="refresh" content="1">' in page.text
    assert "Nothing listens on this port yet" in page.text
    problem = await yard.get(9)
    assert (problem.status_code, problem.json()["code"]) == (502, "port_closed")


async def test_a_server_on_the_ipv6_loopback_alone_is_told_where_to_listen(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "LISTEN_WAIT_S", 0.1)
    table = """  sl  local_address                         remote_address                        st tx_queue
   0: 00000000000000000000000001000000:0009 00000000000000000000000000000000:0000 0A 00000000
   1: 00000000000000000000000001000000:000A 00000000000000000000000001000000:0009 01 00000000
"""
    for port, said in ((9, "on [::1] only"), (10, "nothing listens"), (11, "nothing listens")):
        yard.world.guests[-1].script("/proc/net/tcp6").feed(table.encode(), None)
        problem = await yard.get(port)
        assert (problem.status_code, problem.json()["code"]) == (502, "port_closed")
        assert said in problem.json()["detail"]


async def test_a_server_that_is_just_starting_is_waited_for(yard: Yard) -> None:
    async with listening(lambda *_: asyncio.sleep(0)) as port:
        pass

    async def late() -> None:
        await asyncio.sleep(0.3)
        server = await asyncio.start_server(handle, "127.0.0.1", port)
        async with server:
            await done.wait()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(ok(b"up now", b"Connection: close"))
        await writer.drain()
        writer.close()

    done = asyncio.Event()
    starting = asyncio.create_task(late())
    assert (await yard.get(port)).text == "up now"
    done.set()
    await starting


async def test_no_such_sandbox_is_said_so(yard: Yard) -> None:
    page = await yard.get(3000, sandbox_id="a" * 20, headers=HTML)
    assert page.status_code == 404
    assert "No such sandbox" in page.text
    assert (await yard.get(3000, sandbox_id="a" * 20)).json()["code"] == "sandbox_not_found"


async def test_a_sandbox_that_has_ended_says_why(yard: Yard) -> None:
    await yard.world.client.delete(f"/sandboxes/{yard.sandbox_id}")
    page = await yard.get(3000, headers=HTML)
    assert page.status_code == 410
    assert "deleted_by_user" in page.text
    assert "refresh" not in page.text


async def test_a_long_wake_is_shown_to_a_browser_and_goes_on(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "WAKE_QUIETLY_S", 0.1)
    await yard.world.client.post(f"/sandboxes/{yard.sandbox_id}/pause")
    hold = yard.world.host.holds["resume"] = asyncio.Event()
    page = await yard.get(3000, headers=HTML)
    assert (page.status_code, page.headers["retry-after"]) == (503, "1")
    assert "Asleep, waking up" in page.text
    hold.set()
    async with backend() as guest:
        assert (await yard.get(guest.port, headers=HTML)).text == "hello"


async def test_a_wake_that_fails_is_told(yard: Yard) -> None:
    await yard.world.client.post(f"/sandboxes/{yard.sandbox_id}/stop")
    answer = await yard.get(3000)
    assert (answer.status_code, answer.json()["code"]) == (409, "state_conflict")


async def test_text_in_a_page_is_text(yard: Yard) -> None:
    page = await yard.client.get("/s/%3Cscript%3E/3000/", headers={"Host": f"localhost:{yard.port}", **HTML})
    assert page.status_code == 422
    raw = await yard.raw(
        b"GET /s/<script>alert(1)</script>/3000/ HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n"
        b"Connection: close\r\n\r\n"
    )
    assert b"<script>" not in raw


# ── access ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_off_is_closed_to_everyone(yard: Yard) -> None:
    async with backend() as guest:
        await yard.set_access("off")
        answer = await yard.get(guest.port, headers={"Authorization": f"Bearer {yard.world.key}"})
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        await yard.set_access("public")
        assert (await yard.get(guest.port)).text == "hello"


async def test_a_token_opens_by_header_and_stays_outside(yard: Yard) -> None:
    await yard.set_access("token")
    async with backend() as guest:
        for headers in ({}, {"Authorization": f"Bearer {yard.world.key}"}, {"X-Forkyard-Preview-Token": "x"}):
            assert (await yard.get(guest.port, headers=headers)).status_code == 401
        token = (await yard.preview(guest.port))["token"]
        assert (await yard.preview(guest.port))["token"] == token
        assert (await yard.get(guest.port, headers={"X-Forkyard-Preview-Token": token})).text == "hello"
        assert token not in str(guest.seen[0].headers)
        assert (await yard.get(guest.port + 1, headers={"X-Forkyard-Preview-Token": token})).status_code == 401
        by_path = await yard.client.get(
            f"/s/{yard.sandbox_id}/{guest.port}/", headers={"X-Forkyard-Preview-Token": token}
        )
        assert by_path.text == "hello"


async def test_a_link_opens_once_and_leaves_a_cookie(yard: Yard) -> None:
    await yard.set_access("token")
    async with backend() as guest:
        link = (await yard.preview(guest.port))["link"]
        path = "/" + link.split("/", 3)[3]
        looked = await yard.request("HEAD", guest.port, path)
        assert looked.status_code == 401  # whoever only looks does not use it up
        opened = await yard.get(guest.port, path + "&a=1", headers=HTML)
        assert (opened.status_code, opened.headers["location"]) == (303, "/?a=1")
        cookie = opened.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=Lax", "Path=/"} <= set(cookie.split("; "))
        assert "Domain" not in cookie
        pair = cookie.partition(";")[0]
        yard.client.cookies.clear()
        headers = {"Cookie": f"mine=1; {pair}; other=2", **HTML}
        assert (await yard.get(guest.port, "/?a=1", headers=headers)).text == "hello"
        assert guest.seen[0].headers["cookie"] == "mine=1; other=2"
        again = await yard.get(guest.port, path, headers=HTML)
        assert again.status_code == 401
        assert "used before" in again.text
        # Another port, and a page of another origin, have nothing of it.
        assert (await yard.get(guest.port + 1, headers=headers)).status_code == 401
        for foreign in (
            {"Origin": "http://3000-b.localhost"},
            {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        ):
            assert (await yard.get(guest.port, headers={**headers, **foreign})).status_code == 401
        followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        assert (await yard.get(guest.port, headers={**headers, **followed})).status_code == 200


async def test_a_rotated_token_takes_cookies_and_links_with_it(yard: Yard) -> None:
    await yard.set_access("token")
    async with backend() as guest:
        old = await yard.preview(guest.port)
        answer = await yard.world.client.post(f"/sandboxes/{yard.sandbox_id}/previews/{guest.port}/rotate")
        token = answer.json()["token"]
        assert token != old["token"]
        assert (await yard.get(guest.port, headers={"X-Forkyard-Preview-Token": old["token"]})).status_code == 401
        path = "/" + old["link"].split("/", 3)[3]
        assert (await yard.get(guest.port, path, headers=HTML)).status_code == 401
        assert (await yard.get(guest.port, headers={"X-Forkyard-Preview-Token": token})).text == "hello"


async def test_tokens_outlive_the_daemon(tmp_path: Path) -> None:
    async with running_world(tmp_path) as world:
        sandbox_id = await world.sandbox()
        await world.client.patch(f"/sandboxes/{sandbox_id}", json={"network": {"ingress": {"access": "token"}}})
        before = (await world.client.get(f"/sandboxes/{sandbox_id}/previews/80")).json()["token"]
        fresh = type(world.control.previews)(world.control.ground, world.control.sleep)
        assert await fresh.token(sandbox_id, 80) == before


async def test_an_api_key_never_reaches_a_server(yard: Yard) -> None:
    async with backend() as guest:
        key = yard.world.key
        await yard.get(guest.port, headers={"Authorization": f"Bearer {key}", "X-API-Key": key})
        await yard.get(guest.port, headers={"Authorization": "Bearer theirs", "X-API-Key": "theirs"})
        assert key not in str(guest.seen[0].headers)
        assert guest.seen[1].headers["authorization"] == "Bearer theirs"
        assert guest.seen[1].headers["x-api-key"] == "theirs"


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
