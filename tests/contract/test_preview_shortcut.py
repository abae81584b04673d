"""Requests that need no task: what they are, that nobody can tell, and that nothing known about them is out of date."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from forkyard.gateway.preview import Gateway
from forkyard.gateway.proxy import Proxy

from .conftest import running_world
from .gateway_yard import HTML, Yard, backend, listening, ok, read_request, running_yard
from .whole_daemon import WholeDaemon, running

pytestmark = pytest.mark.anyio
DEADLINE_S = 20


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with running_world(tmp_path) as world, running_yard(world) as yard:
        yield yard


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of requests that went the long way from their beginning, and `…` for each that was taken over."""
    paths: list[str] = []
    call, serve = Gateway.__call__, Proxy.serve

    async def counted(self: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        paths.append(scope["path"])
        await call(self, scope, receive, send)

    async def taken_over(self: Proxy, visit, receive, send, asked=None):  # type: ignore[no-untyped-def]
        paths.extend([] if asked is None else ["…"])
        await serve(self, visit, receive, send, asked)

    monkeypatch.setattr(Gateway, "__call__", counted)
    monkeypatch.setattr(Proxy, "serve", taken_over)
    return paths


async def until(condition: object) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)


def is_quiet(yard: Yard) -> bool:
    """Nothing is under way any more, as far as anybody counts."""
    return not yard.gateway._proxy._open and not yard.world.control.ground.activity.in_use(yard.sandbox_id)


ANSWERS = {
    "plain": ok(b"hello", b"Set-Cookie: a=1; Domain=localhost; Max-Age=0", b"Alt-Svc: h3", b"Keep-Alive: timeout=5"),
    "empty": ok(b""),
    "large": ok(b"x" * 50_000),
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "chunked and empty": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "not found": b"HTTP/1.1 404 Gone Fishing\r\nContent-Length: 2\r\n\r\nno",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\nETag: x\r\n\r\n",
    "after a hint": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ok(),
}


async def short(
    yard: Yard, tasks: list[str], method: str, port: int, path: str = "/", **options: object
) -> httpx.Response:
    """The answer to a request that took the shortcut. It does not if anything was committed just before, by whomever."""
    for _ in range(50):
        tasks.clear()
        answer = await yard.request(method, port, path, **options)
        if path not in tasks:
            return answer
    raise AssertionError("no request took the shortcut")


async def test_nobody_can_tell(yard: Yard, tasks: list[str]) -> None:
    """The first request of a port goes the long way, and is answered like those that follow."""
    for what, reply in ANSWERS.items():
        async with backend(lambda _, reply=reply: reply) as guest:  # type: ignore[misc]
            first = await yard.get(guest.port, headers={"X-Mine": "1"})
            then = await short(yard, tasks, "GET", guest.port, headers={"X-Mine": "1"})
            assert not tasks, what
            assert (then.status_code, then.headers.multi_items()) == (first.status_code, first.headers.multi_items())
            assert then.content == first.content, what
            assert guest.seen[-1].headers == guest.seen[0].headers
    await until(lambda: is_quiet(yard))


async def test_nor_from_an_answer_to_head(yard: Yard, tasks: list[str]) -> None:
    for what, reply in ANSWERS.items():
        head = reply.rpartition(b"HTTP/1.1")[2].partition(b"\r\n\r\n")[0]
        async with backend(lambda _, head=head: b"HTTP/1.1" + head + b"\r\n\r\n") as guest:  # type: ignore[misc]
            first = await yard.request("HEAD", guest.port)
            then = await short(yard, tasks, "HEAD", guest.port)
            assert not tasks and not then.content, what
            assert (then.status_code, then.headers.multi_items()) == (first.status_code, first.headers.multi_items())


