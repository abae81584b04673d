"""Our errors as E2B's clients know them. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.responses import JSONResponse

from forkyard.errors import (
    CommandNotFound,
    Conflict,
    FileConflict,
    Forbidden,
    ForkyardError,
    GuestDiskFull,
    GuestFailure,
    GuestPermissionDenied,
    GuestUnreachable,
    InvalidRequest,
    NoCapacity,
    NotFound,
    OperationTimeout,
    QuotaExceeded,
    SandboxEnded,
    SandboxNotFound,
    Unauthenticated,
)


class Refused(Exception):
    """An answer of the control plane, or of the plain HTTP routes of envd."""

    def __init__(
        self, status: int, message: str, *, error_code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error_code = error_code
        self.headers = dict(headers or {})
        self.message = message


class Failed(Exception):
    """An error of a Connect service."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


#: The first that fits. Whatever is not here is ours to answer for.
_STATUS: tuple[tuple[type[ForkyardError], int], ...] = (
    (SandboxEnded, 404),
    (InvalidRequest, 400),
    (GuestDiskFull, 507),
    (GuestUnreachable, 502),
    (GuestPermissionDenied, 403),
    (FileConflict, 400),
    (GuestFailure, 400),
)
_CODES: tuple[tuple[type[ForkyardError], str], ...] = (
    (SandboxEnded, "unavailable"),
    (SandboxNotFound, "unavailable"),
    (NotFound, "not_found"),
    (InvalidRequest, "invalid_argument"),
    (FileConflict, "invalid_argument"),
    (Conflict, "failed_precondition"),
    (Unauthenticated, "unauthenticated"),
    (Forbidden, "permission_denied"),
    (GuestPermissionDenied, "permission_denied"),
    (GuestDiskFull, "resource_exhausted"),
    (QuotaExceeded, "resource_exhausted"),
    (CommandNotFound, "invalid_argument"),
    (GuestUnreachable, "unavailable"),
    (NoCapacity, "unavailable"),
    (OperationTimeout, "deadline_exceeded"),
)
HTTP_OF_CODE = {
    "canceled": 499,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "unavailable": 503,
    "unauthenticated": 401,
}


def status_of(error: ForkyardError) -> int:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), error.status)


def body_of(status: int, message: str, **more: Any) -> dict[str, Any]:
    return {"code": status, "message": message, **more}


def refusal(error: Refused) -> JSONResponse:
    code = {} if error.error_code is None else {"error_code": error.error_code}
    response = answer(error.status, error.message, **code)
    response.headers.update(error.headers)
    return response


def answer(status: int, message: str, **more: Any) -> JSONResponse:
    # A client tries again by itself on these, and waits as long as it is told. What took too long may yet be done.
    headers = {"Retry-After": "1"} if status in (429, 503) else {"Should-Retry": "false"} if status == 504 else {}
    return JSONResponse(body_of(status, message, **more), status, headers)


def not_running(sandbox_id: str) -> JSONResponse:
    """What E2B's proxy says; clients look for these words."""
    return answer(502, "The sandbox was not found", sandboxId=sandbox_id)


@contextlib.contextmanager
def about(path: str) -> Iterator[None]:
    """What a guest says of a request, it says without the path that it was of."""
    try:
        yield
    except ForkyardError as error:
        if error.message.startswith(_OF_REQUEST):
            raise type(error)(f"{path}: {error.message.removeprefix(_OF_REQUEST)}", **error.details) from error
        raise


_OF_REQUEST = "request: "


def failed(error: ForkyardError) -> Failed:
    code = next((code for kind, code in _CODES if isinstance(error, kind)), "internal")
    return Failed(code, error.message)
