"""Who does something in a sandbox, and where a relative path leads.

Owns: what the guest's own table says of users, remembered for a while. The user of a plain sandbox and root are known
without it.
"""

from __future__ import annotations

import base64
import binascii
import posixpath
import time
from collections import OrderedDict
from dataclasses import dataclass

from starlette.requests import Request

from forkyard.compat.e2b.errors import Failed
from forkyard.control.plane import ControlPlane
from forkyard.errors import FileMissing

TABLE = "/etc/passwd"
REMEMBERED_S = 30.0
_MAX_TABLE_BYTES = 2**20
_MAX_REMEMBERED = 4096


@dataclass(frozen=True)
class User:
    name: str
    workdir: str | None = None  # None: the home
    lives_at: str | None = None  # None: where users live

    @property
    def home(self) -> str:
        return self.lives_at or ("/root" if self.name == "root" else f"/home/{self.name}")

    def path(self, given: object, field: str = "path") -> str:
        if not isinstance(given, str):
            raise Failed("invalid_argument", f"{field} is not a string")
        if "\0" in given:
            raise Failed("invalid_argument", f"{field} has a NUL byte in it")
        if given == "~" or given.startswith("~/"):
            given = given[2:]
        # Not resolved further: only the guest knows where `..` leads after a symlink.
        return posixpath.join(self.home, given) if given else self.home


def of(request: Request) -> User:
    """As `Envd` has found them."""
    user: User = request.state.user
    return user


def unknown(name: str) -> Failed:
    return Failed("unauthenticated", f"invalid username: '{name[:64]}'")


class Users:
    def __init__(self, control: ControlPlane, plain: str) -> None:
        """`plain`: whom every sandbox has."""
        self._control = control
        self._plain = plain
        self._homes: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()

    async def find(self, sandbox_id: str, request: Request, default: User) -> User:
        """`?username=`, `Authorization: Basic base64(user:)`, else the default of the sandbox's template."""
        name = request.query_params.get("username") or _of_header(request)
        if name is not None and name != default.name:
            default = User(name)
        return await self.known(sandbox_id, default)

    async def known(self, sandbox_id: str, user: User) -> User:
        if user.name in ("root", self._plain):
            return user
        return User(user.name, user.workdir, await self._home(sandbox_id, user.name))

    async def _home(self, sandbox_id: str, name: str) -> str:
        at, home = self._homes.get((sandbox_id, name), (0.0, ""))
        if home and time.monotonic() - at < REMEMBERED_S:
            return home
        for line in (await self._table(sandbox_id)).splitlines():
            fields = line.split(":")
            if len(fields) > 5 and name in (fields[0], fields[2]):
                home = fields[5] if fields[5].startswith("/") else "/"
                self._homes[sandbox_id, name] = time.monotonic(), home
                self._homes.move_to_end((sandbox_id, name))
                while len(self._homes) > _MAX_REMEMBERED:
                    self._homes.popitem(last=False)
                return home
        raise unknown(name)

    async def _table(self, sandbox_id: str) -> str:
        found = bytearray()
        try:
            async with (
                self._control.sandboxes.use(sandbox_id) as guest,
                guest.read_file(TABLE, length=_MAX_TABLE_BYTES) as chunks,
            ):
                async for chunk in chunks:
                    found += chunk
        except FileMissing:
            return ""
        return found.decode("utf-8", "replace")


def _of_header(request: Request) -> str | None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(given.strip(), validate=True).decode().partition(":")[0] or None
    except (ValueError, binascii.Error):
        raise Failed("unauthenticated", "the Authorization header is not `Basic base64(user:)`") from None
