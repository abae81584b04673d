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
from forkyard.builds.runs import Runs
from forkyard.builds.schedules import Schedules
from forkyard.compat.freestyle.account import Account
from forkyard.compat.freestyle.background import Background
from forkyard.compat.freestyle.calls import Call
from forkyard.compat.freestyle.domains import Domains
from forkyard.compat.freestyle.errors import Refused, not_served
from forkyard.compat.freestyle.git import Git
from forkyard.compat.freestyle.git_automation import GitAutomation
from forkyard.compat.freestyle.git_content import GitContent
from forkyard.compat.freestyle.identities import Identities
from forkyard.compat.freestyle.inside import Inside
from forkyard.compat.freestyle.pty import Pty
from forkyard.compat.freestyle.serverless import Serverless
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
#: What an identity needs. `key`: no identity may. Of a VM: to `look`, to do something as that `user` or as `root`. Of a
#: repository: to `read` or `write` it.
Need = Literal["key", "anyone", "look", "user", "root", "read", "write"]
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

    def __init__(
        self, control: ControlPlane, hosting: GitHosting, builds: Builds, runs: Runs, schedules: Schedules
    ) -> None:
        self.background = Background()
        self.account = Account(control, builds, runs, self.background)
        self.serverless = Serverless(runs, schedules)
        self.domains = Domains(control)
        self.vms = Vms(control, hosting, builds, self.background, self.domains)
        self.inside = Inside(control, self.vms)
        self.terminals = Terminals(control, self.vms)
        self.pty = Pty(control, self.vms)
        self.systemd = Systemd(control, self.vms)
        self.git = Git(hosting)
        self.content = GitContent(hosting, self.git)
        self.automation = GitAutomation(hosting, self.git)
        self.identities = Identities(control, hosting)
        self.snapshots = Snapshots(control, builds, self.vms, self.background)

    async def aclose(self) -> None:
        await self.background.aclose()


def all_routes(parts: Parts) -> list[Route]:
    return [*_vms(parts), *_git(parts), *_identities(parts), *_domains(parts), *_serverless(parts)]


def _serverless(parts: Parts) -> list[Route]:
    runs, one, serverless = "/execute/v1/deployments", "/v1/cron/schedules/{id}", parts.serverless
    return [
        Route("POST", "/execute/v3/script", serverless.run),
        Route("GET", runs, serverless.listed),
        Route("GET", f"{runs}/{{id}}", serverless.get),
        Route("GET", f"{runs}/{{id}}/output", serverless.output),
        Route("GET", "/v1/cron/schedules", serverless.schedules),
        Route("POST", "/v1/cron/schedules", serverless.create_schedule),
        Route("GET", one, serverless.schedule),
        Route("PATCH", one, serverless.update_schedule),
        Route("DELETE", one, serverless.delete_schedule),
        Route("GET", f"{one}/executions", serverless.executions),
        Route("GET", f"{one}/success-rate", serverless.success_rate),
        Route("GET", f"{one}/metrics-timeline", serverless.timeline),
        Route("GET", "/observability/v1/logs", parts.account.logs),
    ]


def _domains(parts: Parts) -> list[Route]:
    verifications, mapping, domains = "/domains/v1/verifications", "/domains/v1/mappings/{domain}", parts.domains
    return [
        Route("GET", verifications, domains.verifications),
        Route("POST", verifications, domains.verify),
        Route("PUT", verifications, domains.complete),
        Route("DELETE", verifications, domains.cancel),
        Route("GET", "/domains/v1/domains", domains.listed),
        Route("POST", "/domains/v1/certs/{domain}/wildcard", domains.certificate),
        Route("GET", "/domains/v1/mappings", domains.mappings),
        Route("POST", mapping, domains.map),
        Route("DELETE", mapping, domains.unmap),
    ]


