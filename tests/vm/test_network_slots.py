"""The network of real machines, below any policy: what a slot lets through, whose connection it is, what a copy inherits.

The host runs in this process, with a door that answers every connection itself and says what it knows of it. So nothing
here leaves the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from forkyard.daemon import prepare_directories
from forkyard.errors import PortClosed
from forkyard.guest.base import ExecSpec, Exit, Output
from forkyard.guest.client import connect
from forkyard.host.doorway import Sink
from forkyard.host.local import LocalHost
from forkyard.host.machine import Machine
from forkyard.hosts.base import CreateSpec, Incarnation
from forkyard.images import ensure_base_image
from forkyard.models import Shape
from forkyard.net.base import Listeners, Network, OwnerOf, Traffic
from forkyard.settings import Settings
from forkyard.vmm.qemu import QemuDriver

from .conftest import Daemon, belongings

pytestmark = pytest.mark.timeout(300)

#: A connection to this port is greeted and kept; one to any other is told who made it.
KEPT_PORT = 9999
SAY = "python3 /root/say.py"
SAY_PROGRAM = f"""
import socket, sys
address, port = sys.argv[1], int(sys.argv[2])
with socket.create_connection((address, port), 10) as connection:
    print(connection.makefile().readline(), end="", flush=True)
    if port == {KEPT_PORT}:
        connection.settimeout(None)
        try:
            print("closed" if connection.recv(1) == b"" else "data", flush=True)
        except OSError as error:
            print(type(error).__name__, flush=True)
"""


class TellingDoor:
    traffic = Traffic()

    def __init__(self, sandbox_id: str, listeners: Listeners, network: Network, owner_of: OwnerOf, sink: Sink) -> None:
        self._listeners = listeners
        self._owner_of = owner_of
        self._tasks: list[asyncio.Task[None]] = []
        self._kept: list[socket.socket] = []

    def start(self) -> None:
        self._tasks.append(asyncio.create_task(self._accept()))

    def update(self, network: Network) -> None:
        pass

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in (self._listeners.tcp, self._listeners.dns_udp, self._listeners.dns_tcp, *self._kept):
            each.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, peer = await loop.sock_accept(self._listeners.tcp)
            connection.setblocking(False)
            self._kept.append(connection)
            self._tasks.append(asyncio.create_task(self._tell(connection, peer[1])))

    async def _tell(self, connection: socket.socket, source_port: int) -> None:
        port, address = struct.unpack_from("!2xH4s", connection.getsockopt(socket.SOL_IP, 80, 16))
        started = time.perf_counter()
        owner = await self._owner_of("tcp", source_port, socket.inet_ntoa(address), port)
        known = {"to": f"{socket.inet_ntoa(address)}:{port}", "ms": (time.perf_counter() - started) * 1000}
        line = json.dumps(known | (asdict(owner) if owner is not None else {})) + "\n"
        await asyncio.get_running_loop().sock_sendall(connection, line.encode())
        if port != KEPT_PORT:
            connection.close()


@contextlib.asynccontextmanager
async def host() -> AsyncIterator[LocalHost]:
    """A host of its own; when it is left, nothing of it is."""
    root = Path(tempfile.mkdtemp(prefix="fyt-", dir="/tmp"))
    root.chmod(0o711)
    daemon = Daemon(root)
    settings = daemon.settings.model_copy(update={"pool_size": 0, "pool_shells": 0, "pool_slots": 2})
    prepare_directories(settings)
    made = await new_host(settings)
    await made.start()
    try:
        yield made
    finally:
        await made.stop(destroy=True)
        left = belongings(daemon, templates=True)
        shutil.rmtree(root, ignore_errors=True)
        assert not left


async def new_host(settings: Settings) -> LocalHost:
    image = await ensure_base_image(settings.cache_dir, lambda *_: None)
    driver = await QemuDriver.open(cache_dir=settings.cache_dir, scope=settings.scope, accel=settings.accel)
    return LocalHost(settings, driver, connect, image, TellingDoor)


def on_a_host(body: Callable[[LocalHost], Awaitable[None]]) -> None:
    async def run() -> None:
        async with host() as made:
            await body(made)

    asyncio.run(run())


_numbers = iter(range(1, 1000))


async def create(host: LocalHost) -> Incarnation:
    incarnation = Incarnation(f"net{next(_numbers)}", 1)
    await host.create(incarnation, CreateSpec(Shape()))

    async def program() -> AsyncIterator[bytes]:
        yield SAY_PROGRAM.encode()

    await host.guest(incarnation).write_file("/root/say.py", program())
    return incarnation


async def run(host: LocalHost, where: Incarnation, command: str, **spec: Any) -> str:
    out = b""
    async with host.guest(where).execute(ExecSpec(f"{command} 2>&1", timeout_s=60, **spec)) as execution:
        async for item in execution:
            if isinstance(item, Output):
                out += item.data
    return out.decode()


async def lines_of(host: LocalHost, where: Incarnation, exec_id: str, count: int, timeout_s: float = 30) -> list[str]:
    """The first lines an exec has written, or fewer if it ends or writes no more."""
    out = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s), host.guest(where).attach(exec_id) as execution:
            async for item in execution:
                if isinstance(item, Output):
                    out += item.data
                if isinstance(item, Exit) or out.count(b"\n") >= count:
                    break
    return out.decode().splitlines()


def test_every_connection_ends_at_the_door_and_nothing_else_gets_anywhere() -> None:
    async def body(host: LocalHost) -> None:
        one = await create(host)
        for address in ("203.0.113.5", "169.254.169.254", "192.168.1.1", "10.177.0.1"):
            told = json.loads(await run(host, one, f"{SAY} {address} 8080"))
            assert told["to"] == f"{address}:8080"
        assert "Packet filtered" in await run(host, one, "ping -c1 -W5 203.0.113.5")
        assert "Packet filtered" in await run(host, one, "ping -c1 -W5 10.177.0.1")
        # Also if its root turns IPv6 on: the other end of the cable does not speak it.
        await run(host, one, "sysctl -w net.ipv6.conf.eth0.disable_ipv6=0; ip -6 route add default dev eth0")
        assert "100% packet loss" in await run(host, one, "ping -c1 -W2 fe80::1%eth0")
        udp = "s = socket.socket(2, 2); s.settimeout(5); s.connect(('203.0.113.5', 443)); s.send(b'x'); s.recv(1)"
        assert "No route to host" in await run(host, one, f'python3 -c "import socket; {udp}"')
        # A packet with another sender's address leads nowhere either.
        await run(host, one, "ip addr add 198.51.100.7/32 dev eth0")
        other = "import socket; socket.create_connection(('203.0.113.5', 80), 5, ('198.51.100.7', 0))"
        assert "Error" in await run(host, one, f'python3 -c "{other}"')

    on_a_host(body)


def test_two_guests_with_the_same_address_do_not_meet() -> None:
    async def body(host: LocalHost) -> None:
        one, other = await create(host), await create(host)
        server = ExecSpec("python3 -m http.server 8000 --bind 0.0.0.0", id="server")
        await host.guest(one).start(server)
        assert await answers(host, one, 8000)
        with pytest.raises(PortClosed):
            await host.connect(other, 8000)
        assert "Refused" in await run(host, other, f"{SAY} 10.177.0.2 8000")
        assert json.loads(await run(host, other, f"{SAY} 10.177.0.1 8000"))["to"] == "10.177.0.1:8000"
        await run(host, other, "ping -c2 -W1 -b 10.177.0.3; ping -c2 -W1 -b 255.255.255.255")

    on_a_host(body)


async def answers(host: LocalHost, where: Incarnation, port: int) -> bool:
    """Whether a web server there says 200, once it has started."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(30):
        while True:
            try:
                connection = await host.connect(where, port)
                break
            except PortClosed:
                await asyncio.sleep(0.1)
        with connection:
            await loop.sock_sendall(connection, b"GET / HTTP/1.0\r\n\r\n")
            return b" 200 " in await loop.sock_recv(connection, 1000)


