"""What a preview says in place of an answer, and who may open it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forkyard.gateway import preview, proxy

from .conftest import running_world
from .gateway_yard import HTML, Yard, backend, listening, ok, read_request, running_yard

pytestmark = pytest.mark.anyio


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with running_world(tmp_path) as world, running_yard(world) as yard:
        yield yard


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
