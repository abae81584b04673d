"""WebSockets through previews, with a real server behind them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response

from forkyard.gateway import holding, server

from .conftest import running_world
from .gateway_yard import Yard, backend, running_yard

pytestmark = pytest.mark.anyio


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with running_world(tmp_path) as world, running_yard(world) as yard:
        yield yard


async def echo(socket: ServerConnection) -> None:
    async for message in socket:
        await socket.send(message)


@contextlib.asynccontextmanager
async def socket_server(handler: Any = echo, **options: Any) -> AsyncIterator[int]:
    async with serve(handler, "127.0.0.1", 0, max_size=None, close_timeout=1, **options) as server:
        yield server.sockets[0].getsockname()[1]


def opened(yard: Yard, port: int, path: str = "/", **options: Any) -> connect:
    given = {"max_size": None, "proxy": None, "open_timeout": 10, **options}
    return connect(f"ws://{yard.host(port)}{path}", host="127.0.0.1", port=yard.port, **given)


async def test_messages_go_both_ways_and_keep_their_kind(yard: Yard) -> None:
    async with socket_server() as port, opened(yard, port) as socket:
        for message in ("text ✓", b"bytes", "", b""):
            await socket.send(message)
            assert await socket.recv() == message


async def test_the_handshake_is_the_clients(yard: Yard) -> None:
    seen: list[Request] = []

    async def note(socket: ServerConnection) -> None:
        assert socket.request is not None
        seen.append(socket.request)
        await echo(socket)

    async with socket_server(note, subprotocols=["vite-hmr"]) as port:
        headers = {"Cookie": "a=b", "X-Forwarded-Host": "forged"}
        async with opened(
            yard,
            port,
            "/hot?token=x",
            subprotocols=["other", "vite-hmr"],
            additional_headers=headers,
            origin="http://o",
        ) as socket:
            assert socket.subprotocol == "vite-hmr"
            await socket.send("x")
            await socket.recv()
    (request,) = seen
    assert request.path == "/hot?token=x"
    assert request.headers["Host"] == request.headers["X-Forwarded-Host"] == yard.host(port)
    assert (request.headers["Origin"], request.headers["Cookie"]) == ("http://o", "a=b")


async def test_large_messages_go_through(yard: Yard) -> None:
    async with socket_server() as port, opened(yard, port) as socket:
        large = bytes(20 * 2**20)
        await socket.send(large)
        assert await socket.recv() == large


@pytest.mark.parametrize("code", [1000, 1001, 1011, 4321])
async def test_the_server_closes_with_its_own_code(yard: Yard, code: int) -> None:
    async def close(socket: ServerConnection) -> None:
        await socket.close(code, "because")

    async with socket_server(close) as port, opened(yard, port) as socket:
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (code, "because")


async def test_the_client_closes_with_its_own_code(yard: Yard) -> None:
    told: asyncio.Future[tuple[int | None, str | None]] = asyncio.get_running_loop().create_future()

    async def wait(socket: ServerConnection) -> None:
        await socket.wait_closed()
        told.set_result((socket.close_code, socket.close_reason))

    async with socket_server(wait) as port:
        socket = await opened(yard, port)
        await socket.close(4000, "done")
        async with asyncio.timeout(5):
            assert await told == (4000, "done")


async def test_a_server_that_vanishes_closes_with_service_restart(yard: Yard) -> None:
    async def vanish(socket: ServerConnection) -> None:
        socket.transport.abort()

    async with socket_server(vanish) as port, opened(yard, port) as socket:
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1012


async def test_a_server_that_refuses_is_heard(yard: Yard) -> None:
    def refuse(socket: ServerConnection, request: Request) -> Response:
        return socket.respond(418, "no sockets here")

    async with socket_server(process_request=refuse) as port:
        with pytest.raises(InvalidStatus) as refused:
            await opened(yard, port)
    assert refused.value.response.status_code == 418
    assert refused.value.response.body == b"no sockets here"


async def test_a_server_without_websockets_is_heard(yard: Yard) -> None:
    async with backend() as guest:
        with pytest.raises(InvalidStatus) as refused:
            await opened(yard, guest.port)
    assert refused.value.response.status_code in (200, 502)


async def test_a_token_is_asked_for(yard: Yard) -> None:
    await yard.set_access("token")
    async with socket_server() as port:
        with pytest.raises(InvalidStatus) as refused:
            await opened(yard, port)
        assert refused.value.response.status_code == 401
        token = (await yard.preview(port))["token"]
        async with opened(yard, port, additional_headers={"X-Forkyard-Preview-Token": token}) as socket:
            await socket.send("in")
            assert await socket.recv() == "in"


async def test_an_open_socket_lets_its_sandbox_sleep_and_a_message_wakes_it(yard: Yard) -> None:
    activity = yard.world.control.ground.activity
    async with socket_server() as port, opened(yard, port) as socket:
        await socket.send("x")
        await socket.recv()
        assert not activity.in_use(yard.sandbox_id)
        await yard.world.client.post(f"/sandboxes/{yard.sandbox_id}/pause")
        await socket.send("wake up")
        assert await socket.recv() == "wake up"
        assert (await yard.world.client.get(f"/sandboxes/{yard.sandbox_id}")).json()["cause"] == "woken"


async def test_a_machine_that_was_replaced_is_connected_to_anew(yard: Yard) -> None:
    async with socket_server() as port, opened(yard, port) as socket:
        await yard.world.client.post(f"/sandboxes/{yard.sandbox_id}/pause", json={"durable": True})
        await socket.send("x")  # resumed from disk: another machine, which knows nothing of this socket
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012
        async with opened(yard, port) as again:
            await again.send("y")
            assert await again.recv() == "y"


async def test_a_client_that_does_not_read_holds_back_its_server(yard: Yard) -> None:
    sent = 0

    async def flood(socket: ServerConnection) -> None:
        nonlocal sent
        while True:
            await socket.send(bytes(2**18))
            sent += 2**18

    async with socket_server(flood) as port:
        socket = await opened(yard, port, max_queue=1)
        before = -1
        async with asyncio.timeout(20):
            while sent == 0 or sent != before:
                before = sent
                await asyncio.sleep(0.3)
        assert sent < 64 * 2**20
        socket.transport.abort()


async def test_a_client_that_never_reads_is_dropped(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.Gathering, "stall_s", 0.5)
    gone = asyncio.Event()

    async def flood(socket: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await socket.send(bytes(2**18))
        gone.set()

    async with socket_server(flood) as port:
        socket = await opened(yard, port, max_queue=1)
        async with asyncio.timeout(20):
            await gone.wait()
        socket.transport.abort()


async def test_large_messages_of_a_sandbox_that_are_under_way_at_once_are_bounded(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "MAX_BYTES_OF_ONE", 5 * 2**20)

    async def half(socket: ServerConnection) -> None:
        """Says as much of a message as it is asked for, and never the rest."""
        async for wanted in socket:
            socket.transport.write(bytes([0x82, 127]) + (2**24).to_bytes(8, "big") + bytes(int(wanted) * 2**20))

    async with socket_server(half) as port, opened(yard, port) as first, opened(yard, port) as second:
        await first.send("4")
        async with asyncio.timeout(10):
            while server._ROOM._of.get(yard.sandbox_id, 0) < 3.5 * 2**20:
                await asyncio.sleep(0.01)
        await second.send("4")
        with pytest.raises(ConnectionClosed) as closed:
            await second.recv()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, holding.WHY)
        third = await opened(yard, port)
        third.transport.write(bytes([0x82, 255]) + (2**24).to_bytes(8, "big") + bytes(4 * 2**20))  # the other way
        with pytest.raises(ConnectionClosed) as closed:
            await third.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1013
    async with asyncio.timeout(10):
        while server._ROOM._held:
            await asyncio.sleep(0.01)
    async with socket_server() as port, opened(yard, port) as socket:
        for _ in range(20):  # one after the other they find room
            await socket.send(bytes(2**20))
            assert len(await socket.recv()) == 2**20
        assert server._ROOM._held == 0


async def test_many_idle_sockets_are_fine(yard: Yard) -> None:
    """A thousand are measured by `forkyard bench net`; here as many as a test machine surely may open."""
    async with socket_server() as port:
        sockets = [await opened(yard, port, ping_interval=None) for _ in range(100)]
        for socket in sockets:
            await socket.send("x")
        assert {await socket.recv() for socket in sockets} == {"x"}
        for socket in sockets:
            await socket.close()
