"""The few things that asyncio and threads do differently. `_sync/runtime.py` is its hand-written counterpart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeAlias, TypeVar

import httpx
from websockets.asyncio.client import ClientConnection, connect, unix_connect

from forkyard.errors import Conflict

P = ParamSpec("P")
T = TypeVar("T")

#: A generator that can be closed early.
Flow: TypeAlias = AsyncGenerator[T, None]

#: As many streams at once as the caller likes.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20)

Lock = asyncio.Lock
sleep = asyncio.sleep
Connection = ClientConnection


async def blocking(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call blocking code without blocking the loop."""
    return await asyncio.to_thread(function, *args, **kwargs)


class Job:
    """Something that goes on beside us."""

    def __init__(self, function: Callable[[], Awaitable[None]]) -> None:
        self._task = asyncio.ensure_future(function())

    async def finish(self) -> None:
        """End it."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # looked at, so that asyncio does not complain; its owner keeps what matters


async def body(chunks: AsyncIterable[bytes] | Iterable[bytes]) -> AsyncIterator[bytes]:
    """A request body. A plain iterable may read files, so it is advanced in a thread."""
    if isinstance(chunks, AsyncIterable):
        async for chunk in chunks:
            yield chunk
        return
    iterator = iter(chunks)
    while (piece := await asyncio.to_thread(next, iterator, None)) is not None:
        yield piece


def pieces(content: bytes) -> bytes:
    return content


def unix_transport(path: Path) -> httpx.AsyncBaseTransport:
    return httpx.AsyncHTTPTransport(uds=str(path), limits=LIMITS)


async def receive(connection: ClientConnection, timeout_s: float | None) -> bytes | str:
    """Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        return await connection.recv()


async def open_websocket(
    url: str, *, socket: Path | None, headers: dict[str, str], use_proxy: bool, timeout_s: float
) -> ClientConnection:
    if socket is not None:
        return await unix_connect(
            str(socket), uri=url, additional_headers=headers, open_timeout=timeout_s, max_size=None
        )
    return await connect(
        url,
        additional_headers=headers,
        open_timeout=timeout_s,
        max_size=None,
        proxy=True if use_proxy else None,
    )


class Pipe:
    """A connection somebody made to our `Listener`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        """Empty at the end."""
        try:
            return await self._reader.read(262_144)
        except OSError:
            return b""

    async def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._writer.write(data)
            await self._writer.drain()

    async def aclose(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Listener:
    """A local port; see `listen`."""

    def __init__(self, server: asyncio.Server, tasks: set[asyncio.Task[None]]) -> None:
        self._server = server
        self._tasks = tasks
        self._closed = asyncio.Event()
        self.port: int = server.sockets[0].getsockname()[1]

    async def wait(self) -> None:
        await self._closed.wait()

    async def aclose(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._closed.set()


async def listen(host: str, port: int, serve: Callable[[Pipe], Awaitable[None]]) -> Listener:
    tasks: set[asyncio.Task[None]] = set()

    async def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await serve(Pipe(reader, writer))

    try:
        return Listener(await asyncio.start_server(came, host, port), tasks)
    except OSError as exc:
        raise Conflict(f"Cannot listen on {host}:{port}: {exc.strerror}. Choose another local port.") from exc