def test_a_server_is_reached_wherever_in_the_guest_it_listens() -> None:
    async def body(host: LocalHost) -> None:
        one = await create(host)
        with pytest.raises(PortClosed):
            await host.connect(one, 3000)
        for port, address in (
            (3000, "127.0.0.1"),
            (3001, "10.177.0.2"),
            (3002, "0.0.0.0"),
            (3003, "localhost"),
            (3004, "::"),
        ):
            await host.guest(one).start(ExecSpec(["python3", "-m", "http.server", str(port), "--bind", address]))
            assert await answers(host, one, port), address
        child = Incarnation("child", 1)
        await host.fork(one, [child], {}, Network())
        assert await answers(host, child, 3000)

    on_a_host(body)


def test_a_connection_is_of_the_exec_that_made_it() -> None:
    async def body(host: LocalHost) -> None:
        one = await create(host)

        async def told(where: Incarnation, number: int) -> dict[str, Any]:
            said = await run(host, where, f"{SAY} 203.0.113.{number} 80", id=f"e{number}", trace_id=f"trace:{number}")
            found: dict[str, Any] = json.loads(said)
            assert found["to"] == f"203.0.113.{number}:80"
            assert (found["exec_id"], found["trace_id"]) == (f"e{number}", f"trace:{number}")
            assert found["process"] == "python3"
            return found

        await asyncio.gather(*(told(one, number) for number in range(1, 7)))
        child = Incarnation("child", 1)
        await host.fork(one, [child], {}, Network())
        await asyncio.gather(told(one, 11), told(child, 12), told(child, 13))
        await host.pause(one)
        await host.resume(one, one, Network())
        await told(one, 21)
        await host.pause(one)
        await host.cool(one)
        woken = await host.resume(one, Incarnation(one.sandbox_id, 2), Network())
        found = await told(woken, 22)
        print(f"asking for the owner took {found['ms']:.1f} ms")
        # What an exec left running is still its own.
        await run(host, woken, f"touch /root/later; (sleep 1; {SAY} 203.0.113.99 80 > /root/later) &", id="left")
        async with asyncio.timeout(30):
            while not (later := await run(host, woken, "cat /root/later")).strip():
                await asyncio.sleep(0.2)
        assert json.loads(later)["exec_id"] == "left"

    on_a_host(body)


