"""A process in a sandbox that this client did not wait for. It belongs to the sandbox and outlives the connection."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, Iterable

from forkyard.models import ExecInfo
from forkyard.sdk import wire
from forkyard.sdk._async import runtime
from forkyard.sdk._async.execution import AsyncExecStream
from forkyard.sdk._async.transport import AsyncTransport
from forkyard.sdk.results import DEFAULT_MAX_OUTPUT_BYTES, ExecResult


class AsyncProcess:
    """One exec of a sandbox, known by its `id`."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str, exec_id: str, info: ExecInfo | None = None) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._path = f"/sandboxes/{sandbox_id}/execs/{wire.segment(exec_id)}"
        self._info = info
        self.id = exec_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id!r}, sandbox_id={self._sandbox_id!r})"

    async def info(self) -> ExecInfo:
        """What is known of it now: whether it runs, its pid, its exit code, how much it printed."""
        answer = await self._transport.request("GET", self._path)
        self._info = wire.parse(ExecInfo, answer.content)
        return self._info

    async def wait(
        self, timeout_s: float | None = None, *, max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES, check: bool = False
    ) -> ExecResult:
        """Wait for its end; gives its exit code and the output that is still kept.

        After `timeout_s` it raises `OperationTimeout` and the process goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        stream = AsyncExecStream(self._transport, self._sandbox_id, exec_id=self.id, deadline=deadline)
        result = await stream.collect(max_output_bytes)
        return result.check() if check else result

    def output(self, *, stdout_offset: int = 0, stderr_offset: int = 0) -> AsyncExecStream:
        """Its output from these offsets on, then what comes, until it ends."""
        return AsyncExecStream(
            self._transport,
            self._sandbox_id,
            exec_id=self.id,
            stdout_offset=stdout_offset,
            stderr_offset=stderr_offset,
        )

    async def signal(self, signal: int = 15, *, tree: bool = True) -> None:
        """Send a signal to it and all it started; `tree=False`: to it alone."""
        await self._transport.request("POST", f"{self._path}/signal", body={"signal": signal, "tree": tree})

    async def kill(self) -> None:
        """End it and all it started at once (SIGKILL)."""
        await self.signal(9)

    async def write_stdin(self, data: str | bytes) -> None:
        """Write to its standard input (it was started with `stdin=True`). Waits while the process reads slowly."""
        content = data.encode() if isinstance(data, str) else data
        await self._transport.request("POST", f"{self._path}/stdin", content=content, timeout_s=None)

    async def write_stdin_stream(self, chunks: AsyncIterable[bytes] | Iterable[bytes], *, close: bool = True) -> None:
        """Write pieces as they come; at the end close its input unless told otherwise."""
        async for chunk in runtime.body(chunks):
            await self.write_stdin(chunk)
        if close:
            await self.close_stdin()

    async def close_stdin(self) -> None:
        """Let it see the end of its input."""
        await self._transport.request(
            "POST", f"{self._path}/stdin", params={"close": True}, content=b"", timeout_s=wire.ANSWER_S
        )

    async def resize(self, rows: int, cols: int) -> None:
        """Tell its terminal (`pty=True`) how big the window is."""
        await self._transport.request("POST", f"{self._path}/resize", body={"rows": rows, "cols": cols}, again=True)
