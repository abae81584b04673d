"""Bytes of one side of a connection that is looked into, with TLS or without. Every wait has an end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from forkyard.net.injection import Scrubber

#: Between two pieces of a body, or before an answer: long polls and slow servers are fine.
SILENCE_S = 3600.0
_CHUNK_BYTES = 64 * 1024
_REST_OF_SECRET_S = 0.2


class Wire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def accepted(cls, sock: socket.socket, context: ssl.SSLContext | None) -> Wire:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_CHUNK_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=context)
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    @classmethod
    async def connected(cls, sock: socket.socket, context: ssl.SSLContext | None, name: str) -> Wire:
        try:
            reader, writer = await asyncio.open_connection(
                sock=sock, ssl=context, server_hostname=name if context else None, limit=_CHUNK_BYTES
            )
        except BaseException:
            sock.close()
            raise
        return cls(reader, writer)

    async def read(self, timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s):
            return await self._reader.read(_CHUNK_BYTES)

    async def write(self, data: bytes) -> None:
        if data:
            self._writer.write(data)
            async with asyncio.timeout(SILENCE_S):
                await self._writer.drain()

    @property
    def ended(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    def end_of_writing(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            if self._writer.can_write_eof():
                self._writer.write_eof()
            else:
                self._writer.close()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError, ssl.SSLError):
            async with asyncio.timeout(5.0):
                await self._writer.wait_closed()

    def abort(self) -> None:
        self._writer.transport.abort()


async def pumped(source: Wire, target: Wire, *, scrubber: Scrubber | None = None, first: bytes = b"") -> None:
    """`first`, and all that comes. What may be the beginning of a secret waits for the rest of it, but not for long."""
    clean = scrubber or Scrubber(())
    with contextlib.suppress(OSError, TimeoutError, ssl.SSLError):
        await target.write(clean.feed(first))
        while True:
            try:
                data = await source.read(_REST_OF_SECRET_S if clean.holds else SILENCE_S)
            except TimeoutError:
                if not clean.holds:
                    raise
                await target.write(clean.finish())
                continue
            if not data:
                break
            await target.write(clean.feed(data))
        await target.write(clean.finish())
    target.end_of_writing()
