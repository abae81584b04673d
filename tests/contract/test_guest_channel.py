"""The channel itself: hosts that vanish, machines cut in the middle of a frame, agents old, dead or hostile."""

from __future__ import annotations

import asyncio
import json
import os
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forkyard.errors import ForkyardError, GuestFailure, GuestUnreachable
from forkyard.guest import channel as channel_module
from forkyard.guest import frames
from forkyard.guest.base import ExecSpec, Exit, Guest, Output
from forkyard.guest.client import connect
from forkyard.guest.frames import Kind
from forkyard.guest.local import LocalAgent

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(os.getuid() != 0, reason="the agent runs as root")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def agent(tmp_path: Path, front: Path | None) -> AsyncIterator[LocalAgent]:
    async with LocalAgent(tmp_path, front) as agent:
        yield agent


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


# ── cuts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_agent_whose_start_nobody_waits_for_is_ended(tmp_path: Path) -> None:
    agent = LocalAgent(tmp_path)
    starting = asyncio.create_task(agent.__aenter__())
    while agent.process is None:
        await asyncio.sleep(0.001)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert agent.process.returncode is not None


async def test_a_running_exec_survives_its_host_and_is_found_by_the_next(agent: LocalAgent) -> None:
    first = await connect(agent.socket, timeout_s=10)
    info = await first.start(ExecSpec("echo before; read x; echo after $x", stdin=True))
    async with first.attach(info.id) as execution:
        assert await anext(aiter(execution)) == Output("stdout", 0, b"before\n")
        await first.aclose()
    second = await connect(agent.socket, timeout_s=10)
    await second.write_stdin(info.id, b"all\n")
    async with second.attach(info.id, stdout_offset=7) as execution:
        items = [item async for item in execution]
    assert items[0] == Output("stdout", 7, b"after all\n") and isinstance(items[-1], Exit)
    await second.aclose()


@pytest.mark.parametrize("notice", [True, False], ids=["port closed", "restored from a snapshot"])
async def test_a_cut_in_the_middle_of_anything_is_healed_by_the_next_connection(
    agent: LocalAgent, tmp_path: Path, notice: bool
) -> None:
    agent.notice = notice
    for seed in range(25):
        rng = random.Random(seed)
        agent.cut_after = len(frames.PREAMBLE) + 200 + rng.randrange(150_000)
        guest = await connect(agent.socket, timeout_s=10)
        writing = asyncio.ensure_future(guest.write_file(f"{tmp_path}/cut", pieces(*[rng.randbytes(50_000)] * 8)))
        with pytest.raises(GuestUnreachable):
            while True:
                await guest.ping()
        with pytest.raises(GuestUnreachable):
            await writing
        await guest.aclose()
        again = await connect(agent.socket, timeout_s=10)
        await again.write_file(f"{tmp_path}/whole", pieces(b"%d" % seed))
        assert (tmp_path / "whole").read_bytes() == b"%d" % seed
        await again.aclose()
    assert not (tmp_path / "cut").exists()
    assert not list(tmp_path.glob(".forkyard-*")), "a half-written file was left behind"


async def test_a_fresh_connection_to_an_agent_in_the_middle_of_a_frame_tries_again(agent: LocalAgent) -> None:
    agent.notice = False
    agent.cut_after = len(frames.PREAMBLE) + 300
    guest = await connect(agent.socket, timeout_s=10)
    with pytest.raises(GuestUnreachable):
        while True:
            await guest.ping()
    await guest.aclose()
    again = await connect(agent.socket, timeout_s=10, fresh=True)
    await again.ping()
    await again.aclose()


async def test_a_host_that_vanishes_does_not_hold_back_what_it_watched(agent: LocalAgent) -> None:
    guest = await connect(agent.socket, timeout_s=10)
    async with guest.execute(ExecSpec("head -c 30000000 /dev/zero; echo done >&2")) as execution:
        exec_id = execution.id
        await guest.aclose()
    again = await connect(agent.socket, timeout_s=10)
    async with asyncio.timeout(30):
        while (await again.exec_info(exec_id)).running:
            await asyncio.sleep(0.02)
    await again.aclose()


