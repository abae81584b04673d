"""The few things that asyncio and threads do differently. Written by hand, like its counterpart `_async/runtime.py`."""

from __future__ import annotations

import contextlib
import socket as socketlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeAlias, TypeVar

import httpcore
import httpx
from websockets.sync.client import ClientConnection, connect, unix_connect

from forkyard.errors import Conflict

P = ParamSpec("P")
T = TypeVar("T")

#: A generator that can be closed early.
Flow: TypeAlias = Generator[T, None, None]

#: As many streams at once as the caller likes.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)

Lock = threading.Lock
sleep = time.sleep
Connection = ClientConnection


def blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


class Job:
    """Something that goes on beside us."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True, name="forkyard-job")
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self._function()

    def finish(self) -> None:
        """A thread cannot be cancelled: one that still waits ends by itself as soon as the daemon answers it."""
        self._thread.join(timeout=0.1)


def body(chunks: Iterable[bytes]) -> Iterator[bytes]:
    yield from chunks


def pieces(content: bytes) -> Iterator[bytes]:
    """httpcore copies the rest of a buffer after every send: 64 MB at once took ten times as long as in pieces."""
    size = 256 * 1024
    return (content[start : start + size] for start in range(0, len(content), size))


class _Backend(httpcore.SyncBackend):
    """Knocks first: httpcore forgets to close the socket of a connection that is refused."""

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        try:
            with socketlib.socket(socketlib.AF_UNIX) as knock:
                knock.settimeout(timeout)
                knock.connect(path)
        except OSError as exc:
            raise httpcore.ConnectError(str(exc)) from exc
        return super().connect_unix_socket(path, timeout, socket_options)


class _UnixTransport(httpx.HTTPTransport):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._pool = httpcore.ConnectionPool(
            uds=str(path),
            max_connections=LIMITS.max_connections,
            max_keepalive_connections=LIMITS.max_keepalive_connections,
            network_backend=_Backend(),
        )


def unix_transport(path: Path) -> httpx.BaseTransport:
    return _UnixTransport(path)


def receive(connection: ClientConnection, timeout_s: float | None) -> bytes | str:
    """Raises TimeoutError."""
    return connection.recv(timeout=timeout_s)


def open_websocket(
    url: str, *, socket: Path | None, headers: dict[str, str], use_proxy: bool, timeout_s: float
) -> ClientConnection:
    # Entered like a context manager because newer `websockets` wants it so; whoever gets the connection closes it.
    if socket is not None:
        return unix_connect(
            str(socket), uri=url, additional_headers=headers, open_timeout=timeout_s, max_size=None
        ).__enter__()
    return connect(
        url,
        additional_headers=headers,
        open_timeout=timeout_s,
        max_size=None,
        proxy=True if use_proxy else None,
    ).__enter__()


class Pipe:
    """A connection somebody made to our `Listener`."""

    def __init__(self, connection: socketlib.socket) -> None:
        self._connection = connection

    def read(self) -> bytes:
        """Empty at the end."""
        try:
            return self._connection.recv(262_144)
        except OSError:
            return b""

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(data)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socketlib.SHUT_RDWR)  # wakes a thread that reads from it
        self._connection.close()


class Listener:
    """A local port; see `listen`."""

    def __init__(self, server: socketlib.socket, serve: Callable[[Pipe], None]) -> None:
        self._server = server
        self._serve = serve
        self._pipes: set[Pipe] = set()
        self._closed = threading.Event()
        self.port: int = server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True, name="forkyard-listener")
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            pipe = Pipe(connection)
            self._pipes.add(pipe)
            threading.Thread(target=self._run, args=(pipe,), daemon=True, name="forkyard-forward").start()

    def _run(self, pipe: Pipe) -> None:
        try:
            self._serve(pipe)
        finally:
            self._pipes.discard(pipe)

    def wait(self) -> None:
        self._closed.wait()

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socketlib.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()
        self._thread.join(timeout=1)
        for pipe in list(self._pipes):
            pipe.close()


def listen(host: str, port: int, serve: Callable[[Pipe], None]) -> Listener:
    try:
        server = socketlib.create_server((host, port), family=socketlib.AF_INET6 if ":" in host else socketlib.AF_INET)
    except OSError as exc:
        raise Conflict(f"Cannot listen on {host}:{port}: {exc.strerror}. Choose another local port.") from exc
    return Listener(server, serve)
