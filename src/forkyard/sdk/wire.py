"""The HTTP side of the wire: answers to errors, bytes to NDJSON, and how long to wait before trying again. No I/O."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import httpx
from pydantic import BaseModel

from forkyard.errors import (
    BY_CODE,
    DaemonUnreachable,
    ForkyardError,
    InternalError,
    OperationTimeout,
    from_problem,
)

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R")

#: An open stream carries at least a keep-alive line every 15 s; after this silence the connection is taken for dead.
STREAM_SILENCE_S = 60.0
CONNECT_S = 10.0
#: For ordinary calls. The daemon has deadlines of its own and answers earlier.
ANSWER_S = 120.0
#: A create may have to build the image and the template of a new shape first.
CREATE_S = 1800.0
#: Fork, pause, resume and their like move memory, or boot a machine.
CHANGE_S = 900.0
#: Items asked for at once.
PAGE_ITEMS = 500

_BY_STATUS = {
    400: "guest_failure",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    409: "conflict",
    422: "invalid_request",
    503: "daemon_unreachable",
    504: "timeout",
}


def segment(name: str) -> str:
    """One part of a path, whatever is in it."""
    return quote(name, safe="") or "-"


def timeouts(read_s: float | None) -> httpx.Timeout:
    return httpx.Timeout(connect=CONNECT_S, read=read_s, write=ANSWER_S, pool=None)


def error_of(status: int, body: bytes, where: str) -> ForkyardError:
    """The error an answer carries. One that is no problem+json did not come from a Forkyard daemon: say so."""
    try:
        problem = json.loads(body)
    except ValueError:
        problem = None
    if isinstance(problem, dict) and "code" in problem:
        return from_problem(problem)
    cls = BY_CODE.get(_BY_STATUS.get(status, ""), InternalError)
    text = body[:200].decode("utf-8", "replace").strip() or "no text"
    return cls(f"{where} answered HTTP {status} ({text}). Is this address a Forkyard daemon's?", http_status=status)


def broken(exc: httpx.HTTPError, where: str) -> ForkyardError:
    if isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout):
        return DaemonUnreachable(
            f"No Forkyard daemon answers at {where}. Start one with `forkyard up`, or set FORKYARD_URL.", where=where
        )
    if isinstance(exc, httpx.TimeoutException):
        return OperationTimeout(f"The daemon at {where} did not answer in time ({type(exc).__name__}).", where=where)
    why = str(exc) or type(exc).__name__
    return DaemonUnreachable(f"The connection to the daemon at {where} broke: {why}.", where=where)


def never_sent(exc: Exception) -> bool:
    """The request did not reach a daemon, so that sending it again cannot do anything twice."""
    return isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout)


def path_with_query(path: str, params: Mapping[str, Any] | None) -> str:
    """Absent is absent; booleans as the API spells them. A lone surrogate stands for a byte that is no UTF-8."""
    plain = {
        key: str(value).lower() if isinstance(value, bool) else value
        for key, value in (params or {}).items()
        if value is not None
    }
    return f"{path}?{urlencode(plain, doseq=True, errors='surrogateescape')}" if plain else path


def json_body(body: object) -> bytes:
    return json.dumps(body).encode("ascii")


def parse(model: type[M], content: bytes) -> M:
    """An answer as its wire type. Not pydantic's own JSON, which refuses names of files that are no UTF-8."""
    return _checked(lambda: model.model_validate(json.loads(content)), content)


def parse_list(model: type[M], content: bytes) -> list[M]:
    return _checked(lambda: [model.model_validate(item) for item in json.loads(content)], content)


def _checked(read: Callable[[], R], content: bytes) -> R:
    try:
        return read()
    except (ValueError, TypeError) as exc:
        raise InternalError(
            f"The daemon's answer {content[:80]!r} is not understood. Do its version and this client's fit? {exc}"
        ) from exc


class Lines:
    """Bytes in, whole NDJSON documents out. Empty lines are keep-alives and come out as None."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[dict[str, Any] | None]:
        if b"\n" not in data:
            self._rest.append(data)
            return
        first, *others = data.split(b"\n")
        whole = [b"".join([*self._rest, first]), *others[:-1]]
        self._rest = [others[-1]]
        for line in whole:
            if not line.strip():
                yield None
                continue
            yield json_object(line)


def json_object(text: bytes | str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise InternalError(f"The daemon sent {text[:80]!r}, which is no JSON object. Is this a Forkyard daemon?")
    return document


class Patience:
    """Pauses between attempts: short at first, then longer, until `limit_s` since the first failure have passed."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.reset()

    def reset(self) -> None:
        """An attempt succeeded."""
        self._began: float | None = None
        self._pause_s = 0.05

    def next_pause_s(self) -> float | None:
        """None: give up."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if now - self._began + self._pause_s > self._limit_s:
            return None
        pause_s, self._pause_s = self._pause_s, min(1.0, self._pause_s * 2)
        return pause_s
