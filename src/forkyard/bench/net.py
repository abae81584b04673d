"""The network's figures: previews beside a plain reverse proxy, downloads beside `curl`, names, WebSockets, slots.

Every comparison is with the same server, the same client and the same minute. A guest that is emulated is slow by
itself, so what it takes alone is measured too: over its slot, without the daemon in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect

from forkyard import AsyncForkyard, AsyncSandbox
from forkyard.bench import yard
from forkyard.bench.figures import Sample
from forkyard.errors import HostFailure
from forkyard.models.network import EgressPolicy, EgressRule
from forkyard.net.base import GUEST_ADDRESS
from forkyard.net.slots import DIRECTORY, Slots, open_listeners, open_socket

Say = Callable[[str], None]

SOCKETS = 1000
#: Of previews and what they are measured beside, so that a busy moment is everybody's.
TURNS = 20
BULK_BYTES = 256_000_000
_PORT, _SINK_PORT, _SOCKETS_PORT = 8000, 8001, 8002

#: The same program in the guest and on the host: 200 bytes, HTTP/1.1, kept alive; or, at /seen, what it was asked.
_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    def do_GET(self):
        body = b"x" * 200
        if self.path == "/seen":
            body = (self.requestline + "\\r\\n" + str(self.headers).replace("\\n", "\\r\\n")).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
#: Asks it from beside it, and prints how long each answer took.
_ASK = """
import http.client, json, sys, time
one, took = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1])), []
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    one.request("GET", "/")
    one.getresponse().read()
    took.append((time.perf_counter() - began) * 1000)
print(json.dumps(took))
"""
#: Takes bytes as fast as it can, and says how long it took.
_SINK = """
import socket, sys, time
server = socket.create_server(("", int(sys.argv[1])))
print("ready", flush=True)
while True:
    one, _ = server.accept()
    buffer = bytearray(1 << 20)
    while one.recv_into(buffer): pass
    one.close()
"""
#: WebSockets by hand, for a guest has no library for them: shakes hands, and says what it is told.
_SOCKETS = """
import asyncio, base64, hashlib, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
async def serve(reader, writer):
    try:
        head = await reader.readuntil(b"\\r\\n\\r\\n")
        key = next(l.split(b":")[1].strip() for l in head.split(b"\\r\\n") if l.lower().startswith(b"sec-websocket-key"))
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        writer.write(b"HTTP/1.1 101 Upgraded\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n")
        writer.write(b"Sec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n")
        while True:
            first, size = await reader.readexactly(2)
            mask = await reader.readexactly(4)
            data = bytes(b ^ mask[i % 4] for i, b in enumerate(await reader.readexactly(size & 127)))
            writer.write(bytes([first, len(data)]) + data)
    except (asyncio.IncompleteReadError, OSError):
        writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
#: Asks for names, and prints how long each answer took. Two in turns: one is looked up (and leads to a loopback, which
#: may not be reached), the other is refused at once.
_NAMES = """
import json, os, socket, sys, time
def question(name):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return os.urandom(2) + bytes.fromhex("01000001000000000000") + labels + bytes.fromhex("0000010001")
one, took = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), []
one.settimeout(5)
one.connect(("10.177.0.1", 53))
for number in range(int(sys.argv[1])):
    began = time.perf_counter()
    one.send(question(("localhost", "denied.test")[number % 2]))
    one.recv(4096)
    took.append((time.perf_counter() - began) * 1000)
print(json.dumps(took))
"""


async def net(n: int | None, say: Say) -> dict[str, Sample]:
    say("net: slots")
    results = await slots(n or 20)
    own = _own_address()
    policy = EgressPolicy(preset="none", rules=[EgressRule(cidr=f"{own}/32"), EgressRule(domain="localhost")])
    async with (
        yard.daemon(pool_size=0, pool_shells=0) as fy,
        await fy.sandboxes.create(idle_timeout_s=None, network=policy) as sandbox,
    ):
        results |= await preview(sandbox, n or 400, say)
        results |= await bulk(sandbox, own, n or 3, say)
        results |= await names(sandbox, n or 50, say)
        results |= await sockets(fy, sandbox, say)
    return results


# ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def slots(n: int) -> dict[str, Sample]:
    """From the pool, and one that has to be made."""
    ready, made = [], []
    pool = Slots(f"bench{os.getpid()}", spare=2, most=64)
    await pool.start({})
    try:
        for _ in range(n):
            await asyncio.sleep(0.5)  # refilled
            began = time.perf_counter()
            number = pool.claim(())
            assert number is not None
            await pool.prepare(number)
            listeners = await open_listeners(pool.path(number))  # without a door it is of no use
            ready.append((time.perf_counter() - began) * 1000)
            for listener in (listeners.tcp, listeners.dns_udp, listeners.dns_tcp):
                listener.close()
            await pool.release(number)
    finally:
        await pool.stop()
    bare = Slots(f"bench{os.getpid()}", spare=0, most=64)
    for _ in range(n):
        number = bare.claim(())
        assert number is not None
        began = time.perf_counter()
        await bare.prepare(number)
        made.append((time.perf_counter() - began) * 1000)
        await bare.release(number)
    return {"slot_ready": Sample(ready), "slot_made": Sample(made)}


# ── previews ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def preview(sandbox: AsyncSandbox, n: int, say: Say) -> dict[str, Sample]:
    """One request after the other on one connection: through the daemon, into the slot without it, and on the host
    through nginx, in turns. The guest's own time is what the second takes: for what the daemon asks of it, X-Forwarded-*
    and all, which an emulated guest takes its time to read. What is promised is the middle one of the turns."""
    say("net: a server in the guest, and the same on the host behind nginx")
    await _spawn(sandbox, _SERVER, str(_PORT))
    url = urlsplit(await sandbox.url(_PORT))
    alone = json.loads((await sandbox.exec(["python3", "-c", _ASK, str(_PORT), str(n)])).check().stdout)
    with _on_host(_SERVER, "0") as server, _nginx(int(server)) as proxy:
        say("net: requests")
        asked, port = _get(url.netloc), url.port or 80
        seen = await _seen(url.netloc, port)
        await _requests(asked, port, n // 4)  # warm
        turns: list[tuple[Sample, Sample, Sample, Sample]] = []
        each = max(2, n // TURNS)
        for _ in range(TURNS):
            ours = Sample(await _requests(asked, port, each))
            direct = Sample(await _requests(seen, await _into_slot(sandbox, _PORT), each))
            nginx = Sample(await _requests(asked, proxy, each))
            turns.append((ours, direct, nginx, Sample(await _requests(asked, int(server), each))))
    ours, direct, nginx, host = (
        Sample([value for one in same for value in one.values]) for same in zip(*turns, strict=True)
    )
    overheads = [(ours.p50 - direct.p50) / nginx.p50 for ours, direct, nginx, _ in turns]
    return {
        "preview_request": ours,
        "preview_guest_own": direct,
        "preview_guest_loopback": Sample(alone),
        "preview_nginx": nginx,
        "preview_host_server": host,
        "preview_overhead": Sample(overheads, "× nginx"),
    }


def _get(host: str, path: str = "/") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


async def _seen(host: str, port: int) -> bytes:
    """The request that the server in the guest is sent for ours."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(60):
            writer.write(_get(host, "/seen"))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            return (await reader.readexactly(size)).replace(b"GET /seen ", b"GET / ")
    finally:
        writer.close()


async def _requests(request: bytes, to: int | socket.socket, n: int) -> list[float]:
    if isinstance(to, int):
        reader, writer = await asyncio.open_connection("127.0.0.1", to)
    else:
        reader, writer = await asyncio.open_connection(sock=to)
    took = []
    try:
        for _ in range(n):
            async with asyncio.timeout(30):
                began = time.perf_counter()
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"HTTP/1.1 200"):
                    raise HostFailure(f"a request was answered with {head[:200]!r}")
                await reader.readexactly(200)
                took.append((time.perf_counter() - began) * 1000)
    finally:
        writer.close()
    return took


async def _into_slot(sandbox: AsyncSandbox, port: int) -> socket.socket:
    """A connection to the guest, past the daemon."""
    one = await open_socket(_slot_of(sandbox))
    await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1" if port != _SINK_PORT else GUEST_ADDRESS, port))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one


def _slot_of(sandbox: AsyncSandbox) -> Path:
    inside = (_hypervisor_of(sandbox) / "ns/net").stat().st_ino
    for slot in DIRECTORY.glob("forkyard-*"):
        with contextlib.suppress(OSError):
            if slot.stat().st_ino == inside:
                return slot
    raise HostFailure("the slot of the machine was not found")


def _hypervisor_of(sandbox: AsyncSandbox) -> Path:
    """Its directory in /proc. There is one machine in this yard, and no pool."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_text()
            if sandbox.id in command and "qemu-system" in command:
                return process
    raise HostFailure("the hypervisor of the machine was not found")


@contextlib.contextmanager
def _on_host(program: str, *arguments: str) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def _nginx(server: int) -> Iterator[int]:
    """A plain reverse proxy in front of it, connections kept alive on both sides."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    if not Path(program).exists():
        raise HostFailure("previews are measured beside nginx; `make bench` installs it, or: apt install nginx-light")
    port = _free_port()
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "nginx.conf")
        config.write_text(
            f"daemon off; master_process off; pid {directory}/pid; error_log /dev/null;\n"
            "events { worker_connections 1024; }\n"
            f"http {{ access_log off; client_body_temp_path {directory}/b; proxy_temp_path {directory}/p;\n"
            f"fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;\n"
            f"upstream s {{ server 127.0.0.1:{server}; keepalive 16; }}\n"
            f"server {{ listen 127.0.0.1:{port}; keepalive_requests 100000; location / {{\n"
            'proxy_pass http://s; proxy_http_version 1.1; proxy_set_header Connection ""; } } }\n'
        )
        process = subprocess.Popen([program, "-c", str(config), "-e", "/dev/null"])
        try:
            _wait_for(port)
            yield port
        finally:
            process.terminate()
            process.wait()


def _wait_for(port: int) -> None:
    until = time.monotonic() + 10
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if time.monotonic() > until:
            raise HostFailure("nginx does not answer")
        time.sleep(0.02)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


# ── downloads ────────────────────────────────────────────────────────────────────────────────────────────────────


async def bulk(sandbox: AsyncSandbox, own: str, n: int, say: Say) -> dict[str, Sample]:
    """`curl` in the guest and on the host, from one server. What the guest can take at all: the same bytes, pushed into
    its slot by a program that does nothing else. And whether its processor was the bound: which part of the time of the
    download it ran, or waited for one of ours."""
    say("net: a big download")
    await _spawn(sandbox, _SINK, str(_SINK_PORT))
    hypervisor = _hypervisor_of(sandbox)
    async with _bytes_server(own) as port:
        url = f"http://{own}:{port}/"
        inside, outside, taken, busy = [], [], [], []
        for _ in range(n):
            before, began = _busy_s(hypervisor), time.perf_counter()
            inside.append(_mb_per_s((await sandbox.exec(_curl(url))).check().stdout))
            took_s, after = time.perf_counter() - began, _busy_s(hypervisor)
            busy.append(100 * max(after[thread] - before.get(thread, 0.0) for thread in after) / took_s)
            outside.append(_mb_per_s(await asyncio.to_thread(_curl_here, url)))
            taken.append(await _push(await _into_slot(sandbox, _SINK_PORT)))
    egress, host, guest = Sample(inside, "MB/s"), Sample(outside, "MB/s"), Sample(taken, "MB/s")
    return {
        "egress_download": egress,
        "egress_host_curl": host,
        "egress_guest_bound": guest,
        "egress_guest_busy": Sample(busy, "%"),
        "egress_share": Sample([100 * egress.p50 / min(host.p50, guest.p50)], "%"),
    }


def _busy_s(hypervisor: Path) -> dict[str, float]:
    """Of each thread, how long it has run or waited to run. The guest's processor is the busiest of them."""
    found = {}
    for thread in (hypervisor / "task").iterdir():
        with contextlib.suppress(OSError):
            ran_ns, waited_ns, _ = (thread / "schedstat").read_text().split()
            found[thread.name] = (int(ran_ns) + int(waited_ns)) / 1e9
    return found


def _curl(url: str) -> list[str]:
    return ["curl", "-sS", "-o", "/dev/null", "-w", "%{speed_download}", url]


def _curl_here(url: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(_curl(url), capture_output=True, text=True, check=True, env=env).stdout


def _mb_per_s(speed: str) -> float:
    return float(speed) / 1e6


@contextlib.asynccontextmanager
async def _bytes_server(address: str) -> AsyncIterator[int]:
    piece = bytes(1 << 20)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % BULK_BYTES)
            left = BULK_BYTES
            while left:
                size = min(left, len(piece))
                writer.write(piece[:size])
                await writer.drain()
                left -= size
        writer.close()

    server = await asyncio.start_server(serve, address, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _push(one: socket.socket) -> float:
    """MB/s into the guest, as it takes them."""
    reader, writer = await asyncio.open_connection(sock=one)
    piece, left = bytes(1 << 20), BULK_BYTES // 4
    began = time.perf_counter()
    while left > 0:
        writer.write(piece)
        await writer.drain()
        left -= len(piece)
    writer.write_eof()
    await reader.read()  # it closes when it has all
    took_s = time.perf_counter() - began
    writer.close()
    return BULK_BYTES / 4 / 1e6 / took_s


def _own_address() -> str:
    """One of this host that is not its loopback, which a guest has too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError as error:
            raise HostFailure("downloads are measured from an address of this host, and it has none") from error
        return str(probe.getsockname()[0])


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def names(sandbox: AsyncSandbox, n: int, say: Say) -> dict[str, Sample]:
    """How long the daemon took over each question, by its own records, and how long the guest waited."""
    say("net: names")
    answer = (await sandbox.exec(["python3", "-c", _NAMES, str(n)])).check()
    await asyncio.sleep(1)  # records are written behind
    records = await sandbox.egress.list(kind="dns")
    return {
        "dns_decision": Sample([record.duration_ms for record in records]),
        "dns_in_guest": Sample(json.loads(answer.stdout)),
    }


# ── WebSockets ───────────────────────────────────────────────────────────────────────────────────────────────────


async def sockets(fy: AsyncForkyard, sandbox: AsyncSandbox, say: Say) -> dict[str, Sample]:
    """A thousand that are open and idle: each still answers afterwards, and so does the daemon meanwhile."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    await _spawn(sandbox, _SOCKETS, str(_SOCKETS_PORT))
    url = urlsplit(await sandbox.url(_SOCKETS_PORT))
    at_once = asyncio.Semaphore(16)
    opened: list[ClientConnection] = []

    async def open_one() -> None:
        async with at_once:
            uri = f"ws://{url.netloc}/"
            opened.append(
                await connect(uri, host="127.0.0.1", port=url.port, ping_interval=None, open_timeout=60, proxy=None)
            )
            if len(opened) % 50 == 0:
                say(f"net: {len(opened)} WebSockets open")

    async def answers(one: ClientConnection) -> bool:
        async with at_once, asyncio.timeout(60):
            await one.send(b"hello")
            return await one.recv() == b"hello"

    began = time.perf_counter()
    await asyncio.gather(*(open_one() for _ in range(SOCKETS)))
    opening_s = time.perf_counter() - began
    health = []
    for _ in range(20):
        began = time.perf_counter()
        await fy.health()
        health.append((time.perf_counter() - began) * 1000)
        await asyncio.sleep(0.25)
    say("net: a word on each")
    alive = sum(found is True for found in await asyncio.gather(*map(answers, opened), return_exceptions=True))
    await asyncio.gather(*(one.close() for one in opened))
    return {
        "preview_websockets": Sample([alive], "open"),
        "preview_websockets_opening": Sample([opening_s * 1000 / SOCKETS]),
        "health_with_websockets": Sample(health),
    }


async def _spawn(sandbox: AsyncSandbox, program: str, *arguments: str) -> None:
    """A server in the guest, from its first line on."""
    process = await sandbox.spawn(["python3", "-c", program, *arguments])
    async for _ in process.output():
        return
    raise HostFailure("a server in the guest did not start")
