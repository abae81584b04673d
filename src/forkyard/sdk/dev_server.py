"""`DevServer(…)`: what `fy.dev_servers.create` makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from forkyard.models.dev_servers import DevServerCreate, OnPush
from forkyard.sdk import validation
from forkyard.sdk.spec import checked


@dataclass(frozen=True)
class DevServer:
    """A repository that is to be served: a hosted one (its name), or a url. `fy.dev_servers.create(DevServer("site"))`."""

    repo: str | None = None
    template_repo: str | None = None
    """Hosted, or a url: `repo` is made of it first."""
    command: str | None = None
    """What starts it. Default: found out from its files (bun, pnpm, yarn, npm, uv, pip), as is how to install it."""
    port: int = 3000
    """It is told of it as $PORT."""
    _: KW_ONLY
    install: str | None = None
    """What installs it; empty: nothing."""
    branch: str | None = None
    path: str = "/repo"
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    on_push: OnPush = "restart"
    """What a push to its branch does: `restart`, `pull` (for servers that see changed files themselves), or `ignore`."""
    secret: str | None = None
    name: str | None = None
    ready_timeout_s: float = 300.0
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    """Its machine, as for `sandboxes.create`: `memory_mib`, `spec`, `network`, `secrets` …"""

    def request(self) -> DevServerCreate:
        """Checked. `InvalidRequest` names what is wrong."""
        machine = {"persistence": "persistent", **self.sandbox}
        if machine.get("spec") is not None:
            machine["spec"] = checked(machine["spec"])
        if machine.get("network") is not None:
            machine["network"] = validation.network_policy(machine["network"])
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return validation.dev_server_create(**{**given, "env": dict(self.env), "sandbox": machine})
