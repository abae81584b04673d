"""What comes in for a sandbox is counted: per sandbox in its usage, and in the metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .conftest import World, running_world
from .gateway_yard import Seen, Yard, backend, listening, running_yard
from .test_preview_sockets import opened, socket_server

pytestmark = pytest.mark.anyio


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with running_world(tmp_path) as world, running_yard(world) as yard:
        yield yard


async def usage(yard: Yard) -> tuple[int, int]:
    """Into the sandbox, and out of it."""
    answer = (await yard.world.client.get(f"/sandboxes/{yard.sandbox_id}/usage")).json()
    assert (answer["bytes_in"], answer["bytes_out"]) == (0, 0)  # of connections of its own
    return answer["ingress_bytes_in"], answer["ingress_bytes_out"]


async def metrics(world: World) -> str:
    root = str(world.client.base_url).removesuffix("/api/v1/")
    return (await world.client.get(f"{root}/metrics")).text


async def test_requests_of_previews_are_counted_byte_by_byte(yard: Yard) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + bytes(100_000)
    async with backend(lambda _: answer) as server:
        for _ in range(2):
            assert (await yard.request("POST", server.port, content=bytes(50_000))).status_code == 200
        into, out = await usage(yard)
        assert out == 2 * len(answer)
        assert 2 * 50_000 < into < 2 * 51_000
        assert sum(len(seen.body) for seen in server.seen) == 100_000
        text = await metrics(yard.world)
        assert f"forkyard_ingress_received_bytes_total {float(into)}" in text
        assert f"forkyard_ingress_sent_bytes_total {float(out)}" in text
    record = await yard.world.control.ground.store.sandbox(yard.sandbox_id)
    assert record is not None
    assert (record.traffic.ingress_bytes_in, record.traffic.ingress_bytes_out) == (into, out)


async def test_an_answer_that_goes_on_is_counted_meanwhile(yard: Yard) -> None:
    async def endless(reader, writer) -> None:  # type: ignore[no-untyped-def]
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(10_000))
        await reader.read()

    async with (
        listening(endless) as port,
        yard.client.stream("GET", "/", headers={"Host": yard.host(port)}) as answer,
    ):
        async for _ in answer.aiter_raw(10_000):
            break
        assert (await usage(yard))[1] > 10_000


async def test_messages_of_websockets_are_counted(yard: Yard) -> None:
    async with socket_server() as port, opened(yard, port) as socket:
        for message in ("äöü", b"12345"):
            await socket.send(message)
            await socket.recv()
        assert await usage(yard) == (11, 11)


async def test_previews_do_not_use_up_the_byte_budget(yard: Yard) -> None:
    answer = await yard.world.client.patch(
        f"/sandboxes/{yard.sandbox_id}", json={"network": {"egress": {"byte_budget": 10}}}
    )
    assert answer.status_code == 200

    def reply(_: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + bytes(1000)

    async with backend(reply) as server:
        await yard.get(server.port)
        await yard.get(server.port)
    machine = next(iter(yard.world.host.world.machines.values()))
    await yard.world.client.patch(f"/sandboxes/{yard.sandbox_id}", json={"network": {"egress": {"byte_budget": 20}}})
    assert machine.network is not None
    assert machine.network.spent_bytes == 0
