"""HTTP through to a server in a sandbox: streaming both ways, nothing held back, nothing kept whole.

A request keeps its sandbox awake until the answer begins; from then on every piece that flows is a sign of life, so an
event stream that is only open lets it sleep. Connections to the guest are used again. What must not happen twice is
sent on a new one, since an old one may be gone without our knowing.

A request without a body that finds its sandbox awake and a connection idle needs no task while it waits for the server
(`pass_on`): most answers come in one piece, and are sent on as they are read. The others are taken over by a task.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import structlog
from starlette.types import ASGIApp, Receive, Send

from forkyard.control.previews import Previews
from forkyard.errors import BadAnswer, PortClosed, SandboxBusy
from forkyard.gateway.headers import Visit, for_client, for_guest
from forkyard.gateway.shortcut import Client
from forkyard.gateway.upstream import Connection, Hangup, Head, Pool
from forkyard.store.records import SandboxRecord

log = structlog.get_logger(__name__)
K = TypeVar("K", bound=Hashable)

#: While a dev server starts, its port is tried for this long before "nothing listens" is said.
LISTEN_WAIT_S = 2.0
#: How long a server in a sandbox may think before its answer begins.
ANSWER_S = 600.0
#: An upload that stands still for this long is given up.
UPLOAD_IDLE_S = 300.0
#: Whether the client is still there is looked at only when an exchange takes longer.
LOOK_AFTER_S = 0.5
#: At once, WebSockets included, of one sandbox; and what of it one client may have, so that others get in.
MAX_EXCHANGES = 4096
MAX_EXCHANGES_OF_CLIENT = 2048

_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
#: In the heads of requests that are more than their head.
_MORE_FOLLOWS = frozenset({b"content-length", b"transfer-encoding", b"expect", b"upgrade"})


class Asked(NamedTuple):
    """A server that was sent the whole request, and on which machine it is."""

    visit: Visit
    machine: Hashable
    connection: Connection


@dataclass
class Exchange:
    visit: Visit
    upload: Upload
    machine: Hashable = None
    connection: Connection | None = None
    pump: asyncio.Task[None] | None = None


class Proxy:
    def __init__(
        self, previews: Previews, *, answered: Callable[[float], None], taking_over: Callable[[Asked], ASGIApp]
    ) -> None:
        """`answered`: told how many seconds an answer took that needed no task. `taking_over`: for those that do, who
        `serve`s them, and then `leave`s."""
        self._previews = previews
        self._answered_in = answered
        self._taking_over = taking_over
        self._pool = Pool()
        self._open: Counter[str] = Counter()
        self._of_client: Counter[tuple[str, str | None]] = Counter()

    def close(self) -> None:
        self._pool.close()

    def enter(self, visit: Visit) -> None:
        """One more exchange with this sandbox, until `leave`."""
        sandbox_id, client = visit.target.sandbox_id, (visit.target.sandbox_id, visit.client)
        if self._open[sandbox_id] >= MAX_EXCHANGES:
            raise SandboxBusy(f"{MAX_EXCHANGES} requests to this sandbox are under way; try again shortly")
        if self._of_client[client] >= MAX_EXCHANGES_OF_CLIENT:
            raise SandboxBusy(
                f"{MAX_EXCHANGES_OF_CLIENT} requests of {visit.client or 'one client'} to this sandbox are under way; try "
                "again when some have ended"
            )
        self._open[sandbox_id] += 1
        self._of_client[client] += 1

    def leave(self, visit: Visit) -> None:
        sandbox_id = visit.target.sandbox_id
        _one_less(self._open, sandbox_id)
        _one_less(self._of_client, (sandbox_id, visit.client))

    def pass_on(self, visit: Visit, record: SandboxRecord, client: Client) -> bool:
        """At once, if there is an idle connection to this machine, which runs. Then `answered` or `taking_over` follows,
        unless the client goes away."""
        if visit.method not in _IDEMPOTENT or any(name in _MORE_FOLLOWS for name, _ in visit.headers):
            return False
        machine = _machine(record)
        connection = self._pool.take(record.id, machine, visit.target.port)
        if connection is None:
            return False
        self.enter(visit)
        self._previews.begin(record.id)
        asked, began = Asked(visit, machine, connection), time.perf_counter()
        client.gone = partial(self._left, asked)
        heard = partial(self._heard, asked, client, began)
        connection.start(_request(visit), head_only=visit.method == "HEAD", timeout_s=ANSWER_S, heard=heard)
        return True

    def _heard(self, asked: Asked, client: Client, began: float) -> None:
        sandbox_id = asked.visit.target.sandbox_id
        try:
            answered = self._sent_on(asked, client)
        except Exception:
            log.exception("unexpected error in the gateway")
            answered = False
        self._previews.end(sandbox_id)
        if answered:
            asked.connection.taken()
            self._put_back(asked)
            self.leave(asked.visit)
            self._answered_in(time.perf_counter() - began)
        else:
            client.go_on(self._taking_over(asked))

    def _sent_on(self, asked: Asked, client: Client) -> bool:
        whole = asked.connection.whole()
        if whole is None:
            return False
        head, body = whole
        return client.answer(head.status, for_client(asked.visit, head.status, head.headers), body)

    def _left(self, asked: Asked) -> None:
        """The client, before it was answered."""
        asked.connection.forget()
        self._count(asked.visit.target.sandbox_id, asked.connection)
        asked.connection.close()
        self._previews.end(asked.visit.target.sandbox_id)
        self.leave(asked.visit)

    async def serve(self, visit: Visit, receive: Receive, send: Send, asked: Asked | None = None) -> None:
        """Raises what can be told to the client, as long as the answer has not begun."""
        exchange = Exchange(visit, Upload(visit, receive))
        if asked is not None:
            exchange.machine, exchange.connection = asked.machine, asked.connection
        with Departure(exchange.upload):
            try:
                with self._previews.using(visit.target.sandbox_id):
                    head = await self._answered(exchange)
                await self._deliver(exchange, head, send)
            finally:
                self._end(exchange)

    async def _answered(self, exchange: Exchange) -> Head:
        visit, upload, asked = exchange.visit, exchange.upload, exchange.connection
        if asked is not None:
            with contextlib.suppress(Hangup):  # it was closed before it heard us
                return await asked.head()
        record = await self._previews.awake(visit.target.sandbox_id)
        exchange.machine = machine = _machine(record)
        request = _request(visit, upload) + await upload.first()
        if visit.method in _IDEMPOTENT and upload.finished and asked is None:
            exchange.connection = self._pool.take(record.id, machine, visit.target.port)
            if exchange.connection is not None:
                with contextlib.suppress(Hangup):
                    return await self._asked(exchange, exchange.connection, request)
        sock = await listening(self._previews, record, visit.target.port)
        _, connection = await asyncio.get_running_loop().create_connection(Connection, sock=sock)
        exchange.connection = connection
        try:
            return await self._asked(exchange, connection, request)
        except Hangup:
            raise BadAnswer(
                f"the server on port {visit.target.port} of sandbox {record.id} closed the connection without an answer"
            ) from None

    async def _asked(self, exchange: Exchange, connection: Connection, request: bytes) -> Head:
        connection.start(request, head_only=exchange.visit.method == "HEAD", timeout_s=ANSWER_S)
        if not exchange.upload.finished:
            exchange.pump = asyncio.create_task(self._pump(exchange, connection))
        return await connection.head()

    def _end(self, exchange: Exchange) -> None:
        if exchange.pump is not None:
            exchange.pump.cancel()
        if exchange.connection is None:
            return
        if exchange.upload.finished:
            self._put_back(Asked(exchange.visit, exchange.machine, exchange.connection))
        else:
            self._count(exchange.visit.target.sandbox_id, exchange.connection)
            exchange.connection.close()

    def _put_back(self, asked: Asked) -> None:
        """For the next one, if it can be used again."""
        target = asked.visit.target
        self._count(target.sandbox_id, asked.connection)
        self._pool.give(target.sandbox_id, asked.machine, target.port, asked.connection)

    def _count(self, sandbox_id: str, connection: Connection) -> None:
        bytes_in, bytes_out = connection.moved()
        self._previews.passed(sandbox_id, bytes_in=bytes_in, bytes_out=bytes_out)

    async def _pump(self, exchange: Exchange, connection: Connection) -> None:
        upload = exchange.upload
        try:
            while not upload.finished:
                piece = await upload.next()
                await connection.send(piece)
                self._count(exchange.visit.target.sandbox_id, connection)
        except ClientGone:
            connection.close()  # half a body must not look whole
        except Hangup:
            pass  # it may have answered before it had read everything

    async def _deliver(self, exchange: Exchange, head: Head, send: Send) -> None:
        visit, connection = exchange.visit, exchange.connection
        assert connection is not None
        headers = for_client(visit, head.status, head.headers)
        await send({"type": "http.response.start", "status": head.status, "headers": headers})
        more = True
        while more:
            try:
                data, more = await connection.body()
            except (Hangup, BadAnswer):
                return  # cut off: the client must not take half of it for the whole
            if more:
                self._count(visit.target.sandbox_id, connection)
            await send({"type": "http.response.body", "body": data, "more_body": more})


async def listening(previews: Previews, record: SandboxRecord, port: int) -> socket.socket:
    """A socket to a port, waiting a little for a server that is just starting."""
    loop = asyncio.get_running_loop()
    until, pause_s = loop.time() + LISTEN_WAIT_S, 0.05
    while True:
        try:
            return await previews.connect(record, port)
        except PortClosed as error:
            if loop.time() + pause_s > until:
                raise await previews.closed(error, record, port) from None
        await asyncio.sleep(pause_s)
        pause_s = min(0.3, pause_s * 1.5)


class ClientGone(Exception):
    """The client went away, or stands still, before it has sent all it announced."""


class Upload:
    """The body of a request, framed as it was."""

    def __init__(self, visit: Visit, receive: Receive) -> None:
        self.receive = receive
        self.length = visit.header(b"content-length")
        self.chunked = self.length is None and visit.header(b"transfer-encoding") is not None
        self.finished = not self.chunked and self.length in (None, b"0")

    async def first(self) -> bytes:
        """As much as is there, to go with the head."""
        return b"" if self.finished else await self.next()

    async def next(self) -> bytes:
        try:
            async with asyncio.timeout(UPLOAD_IDLE_S):
                message = await self.receive()
        except TimeoutError:
            raise ClientGone from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        data: bytes = message.get("body", b"")
        self.finished = not message.get("more_body", False)
        if not self.chunked:
            return data
        piece = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        return piece + b"0\r\n\r\n" if self.finished else piece


class Departure:
    """Ends the block when the client goes away: nobody else would notice while the guest is silent."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._gone = False
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(LOOK_AFTER_S, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        if self._gone and isinstance(error, asyncio.CancelledError) and self._task is not None:
            self._task.uncancel()
            return True
        return isinstance(error, ClientGone)

    def _look(self) -> None:
        if self._upload.finished:
            self._watch = self._loop.create_task(self._watching())
        else:  # whoever reads the body notices
            self._timer = self._loop.call_later(LOOK_AFTER_S, self._look)

    async def _watching(self) -> None:
        while (await self._upload.receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if self._task is not None:
            self._task.cancel()


def _one_less(numbers: Counter[K], key: K) -> None:
    numbers[key] -= 1
    if not numbers[key]:
        del numbers[key]


def _machine(record: SandboxRecord) -> Hashable:
    return record.incarnation, record.updated_at


def _request(visit: Visit, upload: Upload | None = None) -> bytes:
    lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (visit.method.encode(), visit.request_target, visit.host)]
    lines += [b"%b: %b\r\n" % header for header in for_guest(visit)]
    if upload is None:
        pass
    elif upload.chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif upload.length is not None:
        lines.append(b"content-length: %b\r\n" % upload.length)
    lines.append(b"\r\n")
    return b"".join(lines)
