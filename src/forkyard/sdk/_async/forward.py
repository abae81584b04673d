"""A local port that leads to a port of a sandbox, through the daemon: works from wherever the API can be reached."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Self

from websockets.exceptions import ConnectionClosed

from forkyard.errors import DaemonUnreachable, ForkyardError, from_problem
from forkyard.sdk import wire
from forkyard.sdk._async import runtime
from forkyard.sdk._async.transport import AsyncTransport


class AsyncForward:
    """Use it as a context manager. A connection to `host`:`port` wakes the sandbox if it sleeps."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str, guest_port: int, local_port: int, host: str) -> None:
        self._transport = transport
        self._path = f"/sandboxes/{sandbox_id}/ports/{guest_port}"
        self._wanted_port = local_port
        self._listener: runtime.Listener | None = None
        self.host = host
        self.error: ForkyardError | None = None
        """Why the last connection that failed did: nothing listens there, say."""

    @property
    def port(self) -> int:
        """The local one."""
        return self._opened().port

    async def open(self) -> Self:
        self._listener = await runtime.listen(self.host, self._wanted_port, self._serve)
        return self

    async def wait(self) -> None:
        """Until it is closed."""
        await self._opened().wait()

    async def aclose(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _opened(self) -> runtime.Listener:
        if self._listener is None:
            raise ForkyardError("This forward is not open. Use it as a context manager.")
        return self._listener

    async def _serve(self, local: runtime.Pipe) -> None:
        try:
            remote = await self._transport.websocket(self._path, {})
            try:
                await self._first(remote)
                up = runtime.Job(lambda: self._up(local, remote))
                try:
                    await self._down(local, remote)
                finally:
                    await remote.close()
                    await local.aclose()
                    await up.finish()
            finally:
                await remote.close()
        except ConnectionClosed:
            self.error = DaemonUnreachable("The connection to the daemon broke.")
        except ForkyardError as error:
            self.error = error
        finally:
            await local.aclose()

    async def _first(self, remote: runtime.Connection) -> None:
        message = await runtime.receive(remote, wire.ANSWER_S)
        if not self._is(message, "open"):
            raise DaemonUnreachable(f"The daemon began with {message[:80]!r}. Is this a Forkyard daemon?")

    async def _up(self, local: runtime.Pipe, remote: runtime.Connection) -> None:
        while data := await local.read():
            await remote.send(data)
        await remote.send(json.dumps({"type": "end"}))

    async def _down(self, local: runtime.Pipe, remote: runtime.Connection) -> None:
        while True:
            message = await runtime.receive(remote, None)
            if isinstance(message, bytes):
                await local.write(message)
            elif self._is(message, "end"):
                return

    def _is(self, message: bytes | str, kind: str) -> bool:
        if isinstance(message, bytes):
            return False
        frame = wire.json_object(message)
        if frame.get("type") == "error":
            raise from_problem(frame.get("problem") or {})
        return frame.get("type") == kind
