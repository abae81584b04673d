"""The Connect protocol: a call is a POST, a stream is a POST with frames (a flag byte, a length, a message).

Owns: reading and writing messages, the trailer that ends a stream, keep-alives, and what happens when a client goes away.
Messages are dicts in protobuf's JSON mapping, whatever they were on the wire (`proto`).
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from typing import Any

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from forkyard.compat.e2b import proto
from forkyard.compat.e2b.errors import HTTP_OF_CODE, Failed, failed
from forkyard.errors import ForkyardError

log = structlog.get_logger(__name__)

Message = dict[str, Any]
Unary = Callable[[Request, Message], Awaitable[Message]]
MAX_MESSAGE_BYTES = 16 * 2**20
DEFAULT_KEEP_ALIVE_S = 90.0
_HEAD = struct.Struct(">BI")
_END = 0x02


def known(raised: BaseException) -> Failed:
    if isinstance(raised, Failed):
        return raised
    if isinstance(raised, ForkyardError):
        return failed(raised)
    if isinstance(raised, proto.Malformed):
        return Failed("invalid_argument", str(raised))
    log.error("unexpected error in the E2B facade", exc_info=raised)
    return Failed("internal", "an unexpected error in the daemon; its log has the details")


def error_answer(raised: BaseException) -> JSONResponse:
    error = known(raised)
    return JSONResponse({"code": error.code, "message": error.message}, HTTP_OF_CODE.get(error.code, 500))


def timeout_s(request: Request) -> float | None:
    """How long to work on it; None: for ever. A little less than the client waits: else some give up on the connection
    before they hear why."""
    given = request.headers.get("connect-timeout-ms", "")
    if not given:
        return None
    if not given.isascii() or not given.isdigit() or len(given) > 10:
        raise Failed("invalid_argument", f"Connect-Timeout-Ms is {given[:20]!r}, not a number of up to 10 digits")
    wanted = int(given) / 1000
    return wanted - min(0.25, wanted / 10) or 0.001


# ── what a client sends ──────────────────────────────────────────────────────────────────────────────────────────


class Codec:
    def __init__(self, binary: bool, method: str) -> None:
        self.binary = binary
        self._method = method  # `process.Process/Start`

    def decode(self, data: bytes) -> Message:
        if self.binary:
            return proto.decode(proto.REQUESTS[self._method], data)
        try:
            found = json.loads(data or b"{}")
        except (ValueError, RecursionError):
            raise Failed("invalid_argument", "the message is not JSON") from None
        if not isinstance(found, dict):
            raise Failed("invalid_argument", "the message is not a JSON object")
        return found

    def encode(self, message: Message) -> bytes:
        if self.binary:
            return proto.encode(proto.ANSWERS[self._method], message)
        return json.dumps(message, separators=(",", ":")).encode()


def whole(value: object) -> int | None:
    """A number. They may come as strings in protobuf's JSON."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 11:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def codec_of(request: Request, *, stream: bool) -> Codec:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    prefix = "application/connect+" if stream else "application/"
    kind = given.removeprefix(prefix)
    if not given.startswith(prefix) or kind not in ("json", "proto"):
        raise Failed("invalid_argument", f"the content type {given[:60]!r} is not served here; send {prefix}json")
    if request.headers.get("content-encoding", request.headers.get("connect-content-encoding", "identity")) not in (
        "",
        "identity",
    ):
        raise Failed("unimplemented", "compressed messages are not served here; send them as they are")
    return Codec(kind == "proto", request.url.path.removeprefix("/"))


async def frames(request: Request, codec: Codec) -> AsyncIterator[Message]:
    buffer = bytearray()
    async for chunk in request.stream():
        buffer += chunk
        while len(buffer) >= _HEAD.size:
            flags, length = _HEAD.unpack_from(buffer)
            if length > MAX_MESSAGE_BYTES:
                raise Failed("resource_exhausted", f"a message has at most {MAX_MESSAGE_BYTES} bytes")
            if len(buffer) < _HEAD.size + length:
                break
            body = bytes(buffer[_HEAD.size : _HEAD.size + length])
            del buffer[: _HEAD.size + length]
            if flags & _END:
                return
            if flags:
                raise Failed("unimplemented", "compressed messages are not served here; send them as they are")
            yield codec.decode(body)
    if buffer:
        raise Failed("invalid_argument", "the stream ended in the middle of a message")


async def only_frame(request: Request, codec: Codec) -> Message:
    async with aclosing(frames(request, codec)) as messages:  # type: ignore[type-var]
        async for message in messages:
            return message
    raise Failed("invalid_argument", "the stream has no message")


async def _whole(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_MESSAGE_BYTES:
            raise Failed("resource_exhausted", f"a message has at most {MAX_MESSAGE_BYTES} bytes")
    return bytes(body)


# ── what it gets ─────────────────────────────────────────────────────────────────────────────────────────────────


async def unary(request: Request, handler: Unary) -> Response:
    codec = codec_of(request, stream=False)
    message = codec.decode(await _whole(request))
    answer = await handler(request, message)
    return Response(codec.encode(answer), media_type="application/proto" if codec.binary else "application/json")


class Stream(Response):
    """Messages until their source ends or the client's time is up, then the trailer. `opened` is closed in any case."""

    def __init__(
        self,
        request: Request,
        codec: Codec,
        opened: AsyncExitStack,
        source: AsyncGenerator[Message, None],
        idle: Message,
    ) -> None:
        super().__init__(media_type="application/connect+proto" if codec.binary else "application/connect+json")
        del self.headers["content-length"]
        self._codec = codec
        self._opened = opened
        self._source = source
        self._idle = idle
        given = request.headers.get("keepalive-ping-interval", "")
        self._every_s = float(given) if given.isascii() and given.isdigit() and 0 < len(given) < 5 else 0.0
        self._every_s = self._every_s or DEFAULT_KEEP_ALIVE_S
        self._timeout_s = timeout_s(request)
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async with self._opened:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            tasks = [
                asyncio.create_task(self._pump(send)),
                asyncio.create_task(until_gone(receive)),
                asyncio.create_task(self._keep_alive(send)),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, send: Send) -> None:
        trailer: Message = {}
        try:
            async with asyncio.timeout(self._timeout_s), aclosing(self._source) as source:
                async for message in source:
                    await self._send(send, 0, self._codec.encode(message))
        except ClientDisconnect:
            return
        except TimeoutError:
            text = f"the stream was not at its end after {self._timeout_s:g} s, as long as it was asked to last"
            trailer = {"error": {"code": "deadline_exceeded", "message": text}}
        except Exception as raised:
            error = known(raised)
            trailer = {"error": {"code": error.code, "message": error.message}}
        await self._send(send, _END, json.dumps(trailer).encode())
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self._send(send, 0, self._codec.encode(self._idle))

    async def _send(self, send: Send, flags: int, body: bytes) -> None:
        async with self._sending:
            try:
                await send(
                    {"type": "http.response.body", "body": _HEAD.pack(flags, len(body)) + body, "more_body": True}
                )
            except OSError:
                raise ClientDisconnect from None


def broken(request: Request, raised: BaseException) -> Response:
    """A stream that could not begin: a trailer alone, as the protocol wants it."""
    error = known(raised)
    binary = request.headers.get("content-type", "").startswith("application/connect+proto")
    body = json.dumps({"error": {"code": error.code, "message": error.message}}).encode()
    return Response(
        _HEAD.pack(_END, len(body)) + body,
        media_type="application/connect+proto" if binary else "application/connect+json",
    )


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
