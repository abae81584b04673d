"""The API over a host that is only memory: in process through ASGI, and served by uvicorn where streaming matters."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from forkyard import Forkyard
from forkyard.api.app import create_app
from forkyard.builds.builds import Builds
from forkyard.builds.runs import Runs
from forkyard.builds.schedules import Schedules
from forkyard.control.plane import ControlPlane
from forkyard.dev.actions import dev_servers
from forkyard.errors import ExecNotFound, FileMissing, ForkyardError
from forkyard.git.hosting import GitHosting
from forkyard.guest.base import ExecSpec, Exit, Lost, Output
from forkyard.guest.fake import FakeGuest
from forkyard.host.templates import AGENT_DIR
from forkyard.hosts.memory import MemoryHost
from forkyard.images import ensure_program
from forkyard.models import WatchEvent
from forkyard.store.sql import Store
from forkyard.vmm.base import FaultPlan

from .sdk_daemon import Daemon, running_daemon

JSON = {"Content-Type": "application/json"}
Item = Output | Lost | Exit | bytes | WatchEvent | ForkyardError | None


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """The real API over real sockets, with agents on this host for machines."""
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def fy(daemon: Daemon) -> Iterator[Forkyard]:
    with Forkyard(socket=daemon.socket, key_file=daemon.key_file) as client:
        yield client


@pytest.fixture(params=["agent", "front"])
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The agent alone, or behind its front as in a guest: nobody can tell."""
    if request.param == "agent":
        return None
    return ensure_program(AGENT_DIR / "front.c", tmp_path_factory.getbasetemp())


class Script:
    """A stream that a test feeds by hand. An error is raised to the reader, None ends it."""

    def __init__(self, name: str) -> None:
        self.id = name
        self.pid = 7
        self.attached = 0
        self.detached = asyncio.Event()
        self._items: asyncio.Queue[Item] = asyncio.Queue()

    def feed(self, *items: Item) -> Script:
        for item in items:
            self._items.put_nowait(item)
        return self

    async def __aiter__(self) -> AsyncIterator[Item]:
        while (item := await self._items.get()) is not None:
            if isinstance(item, ForkyardError):
                raise item
            yield item

    @contextlib.asynccontextmanager
    async def attach(self) -> AsyncIterator[Script]:
        self.attached += 1
        try:
            yield self
        finally:
            self.attached -= 1
            self.detached.set()


class ScriptedGuest(FakeGuest):
    """Streams named by what they are of (a command, an exec id, a path) come from scripts; the rest is the fake's."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: dict[str, Script] = {}
        self.specs: list[ExecSpec] = []
        self.calls: list[tuple[object, ...]] = []
        self.called = asyncio.Event()

    def script(self, name: str) -> Script:
        return self.scripts.setdefault(name, Script(name))

    def _note(self, *call: object) -> None:
        self.calls.append(call)
        self.called.set()

    def execute(self, spec: ExecSpec):  # type: ignore[no-untyped-def]
        self.specs.append(spec)
        name = spec.command if isinstance(spec.command, str) else " ".join(spec.command)
        return self.scripts[name].attach() if name in self.scripts else super().execute(spec)

    def attach(self, exec_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0):  # type: ignore[no-untyped-def]
        self._note("attach", exec_id, stdout_offset, stderr_offset)
        if exec_id not in self.scripts:
            raise ExecNotFound(f"no exec {exec_id}")
        return self.scripts[exec_id].attach()

    async def write_stdin(self, exec_id: str, data: bytes, *, close: bool = False) -> None:
        self._note("stdin", exec_id, data, close)

    async def signal(self, exec_id: str, signal: int, *, tree: bool = True) -> None:
        self._note("signal", exec_id, signal, tree)

    async def resize(self, exec_id: str, rows: int, cols: int) -> None:
        self._note("resize", exec_id, rows, cols)

    def _stream(self, path: str):  # type: ignore[no-untyped-def]
        if path not in self.scripts:
            raise FileMissing(f"no {path}")

        @contextlib.asynccontextmanager
        async def opened() -> AsyncIterator[AsyncIterator[Item]]:
            async with self.scripts[path].attach() as script:
                yield aiter(script)

        return opened()

    def read_file(self, path: str, *, offset: int = 0, length: int | None = None):  # type: ignore[no-untyped-def]
        if path in self.scripts:
            return self._stream(path)
        return super().read_file(path, offset=offset, length=length)

    def watch(self, path: str, *, recursive: bool = False):  # type: ignore[no-untyped-def]
        return self._stream(path)


@dataclass
class World:
    """One daemon without a daemon."""

    control: ControlPlane
    host: MemoryHost
    app: FastAPI
    key: str
    client: httpx.AsyncClient
    guests: list[ScriptedGuest]

    async def sandbox(self) -> str:
        answer = await self.client.post("/sandboxes", json={})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextlib.asynccontextmanager
async def running_world(directory: Path) -> AsyncIterator[World]:
    guests: list[ScriptedGuest] = []

    def new_guest(*_: object) -> ScriptedGuest:
        guests.append(ScriptedGuest())
        return guests[-1]

    store = await Store.open(directory / "forkyard.db")
    host = MemoryHost(new_guest)
    control = ControlPlane(store, host)
    await control.start()
    key = (await control.keys.create("test")).key
    hosting = GitHosting(store, control.identities, directory / "git", control=control, url="http://127.0.0.1:7070")
    await hosting.start()
    builds = Builds(control, directory / "builds")
    await builds.start()
    runs = Runs(control, builds)
    parts: dict[str, Any] = {"hosting": hosting, "builds": builds, "runs": runs, "schedules": Schedules(control, runs)}
    async with dev_servers(control, hosting, builds) as servers:
        app = create_app(control, allowed_hosts=["forkyard.example"], dev_servers=servers, **parts)
        transport = httpx.ASGITransport(app)
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost:7070/api/v1", headers=headers
        ) as client:
            yield World(control, host, app, key, client, guests)
    host.faults = FaultPlan()
    await builds.stop()
    await hosting.stop()
    await control.stop(destroy=True)
    await store.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running_world(tmp_path) as world:
        yield world


@pytest.fixture
async def served(world: World, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The same app behind a real server on a unix socket. When the client leaves, no task of the server may be left."""
    socket = tmp_path / "api.sock"
    server = uvicorn.Server(
        uvicorn.Config(world.app, uds=str(socket), log_config=None, lifespan="off", timeout_graceful_shutdown=2)
    )
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    before = asyncio.all_tasks()
    async with httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=str(socket)),
        base_url="http://localhost/api/v1",
        headers={"Authorization": f"Bearer {world.key}"},
        timeout=10,
    ) as client:
        yield client
    async with asyncio.timeout(5):
        while {task for task in asyncio.all_tasks() - before if "TestRunner" not in repr(task.get_coro())}:
            await asyncio.sleep(0.005)
    server.should_exit = True
    await serving


def as_json(content: object) -> bytes:
    """Unlike httpx, which refuses lone surrogates."""
    return json.dumps(content).encode("ascii")
