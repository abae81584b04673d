"""A daemon for tests of the SDK and the command line: the real API over real sockets, without VMs.

Each sandbox is the real guest agent as a process of this machine, so commands, terminals and files are real too. (They
run as this user on this machine: tests stay below their own temporary directory.) `restart` breaks every connection
and leaves the agents running, as a killed daemon does.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from forkyard.api.app import create_app
from forkyard.builds.builds import Builds
from forkyard.builds.runs import Runs
from forkyard.builds.schedules import Schedules
from forkyard.compat.e2b.facade import E2b
from forkyard.compat.freestyle.facade import Freestyle
from forkyard.control.plane import ControlPlane
from forkyard.dev.actions import dev_servers
from forkyard.gateway.preview import Gateway
from forkyard.git.automation import Outward
from forkyard.git.hosting import GitHosting
from forkyard.guest.base import ExecSpec, Guest
from forkyard.guest.client import connect
from forkyard.guest.local import LocalAgent
from forkyard.hosts.base import Created, CreateSpec, Incarnation
from forkyard.hosts.memory import MemoryHost, Power
from forkyard.store.sql import Store

T = TypeVar("T")


def _add_env(guest: Guest, env: Mapping[str, str]) -> None:
    """As the identity of a machine does. An agent on this machine must not be given one: it would set its clock."""

    def added(spec: ExecSpec) -> ExecSpec:
        return replace(spec, env={**env, **spec.env})

    execute, start = guest.execute, guest.start
    setattr(guest, "execute", lambda spec: execute(added(spec)))  # noqa: B010
    setattr(guest, "start", lambda spec: start(added(spec)))  # noqa: B010


class AgentHost(MemoryHost):
    """Machines that are an agent process each. A copy of one is a new agent: memory is the VM tier's to test."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._guests: dict[Incarnation, Guest] = {}
        self._agents: dict[Guest, contextlib.AsyncExitStack] = {}
        super().__init__(lambda incarnation, _spec: self._guests[incarnation])

    async def create(self, incarnation: Incarnation, spec: CreateSpec) -> Created:
        self._guests[incarnation] = await self._start(spec)
        return await super().create(incarnation, spec)

    async def destroy(self, incarnation: Incarnation) -> None:
        machine = self.world.machines.get(incarnation)
        await super().destroy(incarnation)
        if machine is not None:
            await self._end(machine.guest)

    async def cool(self, incarnation: Incarnation) -> None:
        """The agent goes on as it is; nobody can reach it meanwhile."""
        await self._step("cool", incarnation)
        self._in_power(incarnation, Power.HOT, Power.COLD).power = Power.COLD

    async def stop(self, *, destroy: bool = False) -> None:
        await super().stop(destroy=destroy)
        for guest in list(self._agents) if destroy else []:
            await self._end(guest)

    async def copy_guest(self, incarnation: Incarnation, spec: CreateSpec, source: Guest, *, memory: bool) -> Guest:
        # A snapshot keeps the machine itself; what is restored from it is new in any case.
        return source if incarnation in self.world.machines else await self._start(spec)

    async def _start(self, spec: CreateSpec) -> Guest:
        async with contextlib.AsyncExitStack() as stack:
            directory = Path(tempfile.mkdtemp(dir=self._root))
            agent = await stack.enter_async_context(LocalAgent(directory))
            guest = await connect(agent.socket, timeout_s=20)
            _add_env(guest, spec.env)
            self._agents[guest] = stack.pop_all()
        return guest

    async def _end(self, guest: Guest) -> None:
        if guest in self._agents:
            await guest.aclose()
            await self._agents.pop(guest).aclose()


