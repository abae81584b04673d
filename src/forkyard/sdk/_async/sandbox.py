"""One sandbox: its verbs."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from types import TracebackType
from typing import Self

from forkyard.lifecycle import State
from forkyard.models import ExecInfo, Page, SandboxInfo, SandboxLogs, SandboxUsage
from forkyard.sdk import validation, wire
from forkyard.sdk._async.execution import AsyncExecStream
from forkyard.sdk._async.files import AsyncFiles
from forkyard.sdk._async.process import AsyncProcess
from forkyard.sdk._async.terminal import AsyncTerminal
from forkyard.sdk._async.transport import AsyncTransport
from forkyard.sdk.results import DEFAULT_MAX_OUTPUT_BYTES, ExecResult


class AsyncSandbox:
    """A machine of your own. As a context manager it is deleted at the end of the block."""

    def __init__(self, transport: AsyncTransport, info: SandboxInfo) -> None:
        self._transport = transport
        self._path = f"/sandboxes/{info.id}"
        self.info = info
        """As the daemon last reported it; `refresh()` asks again."""
        self.files = AsyncFiles(transport, info.id)

    def __repr__(self) -> str:
        name = f", name={self.info.name!r}" if self.info.name else ""
        return f"{type(self).__name__}(id={self.id!r}{name}, state={self.state.value!r})"

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def name(self) -> str | None:
        return self.info.name

    @property
    def state(self) -> State:
        return self.info.state

    async def refresh(self) -> SandboxInfo:
        """Ask the daemon how it is; also sets `info`."""
        answer = await self._transport.request("GET", self._path)
        self.info = wire.parse(SandboxInfo, answer.content)
        return self.info

    async def delete(self) -> None:
        """End the machine and remove all it owns. Deleting it twice is fine."""
        await self._transport.request("DELETE", self._path)

    async def logs(self) -> SandboxLogs:
        """Milestones of its start, and the end of its console."""
        answer = await self._transport.request("GET", f"{self._path}/logs")
        return wire.parse(SandboxLogs, answer.content)

    async def usage(self) -> SandboxUsage:
        """Memory and processor time it takes from the host."""
        answer = await self._transport.request("GET", f"{self._path}/usage")
        return wire.parse(SandboxUsage, answer.content)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.delete()

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────

    async def exec(
        self,
        command: str | list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str = "root",
        timeout_s: float | None = None,
        stdin: str | bytes | None = None,
        label: str | None = None,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
        check: bool = False,
    ) -> ExecResult:
        """Run a command to its end. A string runs in `bash -c`, a list without a shell.

        After `timeout_s` the whole process tree is killed and `timed_out` is set. Of each stream the first
        `max_output_bytes` are kept. A non-zero exit code is data; `check=True` raises `CommandFailed` instead.
        """
        stream = self.exec_stream(command, cwd=cwd, env=env, user=user, timeout_s=timeout_s, stdin=stdin, label=label)
        result = await stream.collect(max_output_bytes)
        return result.check() if check else result

    def exec_stream(
        self,
        command: str | list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str = "root",
        timeout_s: float | None = None,
        stdin: str | bytes | AsyncIterable[bytes] | Iterable[bytes] | None = None,
        label: str | None = None,
    ) -> AsyncExecStream:
        """Run a command and iterate over its output as it comes; then the stream's `exit_code` is set.

        `stdin` may be an iterable of pieces; it is advanced while the command runs.
        """
        create = validation.exec_create(
            command=command,
            cwd=cwd,
            env=env or {},
            user=user,
            timeout_s=timeout_s,
            stdin=stdin is not None,
            label=label,
        )
        data = stdin.encode() if isinstance(stdin, str) else stdin
        return AsyncExecStream(self._transport, self.id, create=create, stdin=data)

    async def spawn(
        self,
        command: str | list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str = "root",
        timeout_s: float | None = None,
        stdin: bool = False,
        pty: bool = False,
        rows: int = 24,
        cols: int = 80,
        label: str | None = None,
    ) -> AsyncProcess:
        """Start a command and leave it running. It outlives client and daemon; `process(id)` finds it again."""
        create = validation.exec_create(
            command=command,
            cwd=cwd,
            env=env or {},
            user=user,
            timeout_s=timeout_s,
            stdin=stdin,
            pty=pty,
            rows=rows,
            cols=cols,
            label=label,
        )
        answer = await self._transport.request(
            "POST", f"{self._path}/execs", body=create.model_dump(exclude_defaults=True)
        )
        info = wire.parse(ExecInfo, answer.content)
        return AsyncProcess(self._transport, self.id, info.id, info)

    async def execs(self) -> list[ExecInfo]:
        """All commands of this sandbox that run, or ended not long ago."""
        answer = await self._transport.request("GET", f"{self._path}/execs")
        return wire.parse(Page[ExecInfo], answer.content).items

    def process(self, exec_id: str) -> AsyncProcess:
        """A command that was started before, maybe by another client."""
        return AsyncProcess(self._transport, self.id, exec_id)

    def terminal(
        self,
        command: str | None = None,
        *,
        user: str | None = None,
        cwd: str | None = None,
        rows: int = 24,
        cols: int = 80,
        exec_id: str | None = None,
        offset: int = 0,
    ) -> AsyncTerminal:
        """A terminal: a login shell, a command, or (`exec_id`) the terminal of an exec that runs already.

        To attach again after a broken connection, give the `exec_id` and the `offset` of the terminal that broke.
        """
        params = {"command": command, "user": user, "cwd": cwd, "rows": rows, "cols": cols, "exec_id": exec_id}
        return AsyncTerminal(self._transport, self.id, params, offset)
