"""HTTP at a door: services of this host, what is handed over to be looked into, replays, requests in the log."""

from __future__ import annotations

import asyncio
import socket

import dns.edns
import dns.message
import dns.rcode
import dns.rdatatype
import pytest

from forkyard.models.network import EgressPolicy, EgressRule
from forkyard.net import connection as connection_module
from forkyard.net.base import DOOR_ADDRESS, Injection, Network, Service
from forkyard.net.outside import Intercepted

from . import door_yard
from .door_yard import EVIL, GOOD, SHARED, World, allow, client_hello, echo, get, hello

pytestmark = pytest.mark.anyio
anyio_backend, world = door_yard.anyio_backend, door_yard.world


# -- services and interception ------------------------------------------------------------------------------------------


async def test_a_service_is_reached_by_name_with_headers_of_ours(world: World) -> None:
    port = await world.serve("service", 1, hello)
    network = world.network()
    service = Service("127.0.0.1", port, {"Authorization": "Bearer ours"})
    world.start(Network(network.egress, services={"git.forkyard.internal": service}))
    assert await world.addresses("git.forkyard.internal") == [DOOR_ADDRESS]
    asked = get("git.forkyard.internal", "authorization: Bearer theirs")
    answer = await world.exchange(DOOR_ADDRESS, 80, asked)
    assert b"Authorization: Bearer ours\r\n" in answer and b"theirs" not in answer
    assert (await world.record()).name == "git.forkyard.internal"
    assert (await world.ask("other.forkyard.internal")).rcode() == dns.rcode.NXDOMAIN
    assert b"403" in await world.exchange(DOOR_ADDRESS, 80, get("evil.example"))


class Puppet:
    """An interceptor that passes on, or answers by itself."""

    def __init__(self) -> None:
        self.seen: list[Intercepted] = []

    def wants(self, network: Network, name: str, tls: bool) -> bool:
        return name != "shared.example"

    async def replays(self, network: Network, name: str) -> bool:
        return name == "recorded.example"

    async def serve(self, guest: socket.socket, what: Intercepted) -> None:
        self.seen.append(what)
        reader, writer = await asyncio.open_connection(sock=guest)
        first = await reader.read(65536)
        if what.network.egress.replay is None:
            upstream_reader, upstream = await asyncio.open_connection(sock=await what.connect())
            upstream.write(first)
            writer.write(b"seen: " + await upstream_reader.read(65536))
            upstream.close()
        else:
            writer.write(b"replayed")
            what.note("allowed", "replayed")
        writer.close()


async def test_what_is_to_be_looked_into_is_handed_over_untouched(world: World) -> None:
    await world.serve(GOOD, 443, echo)
    await world.serve(SHARED, 443, echo)
    puppet = Puppet()
    injection = {"TOKEN": Injection("p", "v", ("good.example",), "Authorization", "Bearer {}")}
    policy = EgressPolicy(preset="none", rules=[allow("good.example"), allow("shared.example")])
    world.start(Network(policy, injections=injection), intercept=puppet)
    data = client_hello("good.example")
    assert await world.exchange(GOOD, 443, data) == b"seen: " + data
    assert [(what.name, what.port, what.tls) for what in puppet.seen] == [("good.example", 443, True)]
    record = await world.record()
    assert (record.verdict, record.bytes_out, record.bytes_in) == ("allowed", len(data), len(data) + 6)
    reader, writer = await world.open(SHARED, 443)
    data = client_hello("shared.example")
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    assert await world.exchange(EVIL, 443, client_hello("evil.example")) == bytes((21, 3, 3, 0, 2, 2, 49))
    assert len(puppet.seen) == 1


async def test_a_server_may_speak_first_to_a_sandbox_that_is_looked_into(world: World) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        await echo(reader, writer)

    await world.serve(GOOD, 25, greet)
    world.start(world.network(allow("good.example"), record="monday"), intercept=Puppet())
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 25)
    assert await reader.readline() == b"220 ready\r\n"
    writer.write(b"EHLO me\r\n")
    assert await reader.readline() == b"EHLO me\r\n"


async def test_the_connection_that_waited_is_the_one_that_is_looked_into(world: World) -> None:
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example"), record="monday"), intercept=Puppet())
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 80)
    while not world.connected:
        await asyncio.sleep(0.01)
    writer.write(get("good.example"))
    assert (await reader.read()).startswith(b"seen: HTTP/1.1 200")
    assert world.connected == [(GOOD, 80)]


@pytest.mark.parametrize("by", ["name", "network"])
@pytest.mark.parametrize(
    ("port", "first", "seen"),
    [
        (80, get("good.example"), {"name": "good.example", "network": "good.example"}),
        (443, client_hello("good.example"), {"name": "good.example", "network": "good.example"}),
        (443, client_hello(None), {"name": "good.example", "network": GOOD}),
        (80, get(GOOD), {"network": GOOD}),
        (80, b"GET /\xc3\xa9 HTTP/1.1\r\nHost: good.example\r\n\r\n", {}),
        (80, b"GET / HTTP/1.1\r\nHost: good.example\r\nHost: good.example\r\n\r\n", {}),
        (443, b"\x15\3\1\0\2\1\x64" + client_hello(None), {}),
        (443, b"\x80\x2e\1\3\1" + bytes(44), {}),
    ],
)
async def test_nothing_that_could_be_recorded_passes_unseen(
    world: World, by: str, port: int, first: bytes, seen: dict[str, str]
) -> None:
    reached: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(await reader.read(65536))

    await world.serve(GOOD, port, hear)
    puppet = Puppet()
    rule = allow("good.example") if by == "name" else EgressRule(cidr=f"{GOOD}/32")
    world.start(world.network(rule, record="monday"), intercept=puppet)
    if by == "name":
        await world.addresses("good.example")
    await world.exchange(GOOD, port, first)
    await world.record()
    assert [what.name for what in puppet.seen] == ([seen[by]] if by in seen else [])
    assert any(reached) == (by in seen)