async def test_an_answer_in_pieces_is_taken_over_as_it_comes(yard: Yard, tasks: list[str]) -> None:
    more = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for number in range(3):
                writer.write(b"1\r\n%d\r\n" % number)
                await more.wait()
                more.clear()
            writer.write(b"0\r\n\r\n")

    async with listening(handle) as port:
        async with asyncio.timeout(DEADLINE_S):
            while "…" not in tasks:
                pieces = []
                async with yard.client.stream("GET", "/", headers={"Host": yard.host(port)}) as answer:
                    async for piece in answer.aiter_raw():
                        pieces.append(piece)
                        more.set()
                assert pieces == [b"0", b"1", b"2"]
    await until(lambda: is_quiet(yard))


async def test_a_server_that_closes_instead_is_asked_once_more(yard: Yard, tasks: list[str]) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(ok())
        await read_request(reader)  # and goes

    async with listening(handle) as port:
        async with asyncio.timeout(DEADLINE_S):
            while "…" not in tasks:
                assert (await yard.get(port)).text == "hello"
    await until(lambda: is_quiet(yard))


NO_ANSWERS = (
    b"SSH-2.0-OpenSSH\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"HTTP/1.1 999 X\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: a\rSet-Cookie: b\r\nContent-Length: 0\r\n\r\n",
)


async def test_a_bad_answer_is_told(yard: Yard, tasks: list[str]) -> None:
    for second in NO_ANSWERS:
        async with backend(lambda seen, second=second: ok() if "good" in seen.request else second) as guest:  # type: ignore[misc]
            while "…" not in tasks:
                assert (await yard.get(guest.port, "/good")).status_code == 200
                answer = await yard.get(guest.port, "/bad")
                assert (answer.status_code, answer.json()["code"]) == (502, "bad_answer"), second
            tasks.clear()
    await until(lambda: is_quiet(yard))


