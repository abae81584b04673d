"""One request, as handlers see it: who asks, what the path said, a body that was checked."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from forkyard.compat.freestyle.errors import Json, Refused
from forkyard.control.identities import Principal

#: Files come inside the JSON, in base64.
MAX_BODY_BYTES = 96 * 2**20
#: There is one account: this daemon.
ACCOUNT = "forkyard"
USER_HEADER = "x-freestyle-vm-linux-user-id"
_USER = re.compile(r"[a-z_][a-z0-9_.-]{0,31}", re.ASCII)
M = TypeVar("M", bound="Body")


class Body(BaseModel):
    """What a client sends beyond these fields is ignored, as there."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)


class Nothing(Body):
    pass


@dataclass(frozen=True)
class Call:
    request: Request
    who: Principal
    path: dict[str, str]

    @property
    def user(self) -> str:
        """The Linux user it is for."""
        given = self.request.headers.get(USER_HEADER, "root")
        if _USER.fullmatch(given) is None:
            raise Refused(404, "USER_NOT_FOUND", f"{given[:64]!r} is no name of a user")
        return given

    def query(self, name: str) -> str | None:
        """What is not there, or empty, was not asked for."""
        return self.request.query_params.get(name) or None

    def number(self, name: str, default: int, least: int = 0, most: int = 10**9) -> int:
        given = self.query(name)
        if given is None:
            return default
        if not given.isascii() or not given.isdigit() or len(given) > 12 or not least <= int(given) <= most:
            raise Refused(400, "INVALID_REQUEST", f"{name} is a number from {least} to {most}")
        return int(given)

    def flag(self, name: str, default: bool = False) -> bool:
        given = self.query(name)
        return default if given is None else given.lower() in ("true", "1")

    async def body(self, model: type[M], code: str = "INVALID_REQUEST") -> M:
        """No body is an empty one. `code`: what a wrong one is called."""
        raw = bytearray()
        async for chunk in self.request.stream():
            raw += chunk
            if len(raw) > MAX_BODY_BYTES:
                raise Refused(413, code, f"a body has at most {MAX_BODY_BYTES} bytes")
        try:
            content = json.loads(raw) if raw.strip() else {}
        except (ValueError, RecursionError):
            raise Refused(400, code, "the body is not JSON") from None
        if not isinstance(content, dict):
            raise Refused(400, code, "the body is not a JSON object")
        return parsed(model, content, code)


def parsed(model: type[M], content: Any, code: str = "INVALID_REQUEST") -> M:
    with ours(code):
        return model.model_validate(content)
    raise AssertionError("unreachable")


@contextlib.contextmanager
def ours(code: str = "INVALID_REQUEST") -> Iterator[None]:
    """What our own models refuse is a bad request of theirs."""
    try:
        yield
    except ValidationError as error:
        raise Refused(400, code, _said(error)) from None


def _said(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}"[:500].encode("utf-8", "replace").decode()


def done(content: Any = None, status: int = 200) -> Json:
    """Every answer has a body: clients parse it."""
    return Json({} if content is None else content, status)


def time_of(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
