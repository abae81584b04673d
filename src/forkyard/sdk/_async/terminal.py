"""A terminal in a sandbox, over a web socket: bytes both ways, window size, signals, and how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from websockets.exceptions import ConnectionClosed

from forkyard.errors import Conflict, DaemonUnreachable, OperationTimeout, from_problem
from forkyard.models import ExecExit
from forkyard.sdk import wire
from forkyard.sdk._async import runtime
from forkyard.sdk._async.transport import AsyncTransport


class AsyncTerminal:
    """Use it as a context manager; iterate it for what the terminal prints. Leaving the block detaches."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str, params: dict[str, Any], offset: int = 0) -> None:
        self._transport = transport
        self._path = f"/sandboxes/{sandbox_id}/terminal"
        self._params = params
        self._socket: runtime.Connection | None = None
        self._seen = offset
        self._position = 0
        self._rest = b""
        self.exec_id: str | None = None
        self.end: ExecExit | None = None

    async def open(self) -> Self:
        self._socket = await self._transport.websocket(self._path, self._params)
        try:
            first = await self._socket.recv()
            self._control(first if isinstance(first, str) else first.decode("utf-8", "replace"))
        except ConnectionClosed as exc:
            raise DaemonUnreachable("The daemon closed the terminal before it had started.") from exc
        except BaseException:
            await self.aclose()
            raise
        return self

    async def send(self, data: bytes) -> None:
        """What was typed."""
        await self._send(data)

    async def resize(self, rows: int, cols: int) -> None:
        await self._send(json.dumps({"type": "resize", "rows": rows, "cols": cols}))

    async def signal(self, signal: int) -> None:
        await self._send(json.dumps({"type": "signal", "signal": signal}))

    @property
    def offset(self) -> int:
        """Bytes printed so far: what to attach again from, should the connection break."""
        return self._seen

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Until the process ends; `end` says how. `DaemonUnreachable` if the connection breaks before that."""
        while (data := await self.read()) is not None:
            yield data

    async def read(self, timeout_s: float | None = None) -> bytes | None:
        """What was printed next; None at the end. `OperationTimeout` if nothing comes in time."""
        if self._rest:
            data, self._rest = self._rest, b""
            return data
        while self.end is None:
            try:
                message = await runtime.receive(self._opened(), timeout_s)
            except ConnectionClosed as exc:
                raise DaemonUnreachable(f"The connection to the terminal broke (exec {self.exec_id}).") from exc
            except TimeoutError as exc:
                raise OperationTimeout(f"The terminal printed nothing for {timeout_s} s.") from exc
            if isinstance(message, str):
                self._control(message)
            elif fresh := self._fresh(message):
                return fresh
        return None

    async def read_until(self, text: bytes, timeout_s: float | None = None) -> bytes:
        """All that is printed up to and including `text`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        printed = b""
        while (found := printed.find(text)) < 0:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                data = await self.read(left_s)
            except OperationTimeout:
                raise OperationTimeout(
                    f"The terminal did not print {text!r} in {timeout_s} s: {printed[-500:]!r}"
                ) from None
            if data is None:
                raise Conflict(f"The terminal ended and did not print {text!r}: {printed[-500:]!r}")
            printed += data
        end = found + len(text)
        self._rest = printed[end:] + self._rest
        return printed[:end]

    async def aclose(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _opened(self) -> runtime.Connection:
        if self._socket is None:
            raise DaemonUnreachable("This terminal is not open. Use it as a context manager.")
        return self._socket

    async def _send(self, message: bytes | str) -> None:
        try:
            await self._opened().send(message)
        except ConnectionClosed as exc:
            raise DaemonUnreachable(f"The connection to the terminal broke (exec {self.exec_id}).") from exc

    def _fresh(self, data: bytes) -> bytes:
        """Attaching replays from the beginning: leave out what was printed already."""
        begin, self._position = self._position, self._position + len(data)
        fresh = data[max(0, self._seen - begin) :]
        self._seen = max(self._seen, self._position)
        return fresh

    def _control(self, text: str) -> None:
        message = wire.json_object(text)
        match message.get("type"):
            case "started":
                self.exec_id = str(message.get("exec_id"))
            case "lost":
                self._position = int(message["offset"]) + int(message["bytes"])
                self._seen = max(self._seen, self._position)
            case "exit":
                self.end = ExecExit.model_validate(message)
            case "error":
                raise from_problem(message.get("problem") or {})
