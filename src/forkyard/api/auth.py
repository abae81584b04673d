"""The gate: who may come in.

Owns: API keys and tokens of identities on requests (`Authorization: Bearer KEY`, `X-API-Key: KEY`, or `?key=` for
WebSockets, where browsers cannot set headers), and the check of the Host header. Everything is closed but `OPEN`. What
an identity may do once it is in: `api.access`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Collection

from starlette.datastructures import Headers, QueryParams
from starlette.types import ASGIApp, Receive, Scope, Send

from forkyard.control.plane import ControlPlane
from forkyard.errors import Forbidden, OperationTimeout

PREFIX = "/api/v1"
JWKS = "/.well-known/jwks.json"
OPEN = frozenset({"/", JWKS, f"{PREFIX}/health", f"{PREFIX}/openapi.json", f"{PREFIX}/docs"})
#: Git clients know nothing of API keys; they are let in by `api.git_http`.
OWN_CREDENTIALS = "/git/"
#: Other hosts say here that a remote has changed, and sign it; checked by `api.routes.git_remotes`.
HOOK = re.compile(rf"{PREFIX}/git/repos/[^/]+/remotes/[^/]+/hook")
READY_WAIT_S = 60.0


class Gate:
    def __init__(self, app: ASGIApp, control: ControlPlane, allowed_hosts: Collection[str] = ()) -> None:
        self._app = app
        self._control = control
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            self._check_host(scope, headers)
            if scope["path"].startswith(OWN_CREDENTIALS) or HOOK.fullmatch(scope["path"]):
                await self._until_ready()
            elif scope["path"] not in OPEN:
                principal = await self._control.identities.authenticate(_presented(scope, headers))
                state = scope.setdefault("state", {})
                state["principal"], state["api_key_id"] = principal, principal.id
                await self._until_ready()
        await self._app(scope, receive, send)

    async def _until_ready(self) -> None:
        try:
            async with asyncio.timeout(READY_WAIT_S):
                await self._control.ready.wait()
        except TimeoutError:
            raise OperationTimeout("the daemon is still starting; try again shortly") from None

    def _check_host(self, scope: Scope, headers: Headers) -> None:
        """A web page can point a name of its own at 127.0.0.1 and have a browser talk to us under that name. Addresses
        and names that only this machine resolves cannot be pointed elsewhere; other names must be configured."""
        server = scope.get("server")
        if server is not None and str(server[0]).startswith("/"):  # a unix socket: no browser
            return
        host = _host_name(headers.get("host", ""))
        if host in ("", "localhost") or host.endswith(".localhost") or host in self._allowed_hosts or _is_address(host):
            return
        raise Forbidden(f"this daemon does not answer to the host name {host!r}; use localhost or an IP address")


def _presented(scope: Scope, headers: Headers) -> str | None:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    key = headers.get("x-api-key")
    if key is None and scope["type"] == "websocket":
        key = QueryParams(scope["query_string"]).get("key")
    return key


def _host_name(header: str) -> str:
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
