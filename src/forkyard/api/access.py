"""What an identity may do through the API. Closed unless it is in the table below; API keys may do everything.

Owns: which route needs what, and the line in the audit log. Whether it was granted is `control.identities`' to say.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from forkyard.control.identities import Principal
from forkyard.control.plane import ControlPlane
from forkyard.errors import Forbidden, ForkyardError, HostFailure
from forkyard.git.hosting import GitHosting

Need = Literal["anyone", "look", "body user", "query user", "exec user", "root", "repo read", "repo write"]

PREFIX = "/api/v1"
_S = "/sandboxes/{sandbox_id}"
_E = _S + "/execs/{exec_id}"
_R = "/git/repos/{repo}"
#: Everything of a repository not named here is refused, as with the rest: its settings are not for those who use it.
NEEDS: dict[tuple[str, str], tuple[Need, str]] = {
    ("GET", "/whoami"): ("anyone", "whoami"),
    ("GET", "/git/repos"): ("anyone", "git.list"),
    ("GET", _S): ("look", "sandbox.get"),
    ("GET", f"{_S}/logs"): ("look", "sandbox.logs"),
    ("GET", f"{_S}/usage"): ("look", "sandbox.usage"),
    ("GET", f"{_S}/usage/history"): ("look", "sandbox.usage"),
    ("POST", f"{_S}/exec"): ("body user", "sandbox.exec"),
    ("POST", f"{_S}/execs"): ("body user", "sandbox.exec"),
    ("GET", f"{_S}/execs"): ("look", "sandbox.execs"),
    ("GET", _E): ("exec user", "sandbox.exec.get"),
    ("GET", f"{_E}/output"): ("exec user", "sandbox.exec.output"),
    ("POST", f"{_E}/stdin"): ("exec user", "sandbox.exec.stdin"),
    ("POST", f"{_E}/signal"): ("exec user", "sandbox.exec.signal"),
    ("POST", f"{_E}/resize"): ("exec user", "sandbox.exec.resize"),
    ("POST", f"{_S}/code"): ("root", "sandbox.code"),
    **{
        (method, f"{_S}/contexts{rest}"): ("root", f"sandbox.contexts.{method.lower()}")
        for method, rest in (
            ("GET", ""),
            ("POST", ""),
            ("GET", "/{context_id}"),
            ("DELETE", "/{context_id}"),
            ("POST", "/{context_id}/restart"),
            ("POST", "/{context_id}/interrupt"),
        )
    },
    ("WEBSOCKET", f"{_S}/terminal"): ("query user", "sandbox.terminal"),
    **{
        (method, f"{_S}/files{rest}"): ("root", f"sandbox.files.{method.lower()}")
        for method in ("GET", "PUT", "POST", "DELETE")
        for rest in ("", "/tar", "/stat", "/exists", "/list", "/mkdir", "/move", "/chmod", "/watch")
    },
    ("GET", _R): ("repo read", "git.get"),
    **{
        ("GET", f"{_R}/{rest}"): ("repo read", "git.read")
        for rest in (
            "branches",
            "branches/{branch:path}",
            "tags",
            "tags/{tag:path}",
            "contents",
            "raw",
            "archive",
            "tree",
            "blobs/{sha}",
            "commits",
            "commits/{rev:path}",
            "compare",
            "search",
            "search/files",
            "search/commits",
            "search/diffs",
        )
    },
    **{
        (method, f"{_R}/{rest}"): ("repo write", action)
        for method, rest, action in (
            ("POST", "branches", "git.branch.create"),
            ("PUT", "branches/{branch:path}", "git.branch.update"),
            ("DELETE", "branches/{branch:path}", "git.branch.delete"),
            ("POST", "tags", "git.tag.create"),
            ("DELETE", "tags/{tag:path}", "git.tag.delete"),
            ("POST", "commits", "git.commit"),
            ("POST", "merge", "git.merge"),
            ("POST", "cherry-pick", "git.cherry_pick"),
        )
    },
}


async def authorize(connection: HTTPConnection) -> None:
    """A dependency of every route."""
    who: Principal | None = connection.scope.get("state", {}).get("principal")
    if who is None or who.admin:  # without one it is a route that is open to all
        return
    control: ControlPlane = connection.app.state.control
    method = connection.scope.get("method", "WEBSOCKET")
    # Releases of FastAPI differ in whether a route knows the prefix it is included under.
    path = connection.scope["route"].path.removeprefix(PREFIX)
    need, action = NEEDS.get((method, path), (None, f"{method} {connection.url.path}"[:64]))
    params = connection.path_params
    resource = str(params.get("sandbox_id") or params.get("repo") or connection.url.path)
    try:
        if need is None:
            raise Forbidden(f"{who.name!r} may not do this; it takes an API key")
        resource = await _check(connection, control, who, need, resource)
    except ForkyardError:
        await control.identities.record(who, action, resource, allowed=False, address=address_of(connection))
        raise
    await control.identities.record(who, action, resource, address=address_of(connection))


async def _check(connection: HTTPConnection, control: ControlPlane, who: Principal, need: Need, resource: str) -> str:
    if need in ("repo read", "repo write"):
        hosting: GitHosting = connection.app.state.git
        repo = await hosting.repositories.get(resource)
        public = repo.record.visibility == "public"
        await control.identities.authorize_repo(
            who, "write" if need == "repo write" else "read", repo.id, public=public
        )
        return repo.id
    if need != "anyone":
        await control.identities.authorize_sandbox(who, resource)
        user = await _user(connection, control, need, resource)
        await control.identities.authorize_sandbox(who, resource, user)
    return resource


async def _user(connection: HTTPConnection, control: ControlPlane, need: Need, sandbox_id: str) -> str | None:
    exec_id = connection.path_params.get("exec_id")
    if need == "query user":
        exec_id = connection.query_params.get("exec_id")
        if exec_id is None:
            return connection.query_params.get("user") or "root"
    if need in ("exec user", "query user"):
        # Who may be `user` must not type into a shell of root's.
        async with control.sandboxes.use(sandbox_id) as guest:
            return (await guest.exec_info(str(exec_id))).user
    if need == "body user":
        assert isinstance(connection, Request)
        body: Any = json.loads(await connection.body())
        return str(body.get("user") or "root") if isinstance(body, dict) else "root"
    return "root" if need == "root" else None


def address_of(connection: HTTPConnection) -> str | None:
    return None if connection.client is None else connection.client.host


async def _principal(request: Request) -> Principal:
    found: Principal = request.state.principal
    return found


async def hosting_of(request: Request) -> GitHosting:
    found: GitHosting | None = request.app.state.git
    if found is None:
        raise HostFailure("this daemon hosts no repositories")
    return found


#: Who asks.
By = Annotated[Principal, Depends(_principal)]
Hosting = Annotated[GitHosting, Depends(hosting_of)]