async def test_an_agent_that_dies_is_noticed_at_once_and_its_processes_live_on(agent: LocalAgent) -> None:
    guest = await connect(agent.socket, timeout_s=10)
    info = await guest.start(ExecSpec("sleep 60"))
    async with guest.attach(info.id) as execution:
        waiting = asyncio.ensure_future(anext(aiter(execution)))
        await agent.kill()
        await agent.start()
        async with asyncio.timeout(5):
            with pytest.raises(GuestUnreachable):
                await waiting
            await guest.closed.wait()
    assert Path(f"/proc/{info.pid}").exists()
    again = await connect(agent.socket, timeout_s=10)
    assert await again.execs() == []
    orphan = agent.cgroups / f"exec-{info.id}"
    assert info.pid is not None and str(info.pid) in (orphan / "cgroup.procs").read_text().split()
    os.kill(info.pid, 9)
    async with asyncio.timeout(10):
        while orphan.exists():
            await again.start(ExecSpec(["true"]))
    await again.aclose()


async def test_an_agent_that_falls_silent_is_given_up(agent: LocalAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_KEEPALIVE_S", 0.1)
    monkeypatch.setattr(channel_module, "_KEEPALIVE_ANSWER_S", 0.3)
    guest = await connect(agent.socket, timeout_s=10)
    assert agent.process is not None
    async with guest.execute(ExecSpec("sleep 60")) as execution:
        agent.process.send_signal(19)  # SIGSTOP
        async with asyncio.timeout(10):
            with pytest.raises(GuestUnreachable):
                await anext(aiter(execution))
    await guest.closed.wait()


async def test_no_socket_and_no_agent_end_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(GuestUnreachable):
        await connect(str(tmp_path / "none.sock"), timeout_s=0.2)

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65_536):
            pass
        writer.close()

    async with await asyncio.start_unix_server(mute, tmp_path / "mute.sock"):
        with pytest.raises(GuestUnreachable):
            await connect(str(tmp_path / "mute.sock"), timeout_s=0.5)


# ── a hostile or merely strange host ─────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def raw_host(agent: LocalAgent) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(agent.socket)
    writer.write(frames.encode_hello(7, b"n" * 16, b'{"versions":[1,99],"window":1000000,"future":true}'))
    yield reader, writer
    writer.close()
    await writer.wait_closed()


async def next_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    header = await asyncio.wait_for(reader.readexactly(12), 10)
    _, kind, _, stream, length = struct.unpack(">2sBBII", header)
    return kind, stream, (await reader.readexactly(length + 4))[:-4]


async def answer_on(reader: asyncio.StreamReader, wanted: int) -> dict[str, object]:
    while True:
        kind, stream, body = await next_frame(reader)
        if kind == Kind.RESPONSE and stream == wanted:
            found: dict[str, object] = json.loads(body)
            return found


async def test_a_newer_host_gets_the_agents_version_and_unsupported_for_what_is_new(agent: LocalAgent) -> None:
    async with raw_host(agent) as (reader, writer):
        kind, _, body = await next_frame(reader)
        while kind != Kind.HELLO_ACK:
            kind, _, body = await next_frame(reader)
        assert body[:16] == b"n" * 16 and json.loads(body[16:])["version"] == 1
        writer.write(frames.encode(Kind.REQUEST, 0, 1, b'{"op":"teleport"}', 7))
        assert (await answer_on(reader, 1))["error"]["code"] == "unsupported"  # type: ignore[index]
        writer.write(frames.encode(Kind.REQUEST, 0, 2, b'{"op":"ping","speed":"warp"}', 7))
        assert await answer_on(reader, 2) == {"ok": {}}