async def test_what_begins_without_words_is_seen_as_well_if_it_is_recorded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_UNJUSTIFIED_S", 0.05)
    monkeypatch.setattr(connection_module, "_INCOMPLETE_S", 1.0)
    await world.serve(GOOD, 80, hello)
    puppet = Puppet()
    world.start(world.network(EgressRule(cidr=f"{GOOD}/32"), record="monday"), intercept=puppet)
    reader, writer = await world.open(GOOD, 80)
    writer.write(get(GOOD)[:5])
    await asyncio.sleep(0.3)
    writer.write(get(GOOD)[5:])
    assert (await reader.read()).startswith(b"seen: HTTP/1.1 200")
    assert len(puppet.seen) == 1


async def test_a_replay_touches_nothing_outside(world: World) -> None:
    world.start(world.network(preset="evaluation", replay="monday"), intercept=Puppet())
    (address,) = await world.addresses("recorded.example")
    assert await world.exchange(address, 80, get("recorded.example")) == b"replayed"
    record = await world.record()
    assert (record.verdict, record.reason) == ("allowed", "replayed")
    assert await world.exchange(address, 22, b"SSH-2.0-x\r\n") == b"reset"
    assert world.connected == [] and world.resolved == []


async def test_a_replay_knows_no_names_but_those_recorded(world: World) -> None:
    world.start(world.network(preset="evaluation", replay="monday"), intercept=Puppet())
    assert (await world.ask("other.example")).rcode() == dns.rcode.NXDOMAIN
    record = await world.record("dns")
    assert (record.verdict, record.name) == ("denied", "other.example")
    assert "not in the recording 'monday'" in (record.reason or "")
    assert world.resolved == []


async def test_requests_of_plain_http_are_records_of_their_own(world: World) -> None:
    await world.serve(GOOD, 80, echo)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 80)
    asked = get("good.example").replace(b" / ", b" /a/b?token=x ") + get("good.example").replace(b"GET", b"DELETE")
    writer.write(asked)
    await reader.readexactly(len(asked))
    first, second = [await world.record("http") for _ in range(2)]
    assert (first.method, first.path, first.name, first.port) == ("GET", "/a/b", "good.example", 80)
    assert (second.method, second.path, second.verdict) == ("DELETE", "/", "allowed")
    assert first.exec_id == second.exec_id is not None
    assert "token" not in first.model_dump_json()


async def test_a_flood_of_requests_is_counted_and_not_listed_one_by_one(world: World) -> None:
    await world.serve(GOOD, 80, echo)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 80)
    asked = get("good.example") * 3000
    writer.write(asked)
    await reader.readexactly(len(asked))
    writer.close()
    listed = 0
    while (await world.records.get()).kind != "tcp":
        listed += 1
    assert 400 < listed < 2000


async def test_the_status_of_an_answer_is_told_as_long_as_it_is_clear_whose_it_is(world: World) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            asked = await reader.readuntil(b"\r\n\r\n")
            if b"/slow" in asked:
                for byte in b"HTTP/1.1 404 Not Found\r\n":
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0)
                writer.write(b"Content-Length: 0\r\n\r\n")
            elif b"/interim" in asked:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await reader.readexactly(3)
                writer.write(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")
            elif b"/silent" in asked:
                writer.close()
                return
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nHTTP/1.1 500 Broken\n")

    await world.serve(GOOD, 80, handle)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")

    async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: bytes, *, end: bytes) -> None:
        writer.write(get("good.example").replace(b" / ", b" /%b " % path))
        await asyncio.wait_for(reader.readuntil(end), 20)

    reader, writer = await world.open(GOOD, 80)
    for path, end, status in ((b"a", b"Broken\n", 200), (b"slow", b"\r\n\r\n", 404), (b"b", b"Broken\n", 200)):
        await asked(reader, writer, path, end=end)
        record = await world.record("http")
        assert (record.path, record.status, record.verdict) == (f"/{path.decode()}", status, "allowed")
    post = (
        get("good.example").replace(b"GET / ", b"POST /interim ").replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n")
    )
    writer.write(post)
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    writer.write(b"abc")
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    assert (await world.record("http")).status == 201
    writer.write(get("good.example") * 3)  # without waiting
    assert [(await world.record("http")).status for _ in range(3)] == [None] * 3
    await asyncio.wait_for(reader.readexactly(3 * len(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n") + 60), 20)
    await asked(reader, writer, b"after", end=b"Broken\n")
    assert (await world.record("http")).status is None
    writer.close()

    reader, writer = await world.open(GOOD, 80)
    writer.write(get("good.example").replace(b" / ", b" /silent "))
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()
    record = await world.record("http")
    assert (record.path, record.status) == ("/silent", None)
