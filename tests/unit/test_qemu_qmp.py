"""The QMP client against a scripted QEMU."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forkyard.errors import HostFailure, OperationTimeout, VmCrashed
from forkyard.vmm.qemu.qmp import MAX_MESSAGE_BYTES, Event, Qmp

GREETING = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}}, "capabilities": ["oob"]}}
Script = Callable[["FakeQemu"], Awaitable[None]]


class FakeQemu:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = b""
        self.received_fds: list[int] = []

    async def say(self, *messages: dict[str, Any] | bytes) -> None:
        loop = asyncio.get_running_loop()
        for message in messages:
            raw = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\r\n"
            await loop.sock_sendall(self.connection, raw)

    async def hear(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        while b"\n" not in self.buffer:
            readable = asyncio.Event()
            loop.add_reader(self.connection, readable.set)
            await readable.wait()
            loop.remove_reader(self.connection)
            data, ancillary, _, _ = self.connection.recvmsg(65536, socket.CMSG_SPACE(16))
            if not data:
                raise ConnectionResetError
            for _level, _kind, payload in ancillary:
                fds = array.array("i")
                fds.frombytes(payload)
                self.received_fds += fds
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return dict(json.loads(line))

    async def negotiate(self) -> None:
        await self.say(GREETING)
        command = await self.hear()
        assert command["execute"] == "qmp_capabilities"
        await self.say({"return": {}, "id": command["id"]})


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fyq-") as directory:
        yield Path(directory, "qmp.sock")


@contextlib.asynccontextmanager
async def qemu(path: Path, script: Script) -> AsyncIterator[None]:
    """A QEMU that does what `script` says with its next client, and hangs up."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)

        async def serve() -> None:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            with connection:
                await script(FakeQemu(connection))

        task = asyncio.create_task(serve())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await task


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await body()

    asyncio.run(bounded())


def test_answers_find_their_command_even_out_of_order(path: Path) -> None:
    async def script(qemu: FakeQemu) -> None:
        await qemu.negotiate()
        first, second = await qemu.hear(), await qemu.hear()
        await qemu.say(
            {"return": second["execute"], "id": second["id"]}, {"return": first["execute"], "id": first["id"]}
        )
        await qemu.hear()

    async def body() -> None:
        async with qemu(path, script):
            client = await Qmp.connect(path)
            assert await asyncio.gather(client.execute("one"), client.execute("two")) == ["one", "two"]
            await client.aclose()

    run(body)


def test_a_file_descriptor_travels_with_its_command(path: Path) -> None:
    async def script(qemu: FakeQemu) -> None:
        await qemu.negotiate()
        command = await qemu.hear()
        assert command["arguments"] == {"fdname": "state"}
        os.write(qemu.received_fds[0], b"hello")
        os.close(qemu.received_fds[0])
        await qemu.say({"return": {}, "id": command["id"]})

    async def body() -> None:
        readable, writable = os.pipe()
        async with qemu(path, script):
            client = await Qmp.connect(path)
            await client.execute("getfd", fds=[writable], fdname="state")
            await client.aclose()
        os.close(writable)
        assert os.read(readable, 100) == b"hello"
        os.close(readable)

    run(body)


def test_a_refused_command_says_why_and_leaves_the_connection_usable(path: Path) -> None:
    async def script(qemu: FakeQemu) -> None:
        await qemu.negotiate()
        command = await qemu.hear()
        await qemu.say({"error": {"class": "GenericError", "desc": "no such device"}, "id": command["id"]})
        command = await qemu.hear()
        await qemu.say({"return": 1, "id": command["id"]})

    async def body() -> None:
        async with qemu(path, script):
            client = await Qmp.connect(path)
            with pytest.raises(HostFailure, match="no such device"):
                await client.execute("ringbuf-read")
            assert await client.execute("again") == 1
            await client.aclose()

    run(body)


def test_events_reach_the_listener_and_whoever_expects_them(path: Path) -> None:
    async def script(qemu: FakeQemu) -> None:
        await qemu.negotiate()
        await qemu.hear()
        await qemu.say(
            {"event": "MIGRATION", "data": {"status": "active"}},
            {"event": "RESUME"},
            {"event": "MIGRATION", "data": {"status": "completed"}},
        )
        await qemu.hear()

    async def body() -> None:
        seen: list[Event] = []
        async with qemu(path, script):
            client = await Qmp.connect(path, seen.append)
            completed = client.expect(lambda event: event.data.get("status") == "completed")
            asking = asyncio.create_task(client.execute("migrate-incoming"))
            assert await completed == Event("MIGRATION", {"status": "completed"})
            assert [event.name for event in seen] == ["MIGRATION", "RESUME", "MIGRATION"]
            await client.aclose()
            with pytest.raises(VmCrashed):
                await asking

    run(body)


def test_a_qemu_that_goes_away_fails_everything_that_waits(path: Path) -> None:
    async def script(qemu: FakeQemu) -> None:
        await qemu.negotiate()
        await qemu.hear()

    async def body() -> None:
        async with qemu(path, script):
            client = await Qmp.connect(path)
            never = client.expect(lambda _: False)
            with pytest.raises(VmCrashed, match="closed the connection"):
                await client.execute("cont")
            with pytest.raises(VmCrashed):
                await never
            assert client.closed
            with pytest.raises(VmCrashed, match="cannot run stop"):
                await client.execute("stop")
            await client.aclose()

    run(body)


def test_a_qemu_that_hangs_does_not_hang_us(path: Path) -> None:
    async def silent(qemu: FakeQemu) -> None:
        await qemu.negotiate()
        await asyncio.sleep(60)

    async def body() -> None:
        async with qemu(path, silent):
            client = await Qmp.connect(path)
            with pytest.raises(OperationTimeout, match="query-status"):
                await client.execute("query-status", timeout_s=0.05)
            await client.aclose()

    run(body)


def test_no_greeting_in_time_is_a_timeout(path: Path) -> None:
    async def mute(qemu: FakeQemu) -> None:
        await asyncio.sleep(60)

    async def body() -> None:
        async with qemu(path, mute):
            with pytest.raises(OperationTimeout):
                await Qmp.connect(path, timeout_s=0.05)

    run(body)


@pytest.mark.parametrize(
    "garbage", [b"not json\r\n", b"[1, 2]\r\n", b'{"neither": 1}\r\n', b"x" * (MAX_MESSAGE_BYTES + 70_000)]
)
def test_a_qemu_that_talks_nonsense_is_cut_off(path: Path, garbage: bytes) -> None:
    async def script(qemu: FakeQemu) -> None:
        await qemu.negotiate()
        await qemu.hear()
        await qemu.say(garbage)
        await asyncio.sleep(60)

    async def body() -> None:
        async with qemu(path, script):
            client = await Qmp.connect(path)
            with pytest.raises(VmCrashed, match="not QMP"):
                await client.execute("cont")
            await client.aclose()

    run(body)


def test_nobody_there_is_a_vm_that_is_gone(path: Path) -> None:
    async def body() -> None:
        with pytest.raises(VmCrashed, match="the VM is gone"):
            await Qmp.connect(path)

    run(body)