async def test_the_agent_answers_or_ignores_nonsense_and_goes_on(agent: LocalAgent) -> None:
    rng = random.Random(1)
    bodies = [b"", b"{", b"[]", b'"x"', b'{"op":1}', b"[" * 60_000, b'{"op":"exec"}', b'{"op":"exec","command":{}}']
    bodies += [b'{"op":"read","path":7}', b'{"op":"attach","id":"x","stdout_offset":-1}', b'{"op":"write","path":"/"}']
    async with raw_host(agent) as (reader, writer):
        for number, body in enumerate(bodies, start=1):
            writer.write(frames.encode(Kind.REQUEST, 0, number, body, 7))
            assert "error" in await answer_on(reader, number)
        for _ in range(500):
            kind, stream = rng.randrange(2, 30), rng.randrange(0, 50)
            writer.write(frames.encode(kind, rng.randrange(256), stream + 100, rng.randbytes(rng.randrange(40)), 7))
        writer.write(frames.encode(Kind.REQUEST, 0, 9999, b'{"op":"ping"}', 7))
        assert await answer_on(reader, 9999) == {"ok": {}}
    guest = await connect(agent.socket, timeout_s=10)
    await guest.ping()
    await guest.aclose()


async def test_an_oversized_request_is_refused(agent: LocalAgent) -> None:
    async with raw_host(agent) as (reader, writer):
        for _ in range(40):
            writer.write(frames.encode(Kind.REQUEST, frames.MORE, 5, b"x" * 65_000, 7))
        writer.write(frames.encode(Kind.REQUEST, 0, 5, b"", 7))
        assert (await answer_on(reader, 5))["error"]["code"] == "invalid_request"  # type: ignore[index]


async def test_a_request_of_several_frames_arrives_whole(agent: LocalAgent) -> None:
    guest = await connect(agent.socket, timeout_s=10)
    text = "x" * 100_000
    async with guest.execute(ExecSpec("echo ${#BIG}", env={"BIG": text})) as execution:
        items = [item async for item in execution]
    assert isinstance(items[0], Output) and items[0].data == b"100000\n"
    await guest.aclose()


# ── a hostile guest ──────────────────────────────────────────────────────────────────────────────────────────────────


class Puppet:
    """An agent that says what the test wants. `reply` gets each frame of the host, and returns bytes to send."""

    def __init__(self, socket: Path, reply: Callable[[frames.Frame, int], bytes], ack: bytes | None = None) -> None:
        self.socket = str(socket)
        self._reply = reply
        self._ack = ack or json.dumps({"version": 1, "agent": "evil", "window": 1 << 19, "features": []}).encode()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from forkyard.guest_agent.frames import Parser

        parser = Parser()
        try:
            while data := await reader.read(65_536):
                for kind, flags, stream, body in parser.feed(data):
                    if kind == Kind.HELLO:
                        writer.write(frames.encode(Kind.HELLO_ACK, 0, 0, body[4:20] + self._ack, parser.epoch))
                    else:
                        writer.write(self._reply(frames.Frame(kind, flags, stream, body), parser.epoch))
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def puppet(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Guest]]]:
    servers: list[asyncio.Server] = []
    guests: list[Guest] = []

    async def start(reply: Callable[[frames.Frame, int], bytes], ack: bytes | None = None) -> Guest:
        made = Puppet(tmp_path / f"{len(servers)}.sock", reply, ack)
        servers.append(await asyncio.start_unix_server(made.serve, made.socket))
        guests.append(await connect(made.socket, timeout_s=2))
        return guests[-1]

    yield start
    for guest in guests:
        await guest.aclose()
    for server in servers:
        server.close()
        await server.wait_closed()


def respond(frame: frames.Frame, epoch: int, answer: bytes) -> bytes:
    return frames.encode(Kind.RESPONSE, 0, frame.stream, answer, epoch) if frame.kind == Kind.REQUEST else b""


BAD_ANSWERS = {
    "no JSON": b"hello",
    "deep": b"[" * 65_000,
    "not an object": b"[1]",
    "neither ok nor error": b"{}",
    "wrong types": b'{"ok":{"path":1}}',
    "surrogate in a path": b'{"ok":{"path":"\\ud800","type":"file"}}',
    "huge number": b'{"ok":{"path":"/x","type":"file","size":' + b"9" * 5000 + b"}}",
    "negative size": b'{"ok":{"path":"/x","type":"file","size":-1}}',
    "unknown type": b'{"ok":{"path":"/x","type":"gate","size":1}}',
}