def _git(parts: Parts) -> list[Route]:
    repo, git, content = "/git/v1/repo/{repo}", parts.git, parts.content
    automation = parts.automation
    return [
        Route("POST", "/git/v1/repo", git.create),
        Route("GET", "/git/v1/repo", git.listed, "anyone"),
        Route("GET", repo, git.get, "read"),
        Route("DELETE", repo, git.delete),
        Route("GET", f"{repo}/default-branch", git.default_branch, "read"),
        Route("PUT", f"{repo}/default-branch", git.set_default_branch),
        Route("GET", f"{repo}/visibility", git.visibility, "read"),
        Route("PUT", f"{repo}/visibility", git.set_visibility),
        Route("GET", f"{repo}/git/refs/heads/{{branch}}", git.branch, "read"),
        Route("POST", f"{repo}/git/refs/heads/{{branch}}", git.create_branch, "write"),
        Route("GET", f"{repo}/git/refs/tags/{{tag}}", git.tag, "read"),
        Route("GET", f"{repo}/git/tags/{{sha}}", git.tag_by_sha, "read"),
        Route("GET", f"{repo}/git/commits", git.commits, "read"),
        Route("GET", f"{repo}/git/commits/{{sha}}", git.commit, "read"),
        Route("POST", f"{repo}/commits", git.create_commit, "write"),
        Route("GET", f"{repo}/git/blobs/{{sha}}", content.blob, "read"),
        Route("GET", f"{repo}/git/trees/{{sha}}", content.tree, "read"),
        Route("GET", f"{repo}/contents/{{path}}", content.contents, "read"),
        Route("GET", f"{repo}/tarball", content.tarball, "read"),
        Route("GET", f"{repo}/zip", content.zip, "read"),
        Route("GET", f"{repo}/compare", content.compare, "read"),
        Route("GET", f"{repo}/search", content.search, "read"),
        Route("GET", f"{repo}/search/files", content.search_files, "read"),
        Route("GET", f"{repo}/search/commits", content.search_commits, "read"),
        Route("GET", f"{repo}/search/diffs", content.search_diffs, "read"),
        Route("GET", f"{repo}/trigger", automation.listed),
        Route("POST", f"{repo}/trigger", automation.create),
        Route("DELETE", f"{repo}/trigger/{{trigger}}", automation.delete),
        Route("GET", f"{repo}/github-sync", automation.mirror),
        Route("POST", f"{repo}/github-sync", automation.set_mirror),
        Route("DELETE", f"{repo}/github-sync", automation.unset_mirror),
    ]


def _identities(parts: Parts) -> list[Route]:
    one, found = "/identity/v1/identities/{identity}", parts.identities
    repo, vm = f"{one}/permissions/git/{{repo}}", f"{one}/permissions/vm/{{vm_id}}"
    return [
        Route("GET", "/auth/v1/whoami", parts.account.whoami, "anyone"),
        Route("GET", "/auth/v1/background-requests/{id}", parts.background.look),
        Route("GET", "/identity/v1/identities", found.listed),
        Route("POST", "/identity/v1/identities", found.create),
        Route("DELETE", one, found.delete),
        Route("GET", f"{one}/tokens", found.tokens),
        Route("POST", f"{one}/tokens", found.create_token),
        Route("DELETE", f"{one}/tokens/{{token}}", found.revoke_token),
        Route("GET", f"{one}/permissions/git", found.repos),
        Route("GET", repo, found.repo),
        Route("POST", repo, found.grant_repo),
        Route("PUT", repo, found.update_repo),
        Route("DELETE", repo, found.revoke_repo),
        Route("GET", f"{one}/permissions/vm", found.vms),
        Route("GET", vm, found.vm),
        Route("POST", vm, found.grant_vm),
        Route("PUT", vm, found.update_vm),
        Route("DELETE", vm, found.revoke_vm),
    ]


def _vms(parts: Parts) -> list[Route]:
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
        Route("GET", vm, vms.info, "look"),
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
        Route("POST", f"{vm}/exec-await", inside.exec, "user"),
        Route("GET", f"{vm}/files/{{path}}", inside.read, "root"),
        Route("PUT", f"{vm}/files/{{path}}", inside.write, "root"),
        Route("POST", f"{vm}/watch-files", inside.watch, "root"),
        Route("GET", f"{vm}/stats/stream", inside.stats, "root"),
        Route("GET", f"{vm}/terminals", parts.terminals.listed, "root"),
        Route("GET", f"{vm}/terminals/{{terminal}}/logs", parts.terminals.logs, "root"),
        Route("GET", f"{vm}/terminals/{{terminal}}/xterm-256color", parts.terminals.output, "root"),
        Route("WEBSOCKET", pty, _websocket, "user"),
        Route("GET", pty, _websocket, "user"),
        Route("GET", f"{pty}/sessions", parts.pty.listed, "look"),
        Route("WEBSOCKET", f"{pty}/sessions/{{session}}", _websocket, "user"),
        Route("DELETE", f"{pty}/sessions/{{session}}", parts.pty.close, "root"),
        Route("GET", f"{vm}/systemd/services", systemd.listed, "root"),
        Route("POST", f"{vm}/systemd/services", systemd.create, "root"),
        Route("DELETE", f"{vm}/systemd/services/{{service}}", systemd.delete, "root"),
        Route("GET", f"{vm}/systemd/services/{{service}}/status", systemd.status, "root"),
        Route("GET", f"{vm}/systemd/services/{{service}}/logs", systemd.logs, "root"),
        Route("POST", f"{vm}/systemd/start", systemd.start, "root"),
        Route("POST", f"{vm}/systemd/stop", systemd.stop, "root"),
        Route("POST", f"{vm}/systemd/restart", systemd.restart, "root"),
    ]


async def _websocket(_: Call) -> Response:
    raise Refused(426, "BAD_REQUEST", "this is a WebSocket; open it with ws:// or wss://")


class Table:
    def __init__(self, parts: Parts) -> None:
        self._routes = [(_pattern(route.path), route) for route in all_routes(parts)]

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
