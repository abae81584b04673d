"""Errands: what a program of this host fetches on behalf of a sandbox, or of whoever asked, under one policy.

Owns: a SOCKS5 proxy on loopback for as long as an errand lasts, with a password that only its program is told. Each
connection is decided as the door would decide it, by name and by the address it leads to, redirects included, and is
recorded. Never does: looking into what passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from ipaddress import IPv4Address

from forkyard.models.network import EgressRecord, Verdict
from forkyard.net.outside import Outside
from forkyard.net.policy import Decider, address_of, normal
from forkyard.net.watch import is_own

_HANDSHAKE_S = 30.0
_CHUNK_BYTES = 2**16
_VERSION, _BY_PASSWORD, _NO_METHOD = 5, 2, 0xFF
_CONNECT = 1
_IPV4, _NAME = 1, 3
_GRANTED, _FAILED, _NOT_ALLOWED, _UNREACHABLE, _NO_SUCH_COMMAND = 0, 1, 2, 4, 7

Sink = Callable[[EgressRecord], None]


class Errand:
    """`denied` is why something was refused, if something was, and `failed` why a host was not reached."""

    def __init__(self, outside: Outside, gate: Decider, what: str, sink: Sink | None = None) -> None:
        self.denied: str | None = None
        self.failed: str | None = None
        self._outside = outside
        self._gate = gate
        self._what = what
        self._sink = sink
        self._password = secrets.token_hex(16)
        self._connections: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def proxy(self, listener: socket.socket | None = None) -> AsyncIterator[str]:
        """Its address, with the password in it. `listener`: a socket that listens, in another network maybe."""
        if listener is None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        else:
            server = await asyncio.start_server(self._serve, sock=listener)
        try:
            port = server.sockets[0].getsockname()[1]
            yield f"socks5h://errand:{self._password}@127.0.0.1:{port}"
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def address(self, name: str, port: int) -> str | None:
        """Where a connection to this name or address may go. None: nowhere, and `denied` says why. Raises `OSError`."""
        if (address := address_of(name)) is not None:
            return self._decided(None, [str(address)], port)
        known = normal(name)
        if known is None:
            self.denied = f"{name!r} is no host name"
            return None
        decision = self._gate.name(known)
        if not decision.allowed:
            self.denied = decision.reason
            return None
        found = await self._outside.resolver.resolve(known)
        if not found:
            raise OSError(f"{name} has no address")
        return self._decided(known, found, port)

    def _decided(self, name: str | None, addresses: list[str], port: int) -> str | None:
        for text in addresses:
            address = IPv4Address(text)
            decision = self._gate.connection(name, address, port, own=is_own(address))
            if decision.allowed:
                self.denied = None
                return text
            self.denied = decision.reason
        return None

    # ── one connection ───────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
                async with asyncio.timeout(_HANDSHAKE_S):
                    asked = await self._asked(reader, writer)
                if asked is not None:
                    await self._go(reader, writer, *asked)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, int] | None:
        version, count = await reader.readexactly(2)
        methods = await reader.readexactly(count)
        if version != _VERSION or _BY_PASSWORD not in methods:
            writer.write(bytes((_VERSION, _NO_METHOD)))
            return None
        writer.write(bytes((_VERSION, _BY_PASSWORD)))
        _, length = await reader.readexactly(2)
        await reader.readexactly(length)
        password = await reader.readexactly((await reader.readexactly(1))[0])
        right = hmac.compare_digest(password, self._password.encode())
        writer.write(bytes((1, 0 if right else 1)))
        if not right:
            return None
        _, command, _, kind = await reader.readexactly(4)
        if command != _CONNECT or kind not in (_IPV4, _NAME):
            writer.write(_reply(_NO_SUCH_COMMAND))
            return None
        if kind == _IPV4:
            host = str(IPv4Address(await reader.readexactly(4)))
        else:
            host = (await reader.readexactly((await reader.readexactly(1))[0])).decode("ascii")
        return host, int.from_bytes(await reader.readexactly(2))

    async def _go(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
        began = time.monotonic()
        verdict: Verdict = "failed"
        reason: str | None = None
        address = None
        counts = [0, 0]
        try:
            address = await self.address(host, port)
            if address is None:
                verdict, reason = "denied", self.denied
                writer.write(_reply(_NOT_ALLOWED))
                await writer.drain()
                return
            theirs = await _opened(await self._outside.connect(address, port))
            writer.write(_reply(_GRANTED))
            verdict = "allowed"
            await _both_ways((reader, writer), theirs, counts)
        except (OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            if verdict == "failed":
                self.failed = f"{host} port {port}: {reason}"
                writer.write(_reply(_UNREACHABLE))
        finally:
            self._record(verdict, reason, host, address, port, counts, time.monotonic() - began)

    def _record(
        self,
        verdict: Verdict,
        reason: str | None,
        host: str,
        address: str | None,
        port: int,
        counts: list[int],
        duration_s: float,
    ) -> None:
        if self._sink is None:
            return
        self._sink(
            EgressRecord(
                at=datetime.now(UTC),
                sandbox_id=self._gate.sandbox_id,
                kind="tcp",
                process=self._what,
                name=None if address_of(host) else host,
                address=address,
                port=port,
                bytes_out=counts[0],
                bytes_in=counts[1],
                duration_ms=round(duration_s * 1000, 3),
                verdict=verdict,
                reason=reason,
            )
        )


def _reply(code: int) -> bytes:
    return bytes((_VERSION, code, 0, _IPV4)) + bytes(6)


_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _opened(sock: socket.socket) -> _Ends:
    try:
        return await asyncio.open_connection(sock=sock)
    except BaseException:
        sock.close()
        raise


async def _both_ways(ours: _Ends, theirs: _Ends, counts: list[int]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(ours[0], theirs[1], counts, 0))
            group.create_task(_pump(theirs[0], ours[1], counts, 1))
    except* OSError:
        pass
    finally:
        theirs[1].close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: list[int], which: int) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        counts[which] += len(chunk)
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
