"""A client of QEMU's control protocol (QMP).

Owns: one connection, its request ids, deadlines, and the events QEMU sends on it. A closed connection stays closed; to
reconnect, make a new one (QEMU serves one client at a time and takes the next when the last is gone).
Never does: deciding what an event means.

Our own because file descriptors must travel with commands (`getfd`, `add-fd`): the `qemu.qmp` package sends through an
asyncio stream, which cannot carry them. What QEMU sends is bounded here: a guest may have taken QEMU over.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from forkyard.errors import HostFailure, OperationTimeout, VmCrashed

MAX_MESSAGE_BYTES = 1 << 20
COMMAND_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Event:
    name: str
    data: dict[str, Any]


class Qmp:
    """Made by `connect`. `on_event` is called for every event, on the loop, and must not block."""

    def __init__(self, sock: socket.socket, on_event: Callable[[Event], None]) -> None:
        self._sock = sock
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._waiters: list[tuple[Callable[[Event], bool], asyncio.Future[Event]]] = []
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.greeted_at: float | None = None  # by time.perf_counter
        self._closed_because: str | None = None
        self._sending = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls, path: Path, on_event: Callable[[Event], None] = lambda _: None, *, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> Self:
        """Connect and negotiate. The socket may be one on which nobody accepts yet; then this waits."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            await asyncio.get_running_loop().sock_connect(sock, str(path))
        except OSError as error:
            sock.close()
            raise VmCrashed(f"nothing listens on {path} any more ({error}); the VM is gone") from error
        client = cls(sock, on_event)
        try:
            async with asyncio.timeout(timeout_s):
                await client._greeted
                await client.execute("qmp_capabilities", timeout_s=timeout_s)
        except TimeoutError:
            await client.aclose()
            raise OperationTimeout(
                f"QEMU did not answer on {path} within {timeout_s:.0f} s; the host may be overloaded"
            ) from None
        except BaseException:
            await client.aclose()
            raise
        return client

    @property
    def closed(self) -> bool:
        return self._closed_because is not None

    async def execute(
        self, command: str, *, fds: Sequence[int] = (), timeout_s: float = COMMAND_TIMEOUT_S, **arguments: Any
    ) -> Any:
        """Run a command and return its answer. `fds` travel with it; the caller keeps (and closes) its own."""
        if self._closed_because is not None:
            raise VmCrashed(f"cannot run {command}: {self._closed_because}")
        number = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        message: dict[str, Any] = {"execute": command, "id": number}
        if arguments:
            message["arguments"] = arguments
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(json.dumps(message).encode() + b"\n", fds)
                return await answer
        except TimeoutError:
            raise OperationTimeout(f"QEMU did not answer {command} within {timeout_s:g} s") from None
        except OSError as error:
            raise VmCrashed(f"the connection to QEMU broke during {command}: {error}") from error
        finally:
            self._pending.pop(number, None)

    def expect(self, matches: Callable[[Event], bool]) -> asyncio.Future[Event]:
        """The next event that matches. Ask before you cause it. Fails when the connection does."""
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._waiters.append((matches, future))
        return future

    async def aclose(self) -> None:
        self._reader.cancel()
        await asyncio.wait({self._reader})
        self._fail("the connection was closed")
        self._sock.close()

    async def _send(self, data: bytes, fds: Sequence[int]) -> None:
        async with self._sending:
            if fds:
                # The buffer of a unix socket holds far more than one command, and we send one at a time.
                sent = socket.send_fds(self._sock, [data], list(fds))
                data = data[sent:]
            if data:
                await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        buffer = bytearray()
        try:
            while chunk := await loop.sock_recv(self._sock, 65536):
                buffer += chunk
                *lines, rest = buffer.split(b"\n")
                for line in lines:
                    self._dispatch(json.loads(line))
                buffer = rest
                if len(buffer) > MAX_MESSAGE_BYTES:
                    raise ValueError(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
            self._fail("QEMU closed the connection")
        except OSError as error:
            self._fail(f"the connection to QEMU broke ({os.strerror(error.errno or 0)})")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._fail(f"QEMU sent something that is not QMP ({error})")

    def _dispatch(self, message: dict[str, Any]) -> None:
        if "QMP" in message:
            if not self._greeted.done():
                self.greeted_at = time.perf_counter()
                self._greeted.set_result(None)
        elif "event" in message:
            event = Event(str(message["event"]), dict(message.get("data") or {}))
            for waiter in [w for w in self._waiters if w[1].done() or w[0](event)]:
                self._waiters.remove(waiter)
                if not waiter[1].done():
                    waiter[1].set_result(event)
            self._on_event(event)
        else:
            answer = self._pending.get(message["id"])
            if answer is None or answer.done():  # its caller gave up
                return
            if "error" in message:
                answer.set_exception(HostFailure(f"QEMU refused: {message['error'].get('desc', message['error'])}"))
            else:
                answer.set_result(message.get("return"))

    def _fail(self, why: str) -> None:
        if self._closed_because is not None:
            return
        self._closed_because = why
        for future in [self._greeted, *self._pending.values(), *(future for _, future in self._waiters)]:
            if not future.done():
                future.set_exception(VmCrashed(why))
                future.exception()  # seen: a future that nobody awaits any more must not complain
        self._waiters.clear()
