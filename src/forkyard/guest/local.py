"""The agent as an ordinary process of this machine, behind a socket like a VM's: for tests, and for work on the agent.

Owns: that process, its cgroups, and a relay that behaves as QEMU's port does: one host at a time, bytes in order, cuts.
Never does: isolation. What runs "inside" runs here.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path
from types import TracebackType

_AGENT = Path(__file__).parent.parent / "guest_agent"
_CGROUP_ROOTS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))


class LocalAgent:
    """`async with LocalAgent(directory) as agent: guest = await connect(agent.socket, timeout_s=5)`

    `notice`: whether the agent is told when a host leaves, as a port of a running VM does; a machine restored from a
    snapshot is not. `cut_after`: so many bytes from the next host arrive; then it is gone, in the middle of whatever.
    """

    def __init__(self, directory: Path, front: Path | None = None) -> None:
        self._front = front
        self.socket = str(directory / "port.sock")
        self.notice = True
        self.cut_after: int | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.cgroups = next((root for root in _CGROUP_ROOTS if (root / "cgroup.procs").exists()), _CGROUP_ROOTS[1]) / (
            f"forkyard-{directory.name}"
        )
        self._agent_socket = str(directory / "agent.sock")
        self._servers: list[asyncio.Server] = []
        self._agent: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._agent_there = asyncio.Event()
        self._host: asyncio.StreamWriter | None = None
        self._turn = asyncio.Lock()
        self._relays: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LocalAgent:
        try:
            self._servers.append(await asyncio.start_unix_server(self._agent_came, self._agent_socket))
            self._servers.append(await asyncio.start_unix_server(self._host_came, self.socket))
            await self.start()
        except BaseException as error:  # whoever wanted it may go away meanwhile
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def start(self) -> None:
        channel = f"unix:{self._agent_socket}"
        self.process = await asyncio.create_subprocess_exec(
            *((str(self._front), channel) if self._front else ()),
            *(sys.executable, "-I", "-X", "utf8", str(_AGENT)),
            *(() if self._front else ("--channel", channel)),
            *("--cgroups", str(self.cgroups), "--console", "/dev/null"),
        )
        await self._agent_there.wait()

    async def kill(self) -> None:
        """As a guest that kills its agent; what it started goes on."""
        assert self.process is not None
        self._agent_there.clear()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            await self.kill()
        for server in self._servers:
            server.close()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)
        await asyncio.to_thread(_remove_cgroups, self.cgroups)

    async def _agent_came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._agent = reader, writer
        self._agent_there.set()
        self._keep(asyncio.current_task())
        try:
            while data := await reader.read(65_536):
                if self._agent != (reader, writer):
                    break  # a port has one stream: what came by an earlier connection is not mixed into the next
                if self._host is not None:
                    self._host.write(data)
                    await self._host.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _host_came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep(asyncio.current_task())
        async with self._turn:
            await self._agent_there.wait()
            self._host = writer
            try:
                await self._from_host(reader)
            except ConnectionError:
                pass
            finally:
                self._host = None
                writer.close()
            if self.notice and self._agent is not None:
                self._agent_there.clear()
                self._agent[1].close()

    async def _from_host(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65_536):
            if self.cut_after is not None:
                data, gone = data[: self.cut_after], len(data) >= self.cut_after
                self.cut_after -= len(data)
            else:
                gone = False
            assert self._agent is not None
            self._agent[1].write(data)
            await self._agent[1].drain()
            if gone:
                self.cut_after = None
                return

    def _keep(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)


def _remove_cgroups(root: Path) -> None:
    for child in root.glob("*/cgroup.kill"):
        with contextlib.suppress(OSError):
            child.write_text("1")
    for _ in range(100):
        for child in [*root.glob("*/"), root]:
            with contextlib.suppress(OSError):
                child.rmdir()
        if not root.exists():
            return
        time.sleep(0.02)  # killed processes leave their cgroup when they are reaped