class Daemon:
    def __init__(self, root: Path, outward: Outward | None = None) -> None:
        self.root = root
        self.socket = root / "run" / "api.sock"
        self.key_file = root / "state" / "api-key"
        self.port = 0
        self.host = AgentHost(root)
        self.outward = outward
        for directory in (self.socket.parent, self.key_file.parent):
            directory.mkdir()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        return self.key_file.read_text().strip()

    @property
    def env(self) -> dict[str, str]:
        """For a program that shall find this daemon as that of its machine."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FORKYARD_")}
        return {
            **clean,
            "FORKYARD_STATE_DIR": str(self.key_file.parent),
            "FORKYARD_RUN_DIR": str(self.socket.parent),
        }

    def cli(self, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
        given = {"capture_output": True, "text": True, "timeout": 60, "stdin": None, **options}
        if "input" in given:
            del given["stdin"]
        return subprocess.run([sys.executable, "-m", "forkyard.cli", *args], env=self.env, **given)

    def start(self) -> None:
        self._thread.start()
        self._run(self._start())

    def stop(self) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def break_connections(self) -> None:
        """As a network that goes away for a moment."""
        self._run(self._break())

    def restart(self, down_s: float = 0.2) -> None:
        async def again() -> None:
            await self._close()
            await asyncio.sleep(down_s)
            await self._listen()

        self._run(again())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=60)

    async def _start(self) -> None:
        self._store = await Store.open(self.root / "state" / "forkyard.db")
        self._control = ControlPlane(self._store, self.host)
        await self._control.start()
        await self._control.keys.ensure_file(self.key_file)
        self.hosting = GitHosting(
            self._store,
            self._control.identities,
            self.root / "state" / "git",
            control=self._control,
            outward=self.outward,
        )
        await self.hosting.start()
        self.builds = Builds(self._control, self.root / "state" / "builds")
        await self.builds.start()
        self.runs = Runs(self._control, self.builds)
        self.schedules = Schedules(self._control, self.runs)
        await self.runs.start()
        await self.schedules.start()
        self._stack = contextlib.AsyncExitStack()
        self.dev_servers = await self._stack.enter_async_context(dev_servers(self._control, self.hosting, self.builds))
        await self._listen()
        self.hosting.url = self.url

    async def _listen(self) -> None:
        tcp = socket.create_server(("127.0.0.1", self.port))
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = tcp.getsockname()[1]
        self.socket.unlink(missing_ok=True)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(str(self.socket))
        app = create_app(
            self._control,
            hosting=self.hosting,
            builds=self.builds,
            dev_servers=self.dev_servers,
            runs=self.runs,
            schedules=self.schedules,
        )
        self._gateway = gateway = Gateway(app, self._control)
        self._freestyle = Freestyle(gateway, self._control, self.hosting, self.builds, self.runs, self.schedules)
        self._e2b = E2b(self._freestyle, self._control, self.builds, default_user=getpass.getuser())
        gateway.told_as = self._e2b.told_as
        config = uvicorn.Config(
            self._e2b,
            log_level="error",
            lifespan="off",
            ws="websockets-sansio",
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[tcp, unix]))
        while not self._server.started:
            await asyncio.sleep(0.005)

    async def _break(self) -> None:
        assert self._server is not None
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def _close(self) -> None:
        assert self._server is not None
        assert self._serving is not None
        self._server.should_exit = self._server.force_exit = True
        await self._break()
        await self._serving
        self._gateway.close()
        await self._e2b.aclose()
        await self._freestyle.aclose()

    async def _stop(self) -> None:
        await self._close()
        await self.schedules.stop()
        await self._stack.aclose()
        await self.builds.stop()
        await self.hosting.stop()
        await self._control.stop(destroy=True)
        await self._store.close()


D = TypeVar("D", bound=Daemon)


@contextlib.contextmanager
def running_daemon(outward: Outward | None = None, *, of: type[D] = Daemon) -> Iterator[D]:  # type: ignore[assignment]
    # Not below pytest's directory: the path of a unix socket has at most 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="fysdk-"))
    daemon = of(root, outward)
    try:
        daemon.start()
        yield daemon
        daemon.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)
