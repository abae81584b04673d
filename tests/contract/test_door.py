"""What a door lets through, and what not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time

import dns.message
import pytest

from forkyard.models.network import EgressRule
from forkyard.net import connection as connection_module

from . import door_yard
from .door_yard import EVIL, GOOD, MIRROR, SHARED, World, allow, client_hello, echo, get, hello

pytestmark = pytest.mark.anyio
anyio_backend, world = door_yard.anyio_backend, door_yard.world


# -- what is allowed passes ---------------------------------------------------------------------------------------------


async def test_an_allowed_request_passes_and_its_record_says_whose_it_was(world: World) -> None:
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example")))
    assert await world.addresses("good.example") == [GOOD]
    answer = await world.exchange(GOOD, 80, get("good.example"))
    assert answer.startswith(b"HTTP/1.1 200")
    record = await world.record()
    assert (record.verdict, record.name, record.address, record.port) == ("allowed", "good.example", GOOD, 80)
    assert (record.exec_id, record.trace_id, record.process) == ("exec_1", "trace_1", "curl (412)")
    assert (record.bytes_out, record.bytes_in) == (len(get("good.example")), len(answer))
    traffic = world.door.traffic
    assert (traffic.connections, traffic.denied) == (1, 0)
    question, reply = len(dns.message.make_query("good.example", "A").to_wire()), 16  # the address, and of which name
    assert (traffic.bytes_out, traffic.bytes_in) == (record.bytes_out + question, record.bytes_in + question + reply)


async def test_a_name_is_enough_without_having_been_asked_for(world: World) -> None:
    """As after a fork: the guest still knows the address, this door does not."""
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example")))
    assert b"200 OK" in await world.exchange(GOOD, 80, get("good.example"))


async def test_a_protocol_we_do_not_know_passes_to_an_address_that_a_name_gave(world: World) -> None:
    await world.serve(GOOD, 22, echo)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 22)
    writer.write(b"SSH-2.0-test\r\n")
    assert await reader.readexactly(14) == b"SSH-2.0-test\r\n"
    writer.write_eof()
    assert await reader.read() == b""
    assert (await world.record()).name == "good.example"


async def test_a_server_that_speaks_first_is_heard_at_once(world: World) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        await echo(reader, writer)

    await world.serve(GOOD, 25, greet)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 25)
    assert await reader.readline() == b"220 ready\r\n"
    writer.write(b"EHLO me\r\n")
    assert await reader.readline() == b"EHLO me\r\n"


async def test_half_of_a_connection_may_be_closed(world: World) -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(str(len(await reader.read())).encode())

    await world.serve(GOOD, 9000, count)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 9000)
    writer.write(b"\0" * 3_000_000)
    writer.write_eof()
    assert await reader.read() == b"3000000"


async def test_a_reader_that_does_not_read_holds_the_sender_back(world: World) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.read(1)
        for _ in range(4096):
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536

    await world.serve(GOOD, 9000, flood)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 9000)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(b"\1")
    before = -1
    while sent != before:  # until nothing moves any more
        before = sent
        await asyncio.sleep(0.3)
    assert sent < 4096 * 65536 / 2
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    total = 0
    while data := await reader.read(1 << 20):
        total += len(data)
    assert total == 4096 * 65536


async def test_a_web_socket_passes_once_the_server_agrees(world: World) -> None:
    async def upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        await echo(reader, writer)

    await world.serve(GOOD, 80, upgrade)
    world.start(world.network(allow("good.example")))
    reader, writer = await world.open(GOOD, 80)
    writer.write(get("good.example", "Upgrade: websocket", "Connection: Upgrade", close=False) + b"\x81frame")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 101 Switching Protocols\r\n\r\n"
    assert await reader.readexactly(6) == b"\x81frame"
    writer.write(get("evil.example"))
    assert b"evil.example" in await reader.readuntil(b"\r\n\r\n")


async def test_requests_stay_checked_if_the_server_does_not_agree(world: World) -> None:
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example")))
    asked = get("good.example", "Upgrade: websocket", close=False)
    answer = await world.exchange(GOOD, 80, asked + get("evil.example"))
    assert b"evil.example" not in answer
    assert (await world.record()).verdict == "denied"


# -- what is not allowed does not ---------------------------------------------------------------------------------------


async def test_a_blocked_request_is_told_what_to_do(world: World) -> None:
    world.start(world.network(allow("good.example")))
    answer = await world.exchange(EVIL, 80, get("evil.example"))
    assert answer.startswith(b"HTTP/1.1 403")
    assert b"`forkyard egress allow sbx_1 evil.example`" in answer
    record = await world.record()
    assert (record.verdict, record.name, record.exec_id) == ("denied", "evil.example", "exec_1")
    assert "forkyard egress allow" in (record.reason or "")
    assert world.resolved == [] and world.connected == []
    assert world.door.traffic.denied == 1


async def test_a_blocked_tls_client_reads_access_denied(world: World) -> None:
    world.start(world.network(allow("good.example")))
    assert await world.exchange(EVIL, 443, client_hello("evil.example")) == bytes((21, 3, 3, 0, 2, 2, 49))
    assert (await world.record()).name == "evil.example"
    assert world.connected == []


async def test_a_forged_sni_leads_to_the_true_owner_of_the_name(world: World) -> None:
    await world.serve(GOOD, 443, echo)
    await world.serve(EVIL, 443, hello)
    world.start(world.network(allow("good.example")))
    reader, writer = await world.open(EVIL, 443)
    data = client_hello("good.example")
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    assert world.connected == [(GOOD, 443)]
    writer.close()
    assert (await world.record()).address == GOOD


async def test_a_denied_sni_at_an_allowed_address_is_refused(world: World) -> None:
    """A front: many names live at one address."""
    await world.serve(SHARED, 443, echo)
    world.start(world.network(allow("shared.example")))
    await world.addresses("shared.example")
    assert await world.exchange(SHARED, 443, client_hello("evil.example")) == bytes((21, 3, 3, 0, 2, 2, 49))


async def test_waiting_before_the_hello_does_not_get_around_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_UNJUSTIFIED_S", 0.05)
    seen = b""

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen = await reader.read()

    await world.serve(SHARED, 443, hear)
    world.start(world.network(allow("shared.example")))
    await world.addresses("shared.example")
    reader, writer = await world.open(SHARED, 443)
    await asyncio.sleep(0.2)
    for byte in client_hello("evil.example"):
        writer.write(bytes((byte,)))
        await asyncio.sleep(0)
    with contextlib.suppress(ConnectionError):
        await reader.read()
    record = await world.record()
    assert (record.verdict, record.name, seen) == ("denied", "evil.example", b"")


async def test_a_raw_address_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_UNJUSTIFIED_S", 0.05)
    world.start(world.network(allow("good.example")))
    for port, data in ((22, b"SSH-2.0-x\r\n"), (443, client_hello(None)), (80, get(GOOD)), (5432, b"")):
        await world.exchange(GOOD, port, data)
        record = await world.record()
        assert (record.verdict, record.name, record.port) == ("denied", None, port)
    assert world.connected == []


async def test_a_connection_that_leaves_without_a_word_is_still_recorded(world: World) -> None:
    world.start(world.network())
    _, writer = await world.open(EVIL, 80)
    writer.close()
    assert (await world.record()).verdict == "denied"


@pytest.mark.parametrize(
    "second",
    [get("evil.example"), get("good.example", "Host: evil.example"), b"GET / HTTP/1.1\nHost: evil.example\n\n"],
    ids=["another host", "two hosts", "bare newlines"],
)
async def test_every_request_of_a_connection_is_checked(world: World, second: bytes) -> None:
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example"), allow("shared.example")))
    reader, writer = await world.open(GOOD, 80)
    writer.write(get("good.example", close=False))
    assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    writer.write(second + get("good.example"))
    with contextlib.suppress(ConnectionError):
        assert b"evil" not in await reader.read()
    assert (await world.record()).verdict == "denied"


@pytest.mark.parametrize(
    "first",
    [
        b"POST / HTTP/1.1\r\nHost: good.example\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: good.example\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: good.example\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: good.example\r\n evil: folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : good.example\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 8000,
    ],
)
async def test_what_could_be_read_in_two_ways_is_refused(world: World, first: bytes) -> None:
    await world.serve(GOOD, 80, hello)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    assert b"200 OK" not in await world.exchange(GOOD, 80, first)
    assert (await world.record()).verdict == "denied"


@pytest.mark.parametrize(
    "first",
    [
        b"GET /\xc3\xa9 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: good.example\r\n\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /\x01 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"\x0bGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"\r\n\x0cGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"\0\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET\xa0/\xa0HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"\x15\3\1\0\2\1\x64" + client_hello("evil.example"),
        b"\x16\2\0" + client_hello("evil.example")[3:],
    ],
)
async def test_no_odd_byte_makes_a_request_or_a_hello_something_else(world: World, first: bytes) -> None:
    reached: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            reached.append(data)

    await world.serve(GOOD, 80, hear)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    await world.exchange(GOOD, 80, first)
    assert (await world.record()).verdict == "denied"
    assert reached == []


async def test_a_server_that_finds_a_request_in_what_is_none_is_not_heard(world: World) -> None:
    """Its first line was sent alone; a lenient server reads over it."""

    async def lenient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in (b"HT", b"TP/1.1 200 OK\r\n\r\n", b"secret"):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)

    await world.serve(GOOD, 80, lenient)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    reader, writer = await world.open(GOOD, 80)
    writer.write(b"nothing\r\n")
    await asyncio.sleep(0.1)
    writer.write(get("evil.example"))
    with contextlib.suppress(ConnectionError):
        assert len(await reader.read()) <= 2
    record = await world.record()
    assert (record.verdict, "speaks HTTP" in (record.reason or "")) == ("denied", True)


async def test_urgent_data_in_front_does_not_keep_the_door_busy(world: World) -> None:
    await world.serve(GOOD, 80, echo)
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    began_s, cpu_s = time.monotonic(), time.process_time()
    _, writer = await world.open(GOOD, 80)
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as guest:
        guest.send(b"GE")
        guest.send(b"!", socket.MSG_OOB)
        guest.send(b"T / HTTP/1.1\r\n")
        record = await world.record()
    assert record.verdict == "denied"
    assert time.monotonic() - began_s < 5 and time.process_time() - cpu_s < 1


async def test_private_networks_and_this_host_need_a_rule_of_their_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_UNJUSTIFIED_S", 0.05)
    everything = EgressRule(cidr="0.0.0.0/0")
    world.start(world.network(everything, preset="open"))
    for address in ("10.0.0.5", "127.0.0.1", "169.254.169.254", "192.168.1.1", "100.64.0.1", "224.0.0.1"):
        await world.exchange(address, 80, get(address))
        assert (await world.record()).verdict == "denied"
    assert world.connected == []
    await world.serve("10.0.0.5", 80, hello)
    world.door.update(world.network(EgressRule(cidr="10.0.0.0/24", ports=[80])))
    assert b"200 OK" in await world.exchange("10.0.0.5", 80, get("10.0.0.5"))


async def test_everything_public_is_open_under_open(world: World) -> None:
    await world.serve(EVIL, 5432, echo)
    world.start(world.network(preset="open"))
    reader, writer = await world.open(EVIL, 5432)
    writer.write(b"\0\0\0\x08\x04\xd2\x16\x2f")
    assert await reader.readexactly(8) == b"\0\0\0\x08\x04\xd2\x16\x2f"


DENY = EgressRule(action="deny", domain="evil.example")


@pytest.mark.parametrize(
    ("port", "first"),
    [
        (80, get("evil.example")),
        (80, get(EVIL)),
        (80, b"GET /\xff HTTP/1.1\r\nHost: evil.example\r\n\r\n"),
        (443, client_hello("evil.example")),
        (443, client_hello(None)),
        (22, b"\0hello\n"),
        (22, b""),
        (80, get("good.example")),
        (443, client_hello("good.example")),
    ],
)
async def test_a_denied_name_is_out_of_reach_where_the_rest_is_open(world: World, port: int, first: bytes) -> None:
    """By its address too, under no name or under another: that leads to the other's own address."""
    reached: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(b"")
        writer.write(b"greeting")
        await reader.read()

    for one in (22, 80, 443):
        await world.serve(EVIL, one, hear)
    await world.serve(GOOD, 80, hello)
    await world.serve(GOOD, 443, hello)
    world.start(world.network(DENY, preset="open"))
    reader, writer = await world.open(EVIL, port)
    writer.write(first)
    writer.write_eof()
    with contextlib.suppress(ConnectionError):
        assert b"greeting" not in await asyncio.wait_for(reader.read(), 10)
    record = await world.record()
    assert (record.address, record.verdict) in ((EVIL, "denied"), (GOOD, "allowed"))
    assert reached == [] and EVIL not in [address for address, _ in world.connected]


