"""Looks at the first bytes of a socket and leaves them there, for whoever serves it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket

from forkyard.net.sniff import MOST_BYTES


class Peek:
    """Waits for bytes on a socket and leaves them there."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLRDHUP | select.POLLPRI)

    async def beyond(self, count: int) -> bytes:
        """The first bytes, when there are more than `count`; or all that can be seen: nothing is behind urgent data, and
        asking for it again would keep us busy."""
        # Otherwise the bytes that we leave would wake us for ever.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count + 1)
        while True:
            with contextlib.suppress(BlockingIOError):
                ended = bool(self._poll.poll(0))
                data = self._sock.recv(MOST_BYTES, socket.MSG_PEEK)
                if len(data) > count or ended or not data:
                    return data
            await self._readable()

    async def _readable(self) -> None:
        ready = asyncio.Event()
        fd = self._sock.fileno()
        self._loop.add_reader(fd, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_reader(fd)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
