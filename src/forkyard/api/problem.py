"""Every error leaves here, as `application/problem+json` (RFC 9457).

Owns: the one place where an exception becomes an answer. What is not a `ForkyardError` is logged with its traceback and
answered as `internal`, without a word about the inside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forkyard.errors import (
    ForkyardError,
    InternalError,
    InvalidRequest,
    InvalidShape,
    NotFound,
    Unauthenticated,
)
from forkyard.models.base import field_of

log = structlog.get_logger(__name__)

MEDIA_TYPE = "application/problem+json"
_SHAPE_FIELDS = {"body.vcpus", "body.memory_mib", "body.disk_gib"}


class Problem(BaseModel):
    """The body of every error answer. `code` is stable; `detail` is for people."""

    type: str = Field(examples=["urn:forkyard:error:sandbox_not_found"])
    title: str
    status: int
    detail: str
    code: str = Field(examples=["sandbox_not_found"])
    retryable: bool = Field(description="Whether the same request can succeed later.")
    details: dict[str, Any] = Field(default_factory=dict)


class Problems:
    """Outermost middleware: whatever is raised below becomes an answer, for HTTP and for WebSockets."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] in ("http.response.start", "websocket.accept")
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except Exception as raised:
            if scope["type"] == "lifespan":
                raise
            error = known(raised)
            if not started:
                await refuse(error, scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1011, "reason": error.code})
            # else the answer is cut off: the client must not take half of it for the whole


def known(raised: Exception) -> ForkyardError:
    if isinstance(raised, ForkyardError):
        return raised
    log.error("unexpected error", exc_info=raised)
    return InternalError()


def problem_body(problem: Mapping[str, Any]) -> bytes:
    # ASCII: a path in it may hold bytes that are no UTF-8 (as lone surrogates).
    return json.dumps(problem, default=str).encode("ascii")


def problem_response(error: ForkyardError, *, status: int | None = None) -> Response:
    problem = error.to_problem()
    if status is not None:
        problem["status"] = status
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if error.retryable:
        headers["retry-after"] = str(math.ceil(error.details.get("retry_after_s", 1)))
    return Response(problem_body(problem), status_code=problem["status"], media_type=MEDIA_TYPE, headers=headers)


async def refuse(error: ForkyardError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {}):
        await problem_response(error)(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": error.code})


def install(app: FastAPI) -> None:
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(Problems)


async def _invalid(_request: Request, raised: Exception) -> Response:
    assert isinstance(raised, RequestValidationError)
    errors = [
        {"field": field_of(item["loc"]) or "body", "message": str(item["msg"]).removeprefix("Value error, ")}
        for item in raised.errors()
    ]
    message = "; ".join(f"{item['field']}: {item['message']}" for item in errors)
    shape = bool(errors) and all(item["field"] in _SHAPE_FIELDS for item in errors)
    return problem_response((InvalidShape if shape else InvalidRequest)(message, errors=errors))


async def _http(request: Request, raised: Exception) -> Response:
    assert isinstance(raised, HTTPException)
    where = f"{request.method} {request.url.path}"
    if isinstance(raised.__cause__, ForkyardError):
        return problem_response(raised.__cause__)
    if raised.status_code == HTTPStatus.NOT_FOUND:
        return problem_response(NotFound(f"there is nothing at {where}; /api/v1/docs lists what there is"))
    if raised.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        answer = problem_response(InvalidRequest(f"{where}: method not allowed"), status=raised.status_code)
        answer.headers.update(raised.headers or {})
        return answer
    if raised.status_code == HTTPStatus.BAD_REQUEST:  # how FastAPI says that the body cannot be decoded
        return problem_response(InvalidRequest(f"{where}: the body is not JSON in UTF-8"))
    return problem_response(InvalidRequest(f"{where}: {raised.detail}"), status=raised.status_code)


def documented(*errors: type[ForkyardError]) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI entries of these errors."""
    by_status: dict[int | str, list[type[ForkyardError]]] = {}
    for error in errors:
        by_status.setdefault(error.status, []).append(error)
    return {
        status: {
            "description": " ".join(f"`{error.code}`: {error().to_problem()['title']}" for error in some),
            "content": {
                MEDIA_TYPE: {
                    "schema": {"$ref": "#/components/schemas/Problem"},
                    "examples": {error.code: {"value": error().to_problem()} for error in some},
                }
            },
        }
        for status, some in by_status.items()
    }