async def test_where_one_name_is_denied_the_rest_stays_open(world: World) -> None:
    for address in (GOOD, SHARED):
        await world.serve(address, 80, hello)
        await world.serve(address, 5432, echo)
    await world.serve("10.0.0.5", 443, echo)
    world.start(world.network(DENY, EgressRule(cidr="10.0.0.0/24"), preset="open"))
    assert b"200 OK" in await world.exchange(SHARED, 80, get("shared.example"))
    assert b"200 OK" in await world.exchange(GOOD, 80, get(GOOD))
    for data in (b"\0\0\0\x08\x04\xd2\x16\x2f", client_hello(None)):
        reader, writer = await world.open(GOOD, 5432)
        writer.write(data)
        assert await reader.readexactly(len(data)) == data
    reader, writer = await world.open("10.0.0.5", 443)  # who names a network means it, whatever it is called
    writer.write(client_hello("a-name-of-the-guests-own"))
    assert (await reader.readexactly(1))[0] == 0x16


async def test_a_connection_without_a_name_ends_when_the_name_of_its_address_is_denied(world: World) -> None:
    await world.serve(EVIL, 22, echo)
    world.start(world.network(preset="open"))
    reader, writer = await world.open(EVIL, 22)
    writer.write(b"\0")
    assert await reader.readexactly(1) == b"\0"
    world.door.update(world.network(DENY, preset="open"))
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)


async def test_a_registry_of_this_host_may_be_on_a_private_network(world: World) -> None:
    await world.serve(MIRROR, 80, hello)
    world.start(world.network(preset="coding"))
    assert await world.addresses("mirror.example") == [MIRROR]
    assert b"200 OK" in await world.exchange(MIRROR, 80, get("mirror.example"))


async def test_a_server_that_is_not_there_is_a_failure_and_not_a_denial(world: World) -> None:
    world.start(world.network(allow("good.example")))
    await world.addresses("good.example")
    assert await world.exchange(GOOD, 81, b"x") == b"reset"
    record = await world.record()
    assert (record.verdict, "refused" in (record.reason or "")) == ("failed", True)
