# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""Dev servers: repositories that are installed and served, and reloaded when they are pushed to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from forkyard.models import Page, SandboxInfo
from forkyard.models.dev_servers import DevServerInfo, DevServerLogs, OnPush
from forkyard.sdk import wire
from forkyard.sdk._sync.images import send_ahead
from forkyard.sdk._sync.sandbox import Sandbox
from forkyard.sdk._sync.transport import Transport
from forkyard.sdk.dev_server import DevServer


class RunningDevServer:
    """A repository that is served from a sandbox. Leaving its `with` block deletes it."""

    def __init__(self, transport: Transport, info: DevServerInfo) -> None:
        self._transport = transport
        self._path = f"/dev-servers/{wire.segment(info.id)}"
        self.info = info
        """As the daemon last reported it; `refresh()` asks again."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id!r}, url={self.url!r})"

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def url(self) -> str:
        """Its preview."""
        return self.info.url

    def sandbox(self) -> Sandbox:
        """The machine it runs in: to look around, to fork it with the server running."""
        answer = self._transport.request("GET", f"/sandboxes/{wire.segment(self.info.sandbox_id)}")
        return Sandbox(self._transport, wire.parse(SandboxInfo, answer.content))

    def refresh(self) -> DevServerInfo:
        return self._asked("GET", self._path)

    def reload(self) -> DevServerInfo:
        """Fetch the head of its branch, install if a manifest has changed, restart. `DevServerFailed` if changes in the
        sandbox are in the way."""
        return self._asked("POST", f"{self._path}/reload", timeout_s=wire.CREATE_S)

    def logs(self, *, lines: int = 100) -> str:
        """The end of what it has printed."""
        answer = self._transport.request("GET", f"{self._path}/logs", params={"lines": lines})
        return wire.parse(DevServerLogs, answer.content).log

    def delete(self) -> None:
        """With its sandbox. The repository stays."""
        self._transport.request("DELETE", self._path, timeout_s=wire.CHANGE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.delete()

    def _asked(self, method: str, path: str, timeout_s: float = wire.ANSWER_S) -> DevServerInfo:
        answer = self._transport.request(method, path, timeout_s=timeout_s)
        self.info = wire.parse(DevServerInfo, answer.content)
        return self.info


class DevServers:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        repo: str | DevServer | None = None,
        *,
        template_repo: str | None = None,
        branch: str | None = None,
        command: str | None = None,
        install: str | None = None,
        port: int | None = None,
        path: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        on_push: OnPush | None = None,
        secret: str | None = None,
        name: str | None = None,
        ready_timeout_s: float | None = None,
        sandbox: Mapping[str, Any] | None = None,
        timeout_s: float = wire.CREATE_S,
    ) -> RunningDevServer:
        """Serve a repository: a hosted one (its name), or a url. Returns when it answers.

        With `template_repo` (hosted, or a url), `repo` is made of it first. How to install and start it is found out from
        its files (bun, pnpm, yarn, npm, uv, pip), unless `install` or `command` say so; it is told its `port` as $PORT
        (3000). A push to its `branch` reloads it: `restart` (the default), `pull` (for servers that see changed files
        themselves), or `ignore`. `sandbox`: of the machine, as for `sandboxes.create`: `memory_mib`, `spec`, `network`,
        `secrets` … All of it may be said as a `DevServer` instead; what stands beside one goes before it.
        """
        options: dict[str, Any] = {
            "template_repo": template_repo,
            "branch": branch,
            "command": command,
            "install": install,
            "port": port,
            "path": path,
            "user": user,
            "env": env,
            "on_push": on_push,
            "secret": secret,
            "name": name,
            "ready_timeout_s": ready_timeout_s,
            "sandbox": sandbox,
        }
        given = {name: value for name, value in options.items() if value is not None}
        server = replace(repo, **given) if isinstance(repo, DevServer) else DevServer(repo, **given)
        request = server.request()
        if (spec := server.sandbox.get("spec")) is not None:
            send_ahead(self._transport, spec)
        body = request.model_dump(mode="json", exclude_unset=True)
        answer = self._transport.request("POST", "/dev-servers", body=body, timeout_s=timeout_s)
        return RunningDevServer(self._transport, wire.parse(DevServerInfo, answer.content))

    def get(self, id_or_name: str) -> RunningDevServer:
        answer = self._transport.request("GET", f"/dev-servers/{wire.segment(id_or_name)}")
        return RunningDevServer(self._transport, wire.parse(DevServerInfo, answer.content))

    def list(self) -> list[RunningDevServer]:
        """Newest first."""
        answer = self._transport.request("GET", "/dev-servers")
        return [
            RunningDevServer(self._transport, info) for info in wire.parse(Page[DevServerInfo], answer.content).items
        ]

    def delete(self, id_or_name: str) -> None:
        """With its sandbox. The repository stays."""
        self._transport.request("DELETE", f"/dev-servers/{wire.segment(id_or_name)}", timeout_s=wire.CHANGE_S)
