"""The table: which request of Freestyle's contract is answered by what, and what an identity needs for it.

Paths are matched as they were sent. A parameter is one segment in which slashes are quoted; the last one of a route may
also have plain ones, as people write them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from starlette.responses import Response

from forkyard.builds.builds import Builds
from forkyard.compat.freestyle.account import Account
from forkyard.compat.freestyle.background import Background
from forkyard.compat.freestyle.calls import Call
from forkyard.compat.freestyle.errors import Refused, not_served
from forkyard.compat.freestyle.inside import Inside
from forkyard.compat.freestyle.pty import Pty
from forkyard.compat.freestyle.snapshots import Snapshots
from forkyard.compat.freestyle.systemd import Systemd
from forkyard.compat.freestyle.terminals import Terminals
from forkyard.compat.freestyle.vms import Vms
from forkyard.control.plane import ControlPlane
from forkyard.git.hosting import GitHosting

#: What is Freestyle's. `/git/v1` is no repository of ours: nothing but git's own paths is below a name.
ROOTS = re.compile(
    r"/(v1/(vms|vpcs|cron)|git/v1/(repo|identity)|(identity|auth|domains|dns|observability|web)/v1|execute/v[0-9]+)(/|$)"
)
#: What an identity needs. `key`: no identity may; `vm`: permission on that VM, as that user.
Need = Literal["key", "anyone", "vm", "read", "write"]
Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    handler: Handler
    need: Need = "key"

    @property
    def action(self) -> str:
        """In the audit log."""
        return f"freestyle.{self.method.lower()} {self.path}"[:64]


class Parts:
    """The handlers, by what they are about."""

    def __init__(self, control: ControlPlane, hosting: GitHosting, builds: Builds) -> None:
        self.background = Background()
        self.account = Account()
        self.vms = Vms(control, hosting, builds, self.background)
        self.inside = Inside(control, self.vms)
        self.terminals = Terminals(control, self.vms)
        self.pty = Pty(control)
        self.systemd = Systemd(control, self.vms)
        self.snapshots = Snapshots(control, builds, self.vms, self.background)

    async def aclose(self) -> None:
        await self.background.aclose()


def _routes(parts: Parts) -> list[Route]:
    vm, pty = "/v1/vms/{vm}", "/v1/vms/{vm}/pty"
    vms, inside, systemd, snapshots = parts.vms, parts.inside, parts.systemd, parts.snapshots
    return [
        Route("POST", "/v1/vms/snapshots", snapshots.ensure),
        Route("GET", "/v1/vms/snapshots", snapshots.listed),
        Route("GET", "/v1/vms/snapshots/{id}", snapshots.get),
        Route("PATCH", "/v1/vms/snapshots/{id}", snapshots.rename),
        Route("DELETE", "/v1/vms/snapshots/{id}", snapshots.delete),
        Route("GET", "/v1/vms/builds/{id}", snapshots.build),
        Route("GET", "/v1/vms/builds/{id}/phases", snapshots.phases),
        Route("POST", "/v1/vms", vms.create),
        Route("GET", "/v1/vms", vms.listed),
        Route("GET", vm, vms.info, "vm"),
        Route("DELETE", vm, vms.delete),
        Route("POST", f"{vm}/start", vms.start),
        Route("POST", f"{vm}/suspend", vms.suspend),
        Route("POST", f"{vm}/stop", vms.stop),
        Route("POST", f"{vm}/kill", vms.kill),
        Route("POST", f"{vm}/await", vms.wait),
        Route("POST", f"{vm}/fork", vms.fork),
        Route("POST", f"{vm}/snapshot", snapshots.take),
        Route("POST", f"{vm}/optimize", vms.optimize),
        Route("POST", f"{vm}/resize", vms.resize),
        Route("GET", f"{vm}/build", vms.build),
        Route("POST", f"{vm}/exec-await", inside.exec, "vm"),
        Route("GET", f"{vm}/files/{{path}}", inside.read, "vm"),
        Route("PUT", f"{vm}/files/{{path}}", inside.write, "vm"),
        Route("POST", f"{vm}/watch-files", inside.watch, "vm"),
        Route("GET", f"{vm}/stats/stream", inside.stats, "vm"),
        Route("GET", f"{vm}/terminals", parts.terminals.listed, "vm"),
        Route("GET", f"{vm}/terminals/{{terminal}}/logs", parts.terminals.logs, "vm"),
        Route("GET", f"{vm}/terminals/{{terminal}}/xterm-256color", parts.terminals.output, "vm"),
        Route("WEBSOCKET", pty, _websocket, "vm"),
        Route("GET", pty, _websocket, "vm"),
        Route("GET", f"{pty}/sessions", parts.pty.listed, "vm"),
        Route("WEBSOCKET", f"{pty}/sessions/{{session}}", _websocket, "vm"),
        Route("DELETE", f"{pty}/sessions/{{session}}", parts.pty.close, "vm"),
        Route("GET", f"{vm}/systemd/services", systemd.listed, "vm"),
        Route("POST", f"{vm}/systemd/services", systemd.create, "vm"),
        Route("DELETE", f"{vm}/systemd/services/{{service}}", systemd.delete, "vm"),
        Route("GET", f"{vm}/systemd/services/{{service}}/status", systemd.status, "vm"),
        Route("GET", f"{vm}/systemd/services/{{service}}/logs", systemd.logs, "vm"),
        Route("POST", f"{vm}/systemd/start", systemd.start, "vm"),
        Route("POST", f"{vm}/systemd/stop", systemd.stop, "vm"),
        Route("POST", f"{vm}/systemd/restart", systemd.restart, "vm"),
        Route("GET", "/auth/v1/whoami", parts.account.whoami, "anyone"),
        Route("GET", "/auth/v1/background-requests/{id}", parts.background.look),
    ]


async def _websocket(_: Call) -> Response:
    raise Refused(426, "BAD_REQUEST", "this is a WebSocket; open it with ws:// or wss://")


class Table:
    def __init__(self, parts: Parts) -> None:
        self._routes = [(_pattern(route.path), route) for route in _routes(parts)]

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        other = False
        for pattern, route in self._routes:
            found = pattern.fullmatch(path)
            if found is None:
                continue
            if route.method == method:
                return route, {name: unquote(value) for name, value in found.groupdict().items()}
            other = True
        if other:
            raise Refused(405, "BAD_REQUEST", f"{method} is not served on {path[:200]}")
        raise not_served(f"{method} {path[:200]}")


def _pattern(path: str) -> re.Pattern[str]:
    """A trailing slash is as good as none, but for what is a path itself."""
    head, brace, last = path.rpartition("/{")
    if not brace or not last.endswith("}"):
        return re.compile(_segments(path) + "/?")
    name = last.removesuffix("}")
    anything = ".*" if name in ("path", "branch", "tag") else "[^/]+"
    return re.compile(f"{_segments(head)}/(?P<{name}>{anything})" + ("" if anything == ".*" else "/?"))


def _segments(path: str) -> str:
    return re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)
