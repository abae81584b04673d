"""What comes in: bodies with a bound, paths as bytes, requests turned into what the guest understands.

Names of guest files are bytes. In a query they are percent-encoded, whatever bytes they are. In JSON answers a byte
that is no UTF-8 is one character of a private range (`guest.names`); given back, in a query or in JSON, it is that
byte again. A lone surrogate `\\udc80` to `\\udcff` (Python's surrogateescape) is understood too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

from fastapi import Depends, Query, Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Message

from forkyard.control.plane import ControlPlane
from forkyard.errors import InvalidPath, InvalidRequest, OperationTimeout
from forkyard.guest.base import ExecSpec, Guest
from forkyard.models import ExecCreate
from forkyard.models.code import MAX_CODE_CHARS

MAX_BODY_BYTES = 2**20
MAX_PATH_BYTES = 4096
#: An upload that stands still for this long is given up.
UPLOAD_IDLE_S = 300.0


class BoundedRoute(APIRoute):
    """A route whose body is read as a whole, and so must be small."""

    max_body_bytes = MAX_BODY_BYTES

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handler = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            body: bytes | None = await _small_body(request, self.max_body_bytes)

            async def replay() -> Message:
                nonlocal body
                if body is None:
                    return await request.receive()
                whole, body = body, None
                return {"type": "http.request", "body": whole, "more_body": False}

            return await handler(Request(request.scope, replay))

        return bounded


class CodeRoute(BoundedRoute):
    """The longest code, each of its characters escaped."""

    max_body_bytes = 6 * MAX_CODE_CHARS + MAX_BODY_BYTES


class SpecRoute(BoundedRoute):
    """Files of a spec come inside the JSON."""

    max_body_bytes = 32 * 2**20


async def _small_body(request: Request, most_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in upload(request):
        body += chunk
        if len(body) > most_bytes:
            raise InvalidRequest(
                f"the body is larger than {most_bytes} bytes; send less at once, or upload it as a file"
            )
    return bytes(body)


async def upload(request: Request) -> AsyncIterator[bytes]:
    """The body as it arrives. A client that goes away or stands still is an error, so that nothing half is kept."""
    chunks = request.stream()
    while True:
        try:
            async with asyncio.timeout(UPLOAD_IDLE_S):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except ClientDisconnect:
            raise InvalidRequest("the client went away before it had sent the whole body") from None
        except TimeoutError:
            raise OperationTimeout(f"nothing of the body came for {UPLOAD_IDLE_S:.0f} s") from None
        if chunk:
            yield chunk


async def control_of(request: Request) -> ControlPlane:
    """Async, as all dependencies here: FastAPI runs plain functions in a thread."""
    control: ControlPlane = request.app.state.control
    return control


Control = Annotated[ControlPlane, Depends(control_of)]


async def _guest(sandbox_id: str, control: Control) -> AsyncIterator[Guest]:
    async with control.sandboxes.use(sandbox_id) as guest:
        yield guest


#: The guest of the sandbox in the path of the request, which is woken if it sleeps and stays awake until the answer is
#: sent. Not for streams that go on without end: those are `control.following`'s.
RunningGuest = Annotated[Guest, Depends(_guest)]


async def _query_path(
    request: Request,
    path: Annotated[
        str,
        Query(
            description="Path in the sandbox, absolute or relative to the home directory. Percent-encode its bytes.",
            examples=["/home/user/a.txt"],
            json_schema_extra={"minLength": 1},
        ),
    ],
) -> str:
    # `path` is there for its documentation: Starlette replaces bytes that are no UTF-8.
    for part in request.scope["query_string"].split(b"&"):
        name, _, value = part.partition(b"=")
        if name == b"path":
            path = unquote_to_bytes(value.replace(b"+", b" ")).decode("utf-8", "surrogateescape")
    return checked_path(path)


QueryPath = Annotated[str, Depends(_query_path)]


def checked_path(path: str, field: str = "path") -> str:
    try:
        size_bytes = len(path.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise InvalidPath(f"{field} {path!r} holds half a surrogate pair", field=field) from None
    if not path:
        raise InvalidPath(f"{field} is empty; give a path such as /home/user/a.txt", field=field)
    if "\0" in path:
        raise InvalidPath(f"{field} {path!r} holds a NUL, which no file name can", field=field)
    if size_bytes > MAX_PATH_BYTES:
        raise InvalidPath(f"{field} is {size_bytes} bytes long; {MAX_PATH_BYTES} are the most", field=field)
    return path


def exec_spec(request: ExecCreate) -> ExecSpec:
    if not request.command:
        raise InvalidRequest("command is empty; give a shell command, or a list with a program and its arguments")
    parts = [request.command] if isinstance(request.command, str) else request.command
    for part in parts:
        checked_text(part, "command")
    checked_env(request.env)
    if request.cwd is not None:
        checked_path(request.cwd, "cwd")
    return ExecSpec(
        command=request.command,
        cwd=request.cwd,
        env=request.env,
        user=request.user,
        timeout_s=request.timeout_s,
        stdin=request.stdin,
        pty=request.pty,
        rows=request.rows,
        cols=request.cols,
        label=request.label,
        trace_id=request.trace_id,
        id=request.id,
    )


def checked_env(env: dict[str, str]) -> None:
    for name, value in env.items():
        checked_text(value, f"env.{name}")


def checked_text(text: str, field: str) -> None:
    """What is handed to a program: bytes without NUL."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{field} holds half a surrogate pair", field=field) from None
    if "\0" in text:
        raise InvalidRequest(f"{field} holds a NUL, which no program can be given", field=field)


def raw_body(description: str, media_type: str = "application/octet-stream") -> dict[str, Any]:
    """OpenAPI of a body that is not JSON."""
    return {
        "requestBody": {
            "description": description,
            "required": True,
            "content": {media_type: {"schema": {"type": "string", "format": "binary"}}},
        }
    }