@pytest.mark.parametrize("answer", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
async def test_an_answer_that_makes_no_sense_is_a_failure_of_the_guest(
    puppet: Callable[..., Awaitable[Guest]], answer: bytes
) -> None:
    guest = await puppet(lambda frame, epoch: respond(frame, epoch, answer))
    with pytest.raises(GuestFailure):
        await guest.stat("/x")


async def test_a_guest_cannot_raise_an_error_of_the_host(puppet: Callable[..., Awaitable[Guest]]) -> None:
    answer = b'{"error":{"code":"internal","message":"the daemon is on fire"}}'
    guest = await puppet(lambda frame, epoch: respond(frame, epoch, answer))
    with pytest.raises(ForkyardError) as caught:
        await guest.ping()
    assert type(caught.value) is GuestFailure


def flood(
    kind: int, stream: int | None = None, size: int = 1000, count: int = 5000
) -> Callable[[frames.Frame, int], bytes]:
    def reply(frame: frames.Frame, epoch: int) -> bytes:
        one = frames.encode(kind, 0, frame.stream if stream is None else stream, bytes(size), epoch)
        return frames.encode(Kind.RESPONSE, 0, frame.stream, b'{"ok":{}}', epoch) + one * count

    return reply


@pytest.mark.parametrize(
    "reply",
    [
        flood(Kind.DATA),
        flood(Kind.DATA, size=0, count=60_000),
        flood(Kind.DATA, stream=77),
        flood(Kind.RESPONSE, stream=77),
        flood(200, stream=0),
        flood(Kind.WINDOW, size=4),
        lambda frame, epoch: bytes(100_000),
        lambda frame, epoch: os.urandom(100_000),
        lambda frame, epoch: frames.encode(Kind.REQUEST, 0, frame.stream, b'{"op":"exec"}', epoch),
        lambda frame, epoch: frames.encode(Kind.END, 0, frame.stream, b"{}", epoch),
        lambda frame, epoch: frames.NEED_HELLO,
    ],
    ids=[
        *("data beyond the window", "empty data without end", "data nobody asked for", "answers nobody asked for"),
        *("unknown frames", "empty credit", "zeros", "noise", "a request", "an end before the answer", "lost"),
    ],
)
async def test_a_step_outside_the_protocol_ends_the_connection(
    puppet: Callable[..., Awaitable[Guest]], reply: Callable[[frames.Frame, int], bytes]
) -> None:
    guest = await puppet(reply)
    async with asyncio.timeout(10):
        with pytest.raises(GuestFailure):
            async with guest.read_file("/x"):
                await guest.closed.wait()
                await guest.ping()


async def test_an_agent_of_an_unknown_version_is_refused(puppet: Callable[..., Awaitable[Guest]]) -> None:
    ack = b'{"version":9,"agent":"9.0","window":524288}'
    with pytest.raises(GuestUnreachable, match="version"):
        await puppet(lambda frame, epoch: b"", ack)


@pytest.mark.parametrize("ack", [b"", b"x", b"[]", b'{"version":1,"agent":"x","window":0}', b'{"version":"1"}'])
async def test_a_malformed_ack_is_refused(puppet: Callable[..., Awaitable[Guest]], ack: bytes) -> None:
    with pytest.raises(GuestUnreachable):
        await puppet(lambda frame, epoch: b"", ack or b" ")


async def test_an_endless_listing_is_cut_off(puppet: Callable[..., Awaitable[Guest]]) -> None:
    line = b'{"path":"/x","type":"file","size":1,"mode":1,"owner":"a","group":"b","mtime_ns":0,"target":null}\n'

    def reply(frame: frames.Frame, epoch: int) -> bytes:
        out = b""
        if frame.kind == Kind.REQUEST:
            out = respond(frame, epoch, b'{"ok":{}}')
        if frame.kind in (Kind.REQUEST, Kind.WINDOW):
            budget = (1 << 19) if frame.kind == Kind.REQUEST else struct.unpack(">I", frame.body)[0]
            body = line * 600
            out += frames.encode(Kind.DATA, frames.LINES, frame.stream, body, epoch) * (budget // (len(body) + 16))
        return out

    guest = await puppet(reply)
    async with asyncio.timeout(60):
        with pytest.raises(GuestFailure, match="more than"):
            await guest.list_dir("/")
