# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""A local port that leads to a port of a sandbox, through the daemon: works from wherever the API can be reached."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Self

from websockets.exceptions import ConnectionClosed

from forkyard.errors import DaemonUnreachable, ForkyardError, from_problem
from forkyard.sdk import wire
from forkyard.sdk._sync import runtime
from forkyard.sdk._sync.transport import Transport


class Forward:
    """Use it as a context manager. A connection to `host`:`port` wakes the sandbox if it sleeps."""

    def __init__(self, transport: Transport, sandbox_id: str, guest_port: int, local_port: int, host: str) -> None:
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

    def open(self) -> Self:
        self._listener = runtime.listen(self.host, self._wanted_port, self._serve)
        return self

    def wait(self) -> None:
        """Until it is closed."""
        self._opened().wait()

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self) -> runtime.Listener:
        if self._listener is None:
            raise ForkyardError("This forward is not open. Use it as a context manager.")
        return self._listener

    def _serve(self, local: runtime.Pipe) -> None:
        try:
            remote = self._transport.websocket(self._path, {})
            try:
                self._first(remote)
                up = runtime.Job(lambda: self._up(local, remote))
                try:
                    self._down(local, remote)
                finally:
                    remote.close()
                    local.close()
                    up.finish()
            finally:
                remote.close()
        except ConnectionClosed:
            self.error = DaemonUnreachable("The connection to the daemon broke.")
        except ForkyardError as error:
            self.error = error
        finally:
            local.close()

    def _first(self, remote: runtime.Connection) -> None:
        message = runtime.receive(remote, wire.ANSWER_S)
        if not self._is(message, "open"):
            raise DaemonUnreachable(f"The daemon began with {message[:80]!r}. Is this a Forkyard daemon?")

    def _up(self, local: runtime.Pipe, remote: runtime.Connection) -> None:
        while data := local.read():
            remote.send(data)
        remote.send(json.dumps({"type": "end"}))

    def _down(self, local: runtime.Pipe, remote: runtime.Connection) -> None:
        while True:
            message = runtime.receive(remote, None)
            if isinstance(message, bytes):
                local.write(message)
            elif self._is(message, "end"):
                return

    def _is(self, message: bytes | str, kind: str) -> bool:
        if isinstance(message, bytes):
            return False
        frame = wire.json_object(message)
        if frame.get("type") == "error":
            raise from_problem(frame.get("problem") or {})
        return frame.get("type") == kind
