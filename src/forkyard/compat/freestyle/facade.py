"""The front of the Freestyle facade, before the gateway and the API on the same port: what is Freestyle's is answered
here, the rest is passed on.

Owns: who asks (an API key, or the token of an identity in a header of theirs), what an identity may do (`routes` says
what each route needs), and that every error has a code that clients know.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Collection

import structlog
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from forkyard.builds.builds import Builds
from forkyard.builds.runs import Runs
from forkyard.builds.schedules import Schedules
from forkyard.compat.freestyle.calls import USER_HEADER, Call
from forkyard.compat.freestyle.errors import Refused, answer, refusal
from forkyard.compat.freestyle.routes import ROOTS, Parts, Route, Table
from forkyard.compat.hosts import OWN, host_name, is_local
from forkyard.control.identities import Principal
from forkyard.control.plane import ControlPlane
from forkyard.errors import ForkyardError, OperationTimeout, Unauthenticated
from forkyard.git.hosting import GitHosting

log = structlog.get_logger(__name__)

READY_WAIT_S = 60.0
IDENTITY_HEADER = "x-freestyle-identity-access-token"
#: Of every request of a client: whatever it asks for is answered as Freestyle would.
CLIENT_HEADER = b"x-freestyle-sdk"
TRACE_HEADER = "x-freestyle-trace-id"


class Freestyle:
    def __init__(
        self,
        app: ASGIApp,
        control: ControlPlane,
        hosting: GitHosting,
        builds: Builds,
        runs: Runs,
        schedules: Schedules,
        *,
        api_hosts: Collection[str] = (),
    ) -> None:
        """`app` gets what is not Freestyle's. `api_hosts`: names the API is reached by, besides localhost and addresses."""
        self._app = app
        self._control = control
        self._hosting = hosting
        self._api_hosts = frozenset(host.lower() for host in api_hosts)
        self._parts = Parts(control, hosting, builds, runs, schedules)
        self._table = Table(self._parts)

    async def aclose(self) -> None:
        await self._parts.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not self.wants(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._socket(WebSocket(scope, receive, send))
        else:
            await self._http(scope, receive, send)

    def wants(self, scope: Scope) -> bool:
        headers = {name: value for name, value in scope["headers"] if name in (b"host", CLIENT_HEADER)}
        theirs = CLIENT_HEADER in headers and not scope["path"].startswith(OWN)
        if ROOTS.match(scope["path"]) is None and not theirs:
            return False
        name = host_name(headers.get(b"host", b"").decode("latin-1"))
        # A page of a sandbox may have such paths of its own.
        return is_local(name) or name in self._api_hosts or name == f"api.{self._control.previews.address.domain}"

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            response = await self._answered(Request(scope, receive))
            await response(scope, receive, sending)
        except ClientDisconnect:
            pass
        except ForkyardError as error:
            # In the middle of an answer there is no way to say so but to cut it off.
            log.warning("answer broken off", error=error.message)
            if begun:
                raise
            await answer(refusal(error))(scope, receive, send)

    async def _answered(self, request: Request) -> Response:
        try:
            route, path = self._table.find(request.method, _raw_path(request))
            who = await self._who(request)
            await self._until_ready()
            await self._allowed(request, who, route, path)
            return await route.handler(Call(request, who, path))
        except ClientDisconnect:
            raise
        except Refused as refused:
            return answer(refused)
        except ForkyardError as error:
            return answer(refusal(error))
        except Exception:
            return _unexpected()

    async def _socket(self, socket: WebSocket) -> None:
        try:
            route, path = self._table.find("WEBSOCKET", _raw_path(socket))
            who = await self._who(socket)
            await self._until_ready()
            await self._allowed(socket, who, route, path)
            await self._parts.pty.serve(socket, who, path)
        except Refused as refused:
            await _denied(socket, answer(refused))
        except ForkyardError as error:
            await _denied(socket, answer(refusal(error)))
        except Exception:
            await _denied(socket, _unexpected())

    # ── who may ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _who(self, connection: HTTPConnection) -> Principal:
        scheme, _, bearer = connection.headers.get("authorization", "").partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else None
        try:
            return await self._control.identities.authenticate(key or connection.headers.get(IDENTITY_HEADER))
        except Unauthenticated:
            raise Refused(
                401,
                "UNAUTHORIZED",
                "unknown API key; `forkyard keys create NAME --format freestyle` makes one for FREESTYLE_API_KEY",
            ) from None

    async def _allowed(self, connection: HTTPConnection, who: Principal, route: Route, path: dict[str, str]) -> None:
        if who.admin:
            return
        identities = self._control.identities
        resource = path.get("vm") or path.get("repo") or connection.url.path[:256]
        address = None if connection.client is None else connection.client.host
        try:
            if route.need == "key":
                raise Refused(403, "FORBIDDEN", f"{who.name!r} may not do this; it takes an API key")
            if route.need in ("look", "user", "root"):
                user = connection.headers.get(USER_HEADER, "root") if route.need == "user" else "root"
                await identities.authorize_sandbox(who, path["vm"], None if route.need == "look" else user)
            elif route.need in ("read", "write"):
                repo = await self._hosting.repositories.get(path["repo"])
                public = repo.record.visibility == "public"
                await identities.authorize_repo(who, route.need, repo.id, public=public)
        except (Refused, ForkyardError):
            await identities.record(who, route.action, resource, allowed=False, address=address)
            raise
        await identities.record(who, route.action, resource, address=address)

    async def _until_ready(self) -> None:
        try:
            async with asyncio.timeout(READY_WAIT_S):
                await self._control.ready.wait()
        except TimeoutError:
            raise OperationTimeout("the daemon is still starting; try again shortly") from None


async def _denied(socket: WebSocket, response: Response) -> None:
    """Before it was accepted: an HTTP answer, with the reason in it. Who left meanwhile is told nothing."""
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        if socket.application_state is WebSocketState.CONNECTING:
            await socket.send_denial_response(response)
        else:
            await socket.close(1011)


def _unexpected() -> Response:
    trace_id = secrets.token_hex(16)
    log.exception("unexpected error in the Freestyle facade", trace=trace_id)
    response = answer(Refused(500, "INTERNAL_ERROR", "an unexpected error in the daemon; its log has the details"))
    response.headers[TRACE_HEADER] = trace_id
    return response


def _raw_path(connection: HTTPConnection) -> str:
    """A path inside a path is one segment, with its slashes quoted; only the raw path still shows that."""
    raw: bytes = connection.scope.get("raw_path") or connection.scope["path"].encode()
    return raw.partition(b"?")[0].decode("latin-1")
