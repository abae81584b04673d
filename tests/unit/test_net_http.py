"""The interceptor between a guest and a server, both in this process: secrets, checks, recordings."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from forkyard.models.network import EgressPolicy
from forkyard.net.authority import Authority
from forkyard.net.base import Header, Injection, Network
from forkyard.net.http import HttpInterceptor
from forkyard.net.outside import Intercepted, tcp_connect
from forkyard.net.outside import Request as HttpRequest
from forkyard.net.recordings import Recordings, Room

pytestmark = pytest.mark.anyio

NAME = "api.example.test"
PLACEHOLDER = "forkyard-secret-0123456789"
VALUE = "the-real-value"
SECRET = Injection(PLACEHOLDER, VALUE, (NAME,), "Authorization", "Bearer {}")


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Server:
    """Answers `/echo` with the headers it got; `/count` with how many came; `/ws` switches and echoes bytes."""

    asked: list[Asked] = field(default_factory=list)
    connections: int = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ssl.SSLError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in head[1:] if line}
        body = await self._body(reader, headers)
        self.asked.append(Asked(method, path, headers, body))
        if path == "/ws":
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
            while data := await reader.read(1024):
                writer.write(data.upper())
                await writer.drain()
            return False
        if path == "/stream":
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Seen: " + VALUE.encode() + b"\r\n\r\n")
            half = len(VALUE) // 2
            for part in (b"a " + VALUE[:half].encode(), VALUE[half:].encode() + b" z"):
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
                await asyncio.sleep(0.02)
            writer.write(b"0\r\n\r\n")
            return True
        if path == "/hang-up":
            return False
        if path == "/count":
            answer = str(len(self.asked)).encode()
        elif path.startswith("/echo"):
            answer = "\n".join(f"{key}: {value}" for key, value in headers.items()).encode() + b"\n" + body
        else:
            answer = b"x" * 300_000
        gone = b"" if method == "HEAD" else answer
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(answer) + gone)
        await writer.drain()
        return True

    async def _body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
            return body
        return await reader.readexactly(int(headers.get("content-length", 0)))


@dataclass
class World:
    server: Server
    authority: Authority
    interceptor: HttpInterceptor
    recordings: Recordings
    port: int
    network: Network = field(default_factory=lambda: Network(injections={"TOKEN": SECRET}))
    name: str = NAME
    sandbox_id: str = "s"
    notes: list[tuple[str, str | None]] = field(default_factory=list)
    logged: list[HttpRequest] = field(default_factory=list)
    reach: Callable[[], Awaitable[socket.socket]] | None = None

    @contextlib.asynccontextmanager
    async def guest(
        self, *, tls: bool = True, trusting: bool = True
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A guest's connection. What became of the interceptor's side is raised here."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)

        async def connect() -> socket.socket:
            return await (self.reach or (lambda: tcp_connect("127.0.0.1", self.port)))()

        def note(verdict: str, reason: str | None) -> None:
            self.notes.append((verdict, reason))

        what = Intercepted(self.sandbox_id, self.name, 443, tls, self.network, connect, note, self.logged.append)
        serving = asyncio.create_task(self.interceptor.serve(theirs, what))
        context = ssl.create_default_context(cadata=self.authority.certificate_pem if trusting else None)
        try:
            async with asyncio.timeout(10):
                reader, writer = await asyncio.open_connection(
                    sock=ours, ssl=context if tls else None, server_hostname=self.name if tls else None
                )
                yield reader, writer
                writer.close()
                await serving
        except (ssl.SSLError, OSError):
            await serving
            raise
        finally:
            serving.cancel()
            ours.close()
            await asyncio.gather(serving, return_exceptions=True)

    async def ask(self, request: str, body: bytes = b"", **how: bool) -> tuple[int, dict[str, str], bytes]:
        async with self.guest(**how) as (reader, writer):
            return await exchange(reader, writer, request, body)


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: str, body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    """`request` is its first line without the version, and headers."""
    first, *headers = request.split("\n")
    if not any(line.lower().startswith("host:") for line in headers):
        headers.append(f"Host: {NAME}")
    if body:
        headers.append(f"Content-Length: {len(body)}")
    writer.write("\r\n".join([f"{first} HTTP/1.1", *headers, "", ""]).encode() + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    found = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in head[1:] if line}
    if found.get("transfer-encoding") == "chunked":
        answer = b""
        while size := int(await reader.readline(), 16):
            answer += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    elif first.startswith("HEAD"):
        answer = b""
    else:
        answer = await reader.readexactly(int(found.get("content-length", 0)))
    return int(head[0].split(" ")[1]), found, answer


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """The daemon runs on uvloop, whose TLS is its own."""
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    public, authority = Authority.load_or_make(tmp_path / "public"), Authority.load_or_make(tmp_path / "ours")
    handler = Server()
    server = await asyncio.start_server(handler, "127.0.0.1", 0, ssl=public.context_for([NAME]))
    recordings = Recordings(tmp_path / "recordings")
    interceptor = HttpInterceptor(authority, recordings, extra_ca_file=tmp_path / "public" / "ca.pem")
    async with server:
        yield World(handler, authority, interceptor, recordings, server.sockets[0].getsockname()[1])


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_value_is_put_in_and_does_not_come_back(world: World) -> None:
    status, _, body = await world.ask(f"GET /echo\nAuthorization: Bearer {PLACEHOLDER}\nAccept-Encoding: gzip")
    assert status == 200
    assert world.server.asked[0].headers["authorization"] == f"Bearer {VALUE}"
    assert world.server.asked[0].headers["accept-encoding"] == "identity"
    assert VALUE.encode() not in body
    assert b"authorization: Bearer " + b"*" * len(VALUE) in body


async def test_a_value_that_is_cut_in_two_does_not_come_back_either(world: World) -> None:
    _, headers, body = await world.ask(f"GET /stream\nAuthorization: {PLACEHOLDER}")
    assert headers["x-seen"] == "*" * len(VALUE)
    assert body == b"a " + b"*" * len(VALUE) + b" z"


async def test_a_placeholder_elsewhere_stays_one(world: World) -> None:
    await world.ask(f"POST /echo?key={PLACEHOLDER}\nX-Api-Key: {PLACEHOLDER}", PLACEHOLDER.encode())
    asked = world.server.asked[0]
    assert asked.path == f"/echo?key={PLACEHOLDER}"
    assert asked.headers["x-api-key"] == PLACEHOLDER
    assert asked.body == PLACEHOLDER.encode()


async def test_without_tls_no_value_is_put_in(world: World) -> None:
    assert world.interceptor.wants(world.network, NAME, True)
    assert not world.interceptor.wants(world.network, NAME, False)
    assert not world.interceptor.wants(world.network, "other.example.test", True)
    world.network = Network(EgressPolicy(record="x"), {"TOKEN": SECRET})
    plain = await asyncio.start_server(world.server, "127.0.0.1", 0)
    async with plain:
        world.port = plain.sockets[0].getsockname()[1]
        await world.ask(f"GET /echo\nAuthorization: {PLACEHOLDER}", tls=False)
    assert world.server.asked[0].headers["authorization"] == PLACEHOLDER


async def test_a_header_of_the_policy_is_put_in_and_its_secret_does_not_come_back(world: World) -> None:
    added = (
        Header(NAME, "Authorization", f"Bearer {VALUE}", (VALUE,)),
        Header("*.test", "X-Team", "red"),
        Header("other.test", "X-Other", "1"),
    )
    world.network = Network(headers=added)
    assert world.interceptor.wants(world.network, NAME, True)
    assert not world.interceptor.wants(world.network, NAME, False)
    assert not world.interceptor.wants(world.network, "example.org", True)
    assert world.network.intercepts
    _, _, body = await world.ask("GET /echo\nauthorization: of the guest\nX-TEAM: blue")
    sent = world.server.asked[0].headers
    assert (sent["authorization"], sent["x-team"], "x-other" in sent) == (f"Bearer {VALUE}", "red", False)
    assert b"authorization: Bearer " + b"*" * len(VALUE) in body
    assert b"x-team: red" in body
    assert b"of the guest" not in body


async def test_without_tls_no_header_of_the_policy_is_put_in(world: World) -> None:
    added = (Header(NAME, "Authorization", f"Bearer {VALUE}", (VALUE,)),)
    world.network = Network(EgressPolicy(record="x"), headers=added)
    plain = await asyncio.start_server(world.server, "127.0.0.1", 0)
    async with plain:
        world.port = plain.sockets[0].getsockname()[1]
        await world.ask("GET /echo", tls=False)
    assert "authorization" not in world.server.asked[0].headers


async def test_a_server_whose_certificate_is_not_trusted_gets_nothing(world: World, tmp_path: Path) -> None:
    world.interceptor = HttpInterceptor(world.authority, world.recordings)
    status, _, body = await world.ask(f"GET /echo\nAuthorization: {PLACEHOLDER}")
    assert status == 502
    assert b"not trusted" in body
    assert world.server.asked == []
    assert world.notes[-1][0] == "failed"


async def test_a_server_with_the_certificate_of_another_name_gets_nothing(world: World) -> None:
    world.name = "other.example.test"
    world.network = Network(injections={"TOKEN": Injection(PLACEHOLDER, VALUE, ("*",), "Authorization", "Bearer {}")})
    status, _, _ = await world.ask(f"GET /echo\nHost: other.example.test\nAuthorization: {PLACEHOLDER}")
    assert status == 502
    assert world.server.asked == []


async def test_a_guest_that_does_not_trust_us_is_told_apart(world: World) -> None:
    with contextlib.suppress(ssl.SSLError, OSError):
        async with world.guest(trusting=False):
            pass
    assert world.notes[0][0] == "failed"


# ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_requests_follow_one_another_on_one_connection(world: World) -> None:
    async with world.guest() as (reader, writer):
        for number in range(1, 4):
            assert (await exchange(reader, writer, "GET /count"))[2] == str(number).encode()
    assert world.server.connections == 1


async def test_a_server_that_hangs_up_instead_of_an_answer_is_told_of(world: World) -> None:
    async with world.guest() as (reader, writer):
        assert (await exchange(reader, writer, "GET /count"))[0] == 200
        status, _, body = await exchange(reader, writer, "GET /hang-up")
        assert (status, b"hung up" in body) == (502, True)


@pytest.mark.parametrize("host", ["other.example.test", f"{NAME}:8443", "", f"{NAME}, other.example.test"])
async def test_a_request_for_another_host_is_refused(world: World, host: str) -> None:
    status, headers, _ = await world.ask(f"GET /echo\nHost: {host}")
    assert status == 421
    assert headers["x-forkyard-blocked"] == "1"
    assert world.server.asked == []
    assert world.notes[-1][0] == "denied"


async def test_what_is_no_http_is_refused(world: World) -> None:
    async with world.guest() as (reader, writer):
        writer.write(b"nonsense\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")


async def test_a_giant_head_is_refused(world: World) -> None:
    async with world.guest() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nX: " + b"y" * 200_000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")


async def test_bodies_pass_both_ways(world: World) -> None:
    body = bytes(range(256)) * 2000
    _, _, answer = await world.ask("PUT /echo", body)
    assert answer.endswith(body)
    async with world.guest() as (reader, writer):
        writer.write(f"POST /echo HTTP/1.1\r\nHost: {NAME}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        writer.write(b"5\r\nhello\r\n0\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    assert world.server.asked[-1].body == b"hello"
    assert (await world.ask("HEAD /big"))[1]["content-length"] == "300000"


async def test_a_websocket_passes(world: World) -> None:
    async with world.guest() as (reader, writer):
        writer.write(
            f"GET /ws HTTP/1.1\r\nHost: {NAME}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Authorization: {PLACEHOLDER}\r\n\r\n".encode()
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"HELLO"
    assert world.server.asked[0].headers["authorization"] == f"Bearer {VALUE}"


async def test_what_a_web_socket_says_holds_no_value_and_waits_for_nothing(world: World) -> None:
    world.network = Network(
        injections={"TOKEN": replace(SECRET, value=VALUE.upper())}
    )  # that server answers in capitals
    async with world.guest() as (reader, writer):
        writer.write(
            f"GET /ws HTTP/1.1\r\nHost: {NAME}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Extensions: permessage-deflate\r\nAuthorization: Bearer {PLACEHOLDER}\r\n\r\n".encode()
        )
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"a " + VALUE.encode() + b" b")
        assert await reader.readexactly(len(VALUE) + 4) == b"A " + b"*" * len(VALUE) + b" B"
        writer.write(b"ends with " + VALUE[:3].encode())
        assert await asyncio.wait_for(reader.readexactly(13), 5) == b"ENDS WITH " + VALUE[:3].upper().encode()
    assert "sec-websocket-extensions" not in world.server.asked[0].headers


async def test_a_request_with_two_sizes_is_refused(world: World) -> None:
    hidden = f"GET /hidden HTTP/1.1\r\nHost: {NAME}\r\n\r\n"
    async with world.guest() as (reader, writer):
        sizes = f"Content-Length: {5 + len(hidden)}\r\nTransfer-Encoding: chunked"
        writer.write(f"POST /echo HTTP/1.1\r\nHost: {NAME}\r\n{sizes}\r\n\r\n0\r\n\r\n{hidden}".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    assert world.server.asked == []


async def test_another_upgrade_does_not_pass(world: World) -> None:
    await world.ask("GET /echo\nUpgrade: h2c\nConnection: Upgrade, HTTP2-Settings\nHTTP2-Settings: AA")
    assert "upgrade" not in world.server.asked[0].headers
    await world.ask("GET /echo\nUpgrade: websocket\nUpgrade: h2c\nConnection: Upgrade\nHTTP2-Settings: AA")
    assert not {"upgrade", "http2-settings"} & set(world.server.asked[1].headers), "a server may choose among several"


async def test_every_request_is_logged_without_its_query(world: World) -> None:
    async with world.guest() as (reader, writer):
        await exchange(reader, writer, f"POST /echo?token=x#y\nAuthorization: {PLACEHOLDER}", b"question")
        await exchange(reader, writer, "GET /count")
        await exchange(reader, writer, "GET /count\nHost: other.example.test")
    first, second, third = world.logged
    assert (first.method, first.target, first.status, first.verdict) == ("POST", "/echo?token=x#y", 200, "allowed")
    assert first.bytes_out == len(b"question") and first.bytes_in > 0 and first.duration_s > 0
    assert (second.target, second.status, second.bytes_in) == ("/count", 200, 1)
    assert (third.status, third.verdict) == (421, "denied")
    assert "other.example.test" in (third.reason or "")
    assert VALUE not in repr(world.logged)


# ── record and replay ────────────────────────────────────────────────────────────────────────────────────────────


def replaying(world: World, name: str = "run") -> None:
    async def nowhere() -> socket.socket:
        raise AssertionError("a replay must not reach out")

    world.network = Network(EgressPolicy(preset="evaluation", replay=name))
    world.reach = nowhere


async def test_what_was_recorded_is_replayed_byte_for_byte(world: World) -> None:
    world.network = Network(EgressPolicy(record="run"), {"TOKEN": SECRET})
    asked = ["GET /count", "GET /count", "HEAD /big", "GET /big", f"GET /stream\nAuthorization: {PLACEHOLDER}"]
    recorded = [await world.ask(request) for request in asked]
    posted = await world.ask("POST /echo", b"question")
    replaying(world)
    world.recordings = Recordings(world.recordings._directory)
    again = [await world.ask(request) for request in asked]
    for (status, headers, body), (status_again, headers_again, body_again) in zip(recorded, again, strict=True):
        assert (status, body) == (status_again, body_again)
        assert headers.get("x-seen") == headers_again.get("x-seen")
    assert (await world.ask("POST /echo", b"question"))[2] == posted[2]
    assert len(world.server.asked) == len(asked) + 1


async def test_when_answers_are_used_up_the_last_is_repeated_and_others_begin_anew(world: World) -> None:
    world.network = Network(EgressPolicy(record="run"))
    for _ in range(2):
        await world.ask("GET /count")
    replaying(world)
    assert [(await world.ask("GET /count"))[2] for _ in range(3)] == [b"1", b"2", b"2"]
    world.sandbox_id = "another"
    assert (await world.ask("GET /count"))[2] == b"1"


async def test_a_restart_does_not_begin_a_replay_anew(world: World) -> None:
    world.network = Network(EgressPolicy(record="run"))
    for _ in range(3):
        await world.ask("GET /count")
    replaying(world)
    answers = []
    for _ in range(4):
        world.interceptor = HttpInterceptor(world.authority, Recordings(world.recordings._directory))
        answers.append((await world.ask("GET /count"))[2])
    assert answers == [b"1", b"2", b"3", b"3"]
    (places,) = (world.recordings._directory / "run" / "places").iterdir()
    assert len(places.read_text().splitlines()) == 2, "no line for what is repeated"


async def test_a_recording_ends_where_its_room_does(world: World) -> None:
    directory = world.recordings._directory

    def restart(room: Room) -> None:
        world.recordings = Recordings(directory, room)
        world.interceptor = HttpInterceptor(world.authority, world.recordings, directory.parent / "public" / "ca.pem")

    restart(Room(each=700_000, all=2**30))
    world.network = Network(EgressPolicy(record="run"))
    assert [(await world.ask("GET /big"))[0] for _ in range(2)] == [200, 200]  # the same body is kept once
    assert len((await world.ask("POST /echo", b"x" * 500_000))[2]) > 500_000  # it passes, and is not kept
    assert (world.logged[-1].verdict, "not recorded" in (world.logged[-1].reason or "")) == ("allowed", True)
    assert len(await world.recordings.exchanges("run")) == 2
    assert not list(directory.glob("*/bodies/.new-*"))

    restart(Room(each=300_000, all=2**30))
    status, _, text = await world.ask("GET /count")
    assert (status, b"FORKYARD_RECORDING_MIB" in text) == (507, True)
    assert world.logged[-1].verdict == "denied"
    world.network = Network(EgressPolicy(record="another"))
    assert (await world.ask("GET /count"))[0] == 200

    restart(Room(each=2**30, all=300_000))
    status, _, text = await world.ask("GET /count")
    assert (status, b"FORKYARD_RECORDINGS_MIB" in text) == (507, True)
    await world.recordings.delete("run")
    assert (await world.ask("GET /count"))[0] == 200


async def test_what_was_not_recorded_is_refused(world: World) -> None:
    world.network = Network(EgressPolicy(record="run"))
    await world.ask("GET /count")
    await world.ask("POST /echo", b"one")
    replaying(world)
    for request, body in (("GET /other", b""), ("POST /echo", b"two"), ("GET /count?x=1", b"")):
        status, _, text = await world.ask(request, body)
        assert status == 403
        assert b"not in the recording" in text
        assert world.notes[-1][0] == "denied"
        assert (world.logged[-1].verdict, world.logged[-1].status) == ("denied", 403)


async def test_only_hosts_of_the_recording_are_replayed(world: World) -> None:
    world.network = Network(EgressPolicy(record="run"))
    await world.ask("GET /count")
    assert not await world.interceptor.replays(world.network, NAME)  # it records
    replaying(world)
    assert await world.interceptor.replays(world.network, NAME)
    assert not await world.interceptor.replays(world.network, "other.example.test")
    replaying(world, "nothing")
    assert not await world.interceptor.replays(world.network, NAME)


async def test_half_an_answer_is_not_recorded(world: World) -> None:
    world.network = Network(EgressPolicy(record="run"))
    async with world.guest() as (reader, writer):
        writer.write(f"GET /big HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode())
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()
    assert await world.recordings.list() == [] or (await world.recordings.list())[0].exchanges == 1


async def test_values_are_not_in_a_recording(world: World, tmp_path: Path) -> None:
    world.network = Network(EgressPolicy(record="run"), {"TOKEN": SECRET})
    await world.ask(f"GET /echo\nAuthorization: {PLACEHOLDER}")
    await world.ask(f"GET /stream\nAuthorization: {PLACEHOLDER}")
    files = [path for path in (tmp_path / "recordings").rglob("*") if path.is_file()]
    assert len(files) == 3
    assert not any(VALUE.encode() in path.read_bytes() for path in files)


async def test_recordings_are_listed_shown_and_deleted(world: World) -> None:
    world.network = Network(EgressPolicy(record="run"))
    await world.ask("GET /count")
    (info,) = await world.recordings.list()
    assert (info.name, info.exchanges, info.size_bytes) == ("run", 1, 1)
    (exchanged,) = await world.recordings.exchanges("run")
    assert (exchanged.method, exchanged.url, exchanged.status) == ("GET", f"https://{NAME}/count", 200)
    await world.recordings.delete("run")
    assert not world.recordings.exists("run")
