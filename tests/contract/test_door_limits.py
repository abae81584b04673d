"""What a door counts against its limits, and what a change of its policy ends."""

from __future__ import annotations

import asyncio
import time

import dns.message
import dns.rcode
import pytest

from forkyard.models.network import EgressPolicy
from forkyard.net import door as door_module
from forkyard.net.base import Network

from . import door_yard
from .door_yard import GOOD, SHARED, World, allow, echo, get, hello

pytestmark = pytest.mark.anyio
anyio_backend, world = door_yard.anyio_backend, door_yard.world


# -- limits -------------------------------------------------------------------------------------------------------------


async def test_a_byte_budget_ends_what_goes_beyond_it(world: World) -> None:
    await world.serve(GOOD, 9000, echo)
    world.start(world.network(allow("good.example"), byte_budget=100_000))
    await world.addresses("good.example")
    assert len(await world.exchange(GOOD, 9000, b"\0" * 200_000)) < 100_000
    record = await world.record()
    assert record.verdict == "denied" and "byte budget of 100000" in (record.reason or "")
    assert (record.reason or "").endswith(f"`forkyard egress set {record.sandbox_id} --budget 1048576`")
    assert await world.exchange(GOOD, 9000, b"\0") == b"reset"


async def test_bytes_of_earlier_machines_count(world: World) -> None:
    world.start(Network(EgressPolicy(preset="open", byte_budget=100), spent_bytes=100))
    assert await world.exchange(GOOD, 9000, b"\0") == b"reset"


async def test_a_rate_is_kept(world: World) -> None:
    await world.serve(GOOD, 9000, echo)
    world.start(world.network(allow("good.example"), bytes_per_s=400_000))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 9000)
    began_s = time.monotonic()
    writer.write(b"\0" * 200_000)
    await reader.readexactly(200_000)
    # 400 kB both ways, of which 100 kB were free.
    assert 0.6 < time.monotonic() - began_s < 2


async def test_too_many_connections_in_a_minute_are_refused(world: World) -> None:
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example"), connections_per_minute=2))
    answers = [await world.exchange(GOOD, 80, get("good.example")) for _ in range(3)]
    assert [b"200 OK" in answer for answer in answers] == [True, True, False]
    while (record := await world.record("tcp")).verdict != "denied":
        pass
    assert (record.reason or "").endswith(f"`forkyard egress set {record.sandbox_id} --connections 4`")


async def test_who_was_refused_by_a_limit_is_known(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.serve(GOOD, 9000, echo)
    world.start(world.network(allow("good.example"), connections_per_minute=1))
    await world.addresses("good.example")
    _, writer = await world.open(GOOD, 9000)
    assert await world.exchange(GOOD, 9000, b"x") == b"reset"
    record = await world.record()
    assert (record.verdict, record.exec_id, record.process) == ("denied", "exec_1", "curl (412)")
    writer.close()

    monkeypatch.setattr(door_module, "MOST_CONNECTIONS", 0)
    world.owner = asyncio.Event().wait  # type: ignore[assignment]
    began_s = time.monotonic()
    answers = await asyncio.gather(*(world.exchange(GOOD, 9000, b"x") for _ in range(100)))
    assert set(answers) == {b"reset"}
    assert time.monotonic() - began_s < 2, "a guest that does not say is not waited for"


async def test_a_spent_budget_ends_names_too_and_names_spend_it(world: World) -> None:
    world.start(world.network(allow("good.example"), allow("shared.example"), byte_budget=150))
    assert await world.addresses("good.example") == [GOOD]
    assert world.door.traffic.bytes_out > 0
    assert await world.addresses("good.example") == [GOOD]  # it may be overdrawn once
    answer = await world.ask("shared.example")
    assert (answer.rcode(), world.resolved) == (dns.rcode.REFUSED, ["good.example"] * 2)
    while (record := await world.record("dns")).verdict != "denied":
        pass
    assert "byte budget of 150 bytes is used up" in (record.reason or "")


async def test_too_many_connections_at_once_are_refused_and_the_others_live(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MOST_CONNECTIONS", 20)
    await world.serve(GOOD, 9000, echo)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    over = asyncio.Event()
    answers: asyncio.Queue[bool] = asyncio.Queue()

    async def live() -> None:
        try:
            reader, writer = await world.open(GOOD, 9000)
            writer.write(b"\1")
            answers.put_nowait(await reader.read(1) == b"\1")
        except ConnectionError:
            answers.put_nowait(False)
        await over.wait()

    async with asyncio.TaskGroup() as group:
        for _ in range(30):
            group.create_task(live())
        assert sum([await answers.get() for _ in range(30)]) == 20
        over.set()


# -- changes ------------------------------------------------------------------------------------------------------------


async def test_a_change_ends_what_is_no_longer_allowed_and_only_that(world: World) -> None:
    await world.serve(GOOD, 9000, echo)
    await world.serve(SHARED, 9000, echo)
    world.start(world.network(allow("good.example"), allow("shared.example")))
    ends = []
    for name, address in (("good.example", GOOD), ("shared.example", SHARED)):
        await world.addresses(name)
        reader, writer = await world.open(address, 9000)
        writer.write(b"\1")
        assert await reader.readexactly(1) == b"\1"
        ends.append((reader, writer))
    world.door.update(world.network(allow("good.example")))
    with pytest.raises(ConnectionResetError):
        await ends[1][0].readexactly(1)
    ends[0][1].write(b"\2")
    assert await ends[0][0].readexactly(1) == b"\2"


async def test_a_closed_door_has_no_connections_and_no_sockets(world: World) -> None:
    await world.serve(GOOD, 9000, echo)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 9000)
    writer.write(b"\1")
    assert await reader.readexactly(1) == b"\1"
    await world.door.close()
    with pytest.raises(ConnectionError):
        await reader.readexactly(1)
    assert world.listeners.tcp.fileno() == world.listeners.dns_udp.fileno() == world.listeners.dns_tcp.fileno() == -1
    assert (await world.record()).bytes_out == 1
    await world.door.close()


async def test_a_guest_that_does_not_say_whose_it_is_is_served_all_the_same(world: World) -> None:
    world.owner = asyncio.Event().wait  # type: ignore[assignment]
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example")))
    began_s = time.monotonic()
    assert b"200 OK" in await world.exchange(GOOD, 80, get("good.example"))
    assert time.monotonic() - began_s < 1
    assert (await world.record()).exec_id is None
