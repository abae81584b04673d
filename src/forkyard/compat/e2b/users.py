"""Who does something in a sandbox, and where a relative path leads. Pure."""

from __future__ import annotations

import base64
import binascii
import posixpath
import re
from dataclasses import dataclass

from starlette.requests import Request

from forkyard.compat.e2b.errors import Failed

_NAME = re.compile(r"[a-z_][a-z0-9_.-]{0,31}", re.ASCII)


@dataclass(frozen=True)
class User:
    name: str
    workdir: str | None = None  # None: the home

    @property
    def home(self) -> str:
        return "/root" if self.name == "root" else f"/home/{self.name}"

    def path(self, given: object, field: str = "path") -> str:
        if not isinstance(given, str):
            raise Failed("invalid_argument", f"{field} is not a string")
        if "\0" in given:
            raise Failed("invalid_argument", f"{field} has a NUL byte in it")
        if given == "~" or given.startswith("~/"):
            given = given[2:]
        # Not resolved further: only the guest knows where `..` leads after a symlink.
        return posixpath.join(self.home, given) if given else self.home


def named(name: str) -> User:
    if _NAME.fullmatch(name) is None:
        raise Failed("unauthenticated", f"invalid username: '{name[:64]}'")
    return User(name)


def of_header(request: Request) -> User:
    """`Authorization: Basic base64(user:)`, else whom the template of the sandbox has set (`Envd.serve`)."""
    default: User = request.state.default_user
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return default
    try:
        name = base64.b64decode(given.strip(), validate=True).decode().partition(":")[0]
    except (ValueError, binascii.Error):
        raise Failed("unauthenticated", "the Authorization header is not `Basic base64(user:)`") from None
    return named(name) if name else default
