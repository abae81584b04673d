"""Our errors as Freestyle's clients know them. Pure.

A client looks at `code` alone, and some try a create again for ever if they do not know it. So every answer that is an
error has a code of theirs, and those of a create one that the oldest client has too, unless it came with a spec, which only
newer ones send.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

from forkyard.errors import (
    BuildFailed,
    BuildNotFound,
    CommandNotFound,
    Conflict,
    DomainNotFound,
    DomainUnverified,
    ExecNotFound,
    FileConflict,
    FileMissing,
    Forbidden,
    ForkyardError,
    GuestDiskFull,
    GuestPermissionDenied,
    GuestUnreachable,
    IdempotencyConflict,
    InvalidPath,
    InvalidRequest,
    MergeConflict,
    NoCapacity,
    NotFound,
    OperationTimeout,
    QuotaExceeded,
    RefConflict,
    RemoteFailed,
    RepoFull,
    RepoNotFound,
    RevisionNotFound,
    SandboxEnded,
    SandboxNotFound,
    ServiceNotFound,
    ServiceNotReady,
    SnapshotNotFound,
    StateConflict,
    Unauthenticated,
)
from forkyard.lifecycle import State


class Json(JSONResponse):
    """In ASCII: what a guest or a client wrote may be half a surrogate pair."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


class Refused(Exception):
    """An answer that is an error, in their words."""

    def __init__(self, status: int, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.more = status, code, message, more


#: The first that fits. Whatever is not here is ours to answer for.
_KNOWN: tuple[tuple[type[ForkyardError], int, str], ...] = (
    (SandboxEnded, 410, "VM_DELETED"),
    (SandboxNotFound, 404, "VM_NOT_FOUND"),
    (SnapshotNotFound, 404, "SNAPSHOT_NOT_FOUND"),
    (BuildNotFound, 404, "NOT_FOUND"),
    (ServiceNotFound, 404, "SERVICE_NOT_FOUND"),
    (ExecNotFound, 404, "NOT_FOUND"),
    (FileMissing, 404, "FILE_NOT_FOUND"),
    (RepoNotFound, 404, "REPO_NOT_FOUND"),
    (RevisionNotFound, 404, "REFERENCE_NOT_FOUND"),
    (DomainNotFound, 404, "VERIFICATION_NOT_FOUND"),
    (NotFound, 404, "NOT_FOUND"),
    (StateConflict, 400, "VM_NOT_RUNNING"),
    (RefConflict, 409, "CONFLICTING_PARENT"),
    (MergeConflict, 409, "CONFLICT"),
    (DomainUnverified, 400, "DOMAIN_OWNERSHIP_NOT_VERIFIED"),
    (FileConflict, 400, "FILES_BAD_REQUEST"),
    (InvalidPath, 400, "INVALID_FILE_PATH"),
    (IdempotencyConflict, 409, "CONFLICT"),
    (Conflict, 409, "CONFLICT"),
    (InvalidRequest, 400, "INVALID_REQUEST"),
    (Unauthenticated, 401, "UNAUTHORIZED"),
    (Forbidden, 403, "FORBIDDEN"),
    (GuestPermissionDenied, 403, "ACCESS_DENIED"),
    (GuestDiskFull, 400, "FILES_BAD_REQUEST"),
    (CommandNotFound, 400, "BAD_REQUEST"),
    (ServiceNotReady, 400, "BAD_REQUEST"),
    (BuildFailed, 500, "VM_SETUP_FAILED"),
    (GuestUnreachable, 503, "SERVICE_UNAVAILABLE"),
    (QuotaExceeded, 403, "VM_LIMIT_EXCEEDED"),
    (NoCapacity, 503, "SERVICE_UNAVAILABLE"),
    (RepoFull, 403, "GIT_REPO_LIMIT_EXCEEDED"),
    (RemoteFailed, 400, "SOURCE_NOT_FOUND"),
    (OperationTimeout, 504, "VM_START_TIMEOUT"),
)


def refusal(error: ForkyardError) -> Refused:
    if isinstance(error, StateConflict) and error.details.get("state") == State.PAUSING:
        return Refused(409, "VM_IS_SUSPENDING", error.message)
    for kind, status, code in _KNOWN:
        if isinstance(error, kind):
            return Refused(status, code, error.message)
    return Refused(500, "INTERNAL_ERROR", error.message)


def answer(refused: Refused) -> Json:
    # `error` is what the published description of the API has, `code` what its clients read.
    body = {"code": refused.code, "error": refused.code, "message": refused.message, **refused.more}
    return Json(body, refused.status)


def not_served(what: str) -> Refused:
    return Refused(501, "SERVICE_UNAVAILABLE", f"{what}: not served by Forkyard; see docs/moving-from-freestyle.md")