async def test_a_server_that_thinks_too_long_is_given_up(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(ok())
        await reader.read()

    async with listening(handle) as port:
        assert (await yard.get(port)).status_code == 200
        monkeypatch.setattr("forkyard.gateway.proxy.ANSWER_S", 0.05)
        answer = await yard.get(port)
        assert (answer.status_code, answer.json()["code"]) == (504, "timeout")
    await until(lambda: is_quiet(yard))


async def test_a_client_that_leaves_is_not_waited_for(yard: Yard) -> None:
    silent, left = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(ok())
        await read_request(reader)
        silent.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()

    async with listening(handle) as port:
        assert (await yard.get(port)).status_code == 200
        _, writer = await asyncio.open_connection("127.0.0.1", yard.port)
        writer.write(f"GET / HTTP/1.1\r\nHost: {yard.host(port)}\r\n\r\n".encode())
        await asyncio.wait_for(silent.wait(), DEADLINE_S)
        assert not is_quiet(yard)
        writer.transport.abort()
        await asyncio.wait_for(left.wait(), DEADLINE_S)
        await until(lambda: is_quiet(yard))


async def test_requests_sent_at_once_are_answered_in_turn(yard: Yard) -> None:
    async with backend(lambda seen: ok(seen.request.encode())) as guest:
        await yard.get(guest.port)
        head = f"Host: {yard.host(guest.port)}\r\n"
        requests = "".join(f"GET /{number} HTTP/1.1\r\n{head}\r\n" for number in range(20))
        requests += f"GET /last HTTP/1.1\r\n{head}Connection: close\r\n\r\n"
        answers = await yard.raw(requests.encode(), timeout_s=DEADLINE_S)
        found = [line.split()[1] for line in answers.split(b"\r\n") if b"GET /" in line]
        assert found == [b"/%d" % number for number in range(20)] + [b"/last"]
        assert answers.count(b"connection: close") == 1
    await until(lambda: is_quiet(yard))


async def test_a_change_of_the_policy_counts_for_the_next_request(yard: Yard, tasks: list[str]) -> None:
    async with backend() as guest:
        for _ in range(2):
            assert (await yard.get(guest.port)).status_code == 200
        await yard.set_access("off")
        assert (await yard.get(guest.port)).status_code == 403
        await yard.set_access("token")
        token = {"X-Forkyard-Preview-Token": (await yard.preview(guest.port))["token"]}
        wrong = {"X-Forkyard-Preview-Token": "fyp_" + "x" * 32}
        for _ in range(2):
            assert (await yard.get(guest.port, headers=token)).status_code == 200
            assert (await yard.get(guest.port, headers=wrong)).status_code == 401
            assert (await yard.get(guest.port)).status_code == 401
        assert (await short(yard, tasks, "GET", guest.port, "/with", headers=token)).status_code == 200
        assert (await yard.get(guest.port, "/without")).status_code == 401
        assert tasks == ["/without"]
        assert not any("x-forkyard-preview-token" in seen.headers for seen in guest.seen)


async def test_a_sandbox_that_slept_is_woken_and_a_browser_is_served_alike(yard: Yard, tasks: list[str]) -> None:
    async with backend() as guest:
        assert (await short(yard, tasks, "GET", guest.port, headers=HTML)).text == "hello"
        answer = await yard.world.client.post(f"/sandboxes/{yard.sandbox_id}/pause")
        assert answer.status_code == 200, answer.text
        assert (await yard.get(guest.port, "/waking", headers=HTML)).text == "hello"
        assert tasks == ["/waking"]
        assert (await short(yard, tasks, "GET", guest.port, headers=HTML)).text == "hello"


async def test_what_is_more_than_a_head_goes_the_long_way(yard: Yard, tasks: list[str]) -> None:
    async with backend() as guest:
        await short(yard, tasks, "GET", guest.port, "/warm")
        guest.seen.clear()
        await yard.request("POST", guest.port, "/post")
        await yard.request("PUT", guest.port, "/put", content=b"x")
        await yard.request("GET", guest.port, "/get", content=b"x")
        await yard.request("GET", guest.port, "/upgrade", headers={"Connection": "upgrade", "Upgrade": "h2c"})
        assert tasks == ["/post", "/put", "/get", "/upgrade"]
        assert [seen.body for seen in guest.seen] == [b"", b"x", b"x", b""]


async def test_what_passes_is_counted_however_it_passes(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[tuple[int, int]] = []
    monkeypatch.setattr(
        yard.world.control.ground.ingress,
        "passed",
        lambda _, *, bytes_in=0, bytes_out=0: counts.append((bytes_in, bytes_out)),
    )
    async with backend() as guest:
        for number in range(1, 4):
            await yard.get(guest.port)
            await until(lambda number=number: len(counts) == number)  # type: ignore[misc]
    assert counts[0] == counts[1] == counts[2] and min(counts[0]) > 0
    metrics = (await yard.client.get("/metrics", headers={"Authorization": f"Bearer {yard.world.key}"})).text
    assert 'forkyard_preview_requests_total{outcome="answered"} 3.0' in metrics
    assert "forkyard_preview_seconds_count 3.0" in metrics


# ── the daemon as it is ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeDaemon]:
    with running(tmp_path_factory.mktemp("d")) as daemon:
        yield daemon


async def test_what_belongs_to_clients_of_others_is_looked_at_first(daemon: WholeDaemon, tasks: list[str]) -> None:
    async with backend() as guest:
        with daemon.client() as client:
            sandbox = await asyncio.to_thread(client.sandboxes.create)
            name = (await asyncio.to_thread(sandbox.url, guest.port)).removeprefix("http://")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{name.rpartition(':')[2]}", trust_env=False) as web:
            named = {"Host": name, "E2b-Sandbox-Id": "a" * 20, "X-Freestyle-Sdk": "1"}
            async with asyncio.timeout(DEADLINE_S):
                while not tasks or "/v1/vms" in tasks:  # a page may have such paths of its own
                    tasks[:] = ["a request"]
                    assert (await web.get("/v1/vms", headers=named)).text == "hello"
            theirs = {"Host": name, "E2b-Traffic-Access-Token": "x"}
            assert (await web.get("/theirs", headers=theirs)).text == "hello"
        assert "/theirs" in tasks
        assert "e2b-traffic-access-token" not in guest.seen[-1].headers