def test_a_copys_old_connections_fail_at_once_and_the_parents_live_on() -> None:
    async def body(host: LocalHost) -> None:
        one = await create(host)
        await host.guest(one).start(ExecSpec(f"{SAY} 203.0.113.5 {KEPT_PORT}", id="reader"))
        assert len(await lines_of(host, one, "reader", 1)) == 1
        child = Incarnation("child", 1)
        await host.fork(one, [child], {}, Network())
        started = time.monotonic()
        assert (await lines_of(host, child, "reader", 2))[1:] == ["ConnectionAbortedError"]
        assert time.monotonic() - started < 2
        assert json.loads(await run(host, child, f"{SAY} 203.0.113.6 80"))["to"] == "203.0.113.6:80"
        assert len(await lines_of(host, one, "reader", 2, timeout_s=1)) == 1, "the parent waits on"
        await host.pause(one)
        await host.resume(one, one, Network())
        assert len(await lines_of(host, one, "reader", 2, timeout_s=1)) == 1, "a short sleep cuts nothing"
        await host.pause(one)
        await host.cool(one)
        woken = await host.resume(one, Incarnation(one.sandbox_id, 2), Network())
        started = time.monotonic()
        assert (await lines_of(host, woken, "reader", 2))[1:] == ["ConnectionAbortedError"]
        assert time.monotonic() - started < 2

    on_a_host(body)


def test_a_copys_old_connection_is_refused_when_it_is_used_whatever_its_agent_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Machine, "drop_old_connections", lambda _: None)
    talker = f"""
import socket, time
connection = socket.create_connection(("203.0.113.5", {KEPT_PORT}))
print("open", flush=True)
try:
    while True:
        connection.send(b"x")
        time.sleep(0.1)
except OSError as error:
    print(type(error).__name__, flush=True)
"""

    async def body(host: LocalHost) -> None:
        one = await create(host)
        await host.guest(one).start(ExecSpec(["python3", "-c", talker], id="talker"))
        assert await lines_of(host, one, "talker", 1) == ["open"]
        child = Incarnation("child", 1)
        await host.fork(one, [child], {}, Network())
        started = time.monotonic()
        assert (await lines_of(host, child, "talker", 2))[1:] in (["ConnectionResetError"], ["BrokenPipeError"])
        assert time.monotonic() - started < 2
        assert len(await lines_of(host, one, "talker", 2, timeout_s=1)) == 1, "the parent talks on"

    on_a_host(body)


def test_an_adopted_machine_reaches_nothing_until_it_is_said_what_it_may() -> None:
    async def body(host: LocalHost) -> None:
        one = await create(host)
        await host.guest(one).start(ExecSpec("python3 -m http.server 8000", id="server"))
        assert await answers(host, one, 8000)
        await host.stop()
        following = await new_host(host._settings)
        assert (await following.start()).adopted == {one}
        try:
            assert "Refused" in await run(following, one, f"{SAY} 203.0.113.5 80")
            assert await answers(following, one, 8000)
            await following.set_network(one, Network())
            assert json.loads(await run(following, one, f"{SAY} 203.0.113.5 80"))["to"] == "203.0.113.5:80"
        finally:
            await following.destroy(one)
            await following.stop()

    on_a_host(body)


def test_a_killed_daemon_finds_the_slots_of_its_machines_again(own_daemon: Daemon) -> None:
    def slots() -> set[str]:
        return {name for name in belongings(own_daemon) if name.startswith("slot ")}

    with own_daemon.client() as fy:
        sbx = fy.sandboxes.create(network={"egress": {"preset": "none"}})
        before = slots()
        assert len(before) == 1
        sbx.spawn(
            "while true; do curl -m 10 -sf -o /dev/null http://203.0.113.5/; echo $?; sleep 0.2; done > /root/codes"
        )
        own_daemon.kill()
        time.sleep(2)
        own_daemon.start()
        assert slots() == before
        sbx = fy.sandboxes.get(sbx.id)
        codes = sbx.files.read("/root/codes").split()
        assert len(codes) > 3
        assert "28" not in codes, "refused at once, daemon or not; never left to wait"
        assert "0" not in codes
        sbx.delete()
        assert not slots()
