"""The front of the E2B facade, before the gateway and the API on the same port: decides whose request it is.

    header E2b-Sandbox-Id, on a host of the API            → envd of that sandbox (port 49983), or its code interpreter
                                                             (49999, as the header E2b-Sandbox-Port says)
    header X-Access-Token alone, on a host of the API      → the same (`e2b` 2.7 after a connect)
    49983-<id>.<preview domain>, 49983-<id>.localhost      → the same, 49999- likewise
    /files?…&signature=… on a host of the API              → the same, of the sandbox whose signature it is
    /sandboxes, /v2/sandboxes, /snapshots, /templates …    → E2B's control plane, with an API key; so is whatever else
                                                             its clients may ask a host of the API for
    anything else                                          → passed on

Routing headers count only on hosts that no page of a sandbox is served from: such a page must not address another one.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Collection

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forkyard.builds.builds import Builds
from forkyard.builds.templates import Templates
from forkyard.compat.e2b import code, traffic
from forkyard.compat.e2b.envd import PORT, Envd
from forkyard.compat.e2b.errors import Failed, Refused, answer, not_running, refusal, status_of
from forkyard.compat.e2b.notes import Note
from forkyard.compat.e2b.sandboxes import Sandboxes
from forkyard.compat.e2b.secrets import SecretRoutes
from forkyard.compat.e2b.snapshots import Snapshots
from forkyard.compat.e2b.templates import TemplateRoutes
from forkyard.compat.e2b.traffic import Traffic
from forkyard.compat.e2b.volume_files import VolumeFiles
from forkyard.compat.e2b.volumes import VolumeRoutes
from forkyard.compat.e2b.waking import is_awake
from forkyard.compat.hosts import OWN, host_name, is_local
from forkyard.control.plane import ControlPlane
from forkyard.errors import (
    Forbidden,
    ForkyardError,
    OperationTimeout,
    PortClosed,
    SandboxEnded,
    StateConflict,
    Unauthenticated,
)

log = structlog.get_logger(__name__)

READY_WAIT_S = 60.0
#: A request to a port of a sandbox that wakes for it waits so long here, and then in the gateway.
WAKE_QUIETLY_S = 1.0
_ROOTS = re.compile(
    r"/(v[0-9]+/)?(sandboxes|snapshots|templates|default-templates|volumes|volumecontent|secrets|teams|nodes|"
    r"access-tokens|api-keys|events)(/|$)"
)
_UPLOAD = re.compile(r"/templates/(?P<template_id>.+)/files/(?P<hash>[^/]+)")
_VOLUME_FILE = re.compile(r"/volumecontent/(?P<volume_id>[^/]{1,128})/(?P<what>[^/]{1,64})")
_ROUTING = (b"host", b"e2b-sandbox-id", b"e2b-sandbox-port", b"x-access-token", b"publisher")
_TRAFFIC = traffic.HEADER.encode()
_SANDBOX_ID = re.compile(r"[a-z][a-z0-9]{19}", re.ASCII)
_LABEL = re.compile(r"([0-9]{1,5})-([a-z][a-z0-9]{19})(-[a-z0-9-]*)?", re.ASCII)

Handler = Callable[[Request], Awaitable[Response]]


def all_routes(
    sandboxes: Sandboxes, snapshots: Snapshots, templates: TemplateRoutes, volumes: VolumeRoutes, secrets: SecretRoutes
) -> list[tuple[str, str, Handler]]:
    """Of the control plane: method, path, and who answers."""
    one, template = "/sandboxes/{sandbox_id}", "/templates/{template_id:path}"
    return [
        ("POST", "/sandboxes", sandboxes.create),
        ("POST", "/v2/sandboxes", sandboxes.create_v2),
        ("GET", "/sandboxes", sandboxes.list_running),
        ("GET", "/v2/sandboxes", sandboxes.listed),
        ("GET", "/sandboxes/metrics", sandboxes.metrics_of_all),
        ("GET", one, sandboxes.info),
        ("DELETE", one, sandboxes.kill),
        ("POST", f"{one}/timeout", sandboxes.set_timeout),
        ("POST", f"{one}/refreshes", sandboxes.refresh),
        ("POST", f"{one}/pause", sandboxes.pause),
        ("POST", f"{one}/resume", sandboxes.resume),
        ("POST", f"{one}/connect", sandboxes.connect),
        ("POST", f"/v2{one}/connect", sandboxes.connect),
        ("POST", f"{one}/fork", sandboxes.fork),
        ("POST", f"{one}/snapshots", snapshots.create),
        ("PUT", f"{one}/network", sandboxes.set_network),
        ("GET", f"{one}/metrics", sandboxes.metrics),
        ("GET", f"{one}/logs", sandboxes.logs),
        ("GET", f"/v2{one}/logs", sandboxes.logs_v2),
        ("GET", "/snapshots", snapshots.listed),
        ("POST", "/v2/templates", templates.request),
        ("POST", "/v3/templates", templates.request),
        ("GET", "/templates", templates.listed),
        ("GET", "/v2/templates", templates.listed),
        ("GET", "/default-templates", templates.defaults),
        ("GET", "/templates/aliases/{alias:path}", templates.alias),
        ("POST", "/templates/tags", templates.tag),
        ("DELETE", "/templates/tags", templates.untag),
        ("GET", f"{template}/tags", templates.tags),
        ("GET", f"{template}/files/{{hash}}", templates.files),
        ("POST", f"/v2{template}/builds/{{build_id}}", templates.begin),
        ("GET", f"{template}/builds/{{build_id}}/status", templates.status),
        ("GET", f"{template}/builds/{{build_id}}/logs", templates.build_logs),
        ("GET", template, templates.info),
        ("PATCH", template, templates.update),
        ("PATCH", f"/v2{template}", templates.update),
        ("DELETE", template, templates.delete),
        ("POST", "/volumes", volumes.create),
        ("GET", "/volumes", volumes.listed),
        ("GET", "/volumes/{volume_id}", volumes.info),
        ("DELETE", "/volumes/{volume_id}", volumes.delete),
        ("POST", "/secrets", secrets.create),
        ("GET", "/secrets", secrets.listed),
        ("GET", "/secrets/{secret_id}", secrets.info),
        ("POST", "/secrets/{secret_id}", secrets.update),
        ("DELETE", "/secrets/{secret_id}", secrets.delete),
    ]


class E2b:
    def __init__(
        self,
        app: ASGIApp,
        control: ControlPlane,
        builds: Builds,
        *,
        api_hosts: Collection[str] = (),
        default_user: str = "user",
    ) -> None:
        """`app` gets what is not E2B's. `api_hosts`: names the API is reached by, besides localhost and addresses."""
        self._app = app
        self._control = control
        self._api_hosts = frozenset(host.lower() for host in api_hosts)
        self._traffic = Traffic(control)
        self._envd = envd = Envd(control, self._traffic, default_user)
        self._templates = templates = TemplateRoutes(control, Templates(control.ground.store, builds), default_user)
        sandboxes, snapshots = Sandboxes(control, builds, templates, envd.token, self._traffic), Snapshots(control)
        self._volume_files = VolumeFiles(control)
        secrets, volumes = SecretRoutes(control), VolumeRoutes(control, self._volume_files.token)
        table = all_routes(sandboxes, snapshots, templates, volumes, secrets)
        self._routes = [(Route(path, handler, methods=[method]), handler) for method, path, handler in table]

    async def aclose(self) -> None:
        await self._envd.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handler(scope) if scope["type"] == "http" else None
        if handler is None:
            await self._pass_on(scope, receive, send)
            return
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            response = await self._answered(handler, Request(scope, receive))
            await response(scope, receive, sending)
        except ClientDisconnect:
            pass
        except ForkyardError as error:
            # In the middle of an answer there is no way to say so but to cut it off.
            log.warning("answer broken off", error=error.message)
            if not begun:
                await answer(status_of(error), error.message)(scope, receive, send)
            else:
                raise

    # ── whose request it is ──────────────────────────────────────────────────────────────────────────────────────

    def wants(self, scope: Scope) -> bool:
        """Or passes it on otherwise than it came."""
        return self._handler(scope) is not None or any(name == _TRAFFIC for name, _ in scope["headers"])

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] in ("http", "websocket") else {}
        port = _port_of(host_name(headers.get(b"host", b"").decode("latin-1")), self._control.previews.address.domain)
        if port is not None:
            if not await self._is_awake(port[0]):
                await not_running(port[0])(scope, receive, send)
                return
            if _TRAFFIC in headers:
                scope = await self._traffic.exchanged(scope, *port)
        elif headers.get(b"publisher") == b"e2b" and not scope["path"].startswith(OWN):
            name = host_name(headers.get(b"host", b"").decode("latin-1"))
            if await self._is_nobody(name):
                wanted = (
                    f"this daemon is not known as {name[:253]!r}; add that to FORKYARD_ALLOWED_HOSTS, and restart it"
                )
                await answer(400, wanted)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _is_nobody(self, name: str) -> bool:
        """Neither a host of the API nor one that leads to a sandbox."""
        ours = name in self._api_hosts or name.endswith(f".{self._control.previews.address.domain}")
        return not (ours or is_local(name)) and await self._control.domains.find(name) is None

    async def _is_awake(self, sandbox_id: str) -> bool:
        """Or as good as that: the gateway says what is wrong with it, and shows browsers that it takes its time."""
        try:
            await self._until_ready()
            async with asyncio.timeout(WAKE_QUIETLY_S):
                return await is_awake(self._control, await self._control.previews.record(sandbox_id))
        except (ForkyardError, TimeoutError):
            return True

    async def told_as(
        self, sandbox_id: str, port: int, error: ForkyardError
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
        """Of a port of a sandbox that was made through this API: status, headers and body."""
        try:
            note = Note.of(await self._control.previews.record(sandbox_id))
        except ForkyardError:
            return None
        if note is None:
            return None
        response = _of_port(sandbox_id, port, error)
        return response.status_code, response.raw_headers, bytes(response.body)

    def _handler(self, scope: Scope) -> Handler | None:
        headers = {name: value for name, value in scope["headers"] if name in _ROUTING}
        name = host_name(headers.get(b"host", b"").decode("latin-1"))
        domain = self._control.previews.address.domain
        if (found := _port_of(name, domain)) is not None:
            return self._to_sandbox(*found) if found[1] in (PORT, code.PORT) else None
        if not (is_local(name) or name in self._api_hosts or name in (f"api.{domain}", f"sandbox.{domain}")):
            return None
        if _ROOTS.match(scope["path"]):  # first: some clients send the headers with everything
            return self._control_plane
        sandbox_id = headers.get(b"e2b-sandbox-id")
        if sandbox_id is not None:
            return self._by_header(sandbox_id.decode("latin-1"), headers.get(b"e2b-sandbox-port", b""))
        token = headers.get(b"x-access-token", b"").decode("latin-1")
        if _SANDBOX_ID.fullmatch(token.partition("_")[0]):
            return self._to_sandbox(token.partition("_")[0], PORT)
        if scope["path"] == "/files" and b"signature=" in scope["query_string"]:
            return self._signed
        theirs = headers.get(b"publisher") == b"e2b" and not scope["path"].startswith(OWN)
        return self._control_plane if theirs else None

    def _by_header(self, sandbox_id: str, port: bytes) -> Handler:
        async def closed(_: Request) -> Response:
            return answer(502, "The sandbox is running but port is not open", sandboxId=sandbox_id[:64])

        number = int(port) if port.isdigit() and len(port) <= 5 else PORT if port == b"" else 0
        return self._to_sandbox(sandbox_id, number) if number in (PORT, code.PORT) else closed

    def _to_sandbox(self, sandbox_id: str, port: int) -> Handler:
        known = sandbox_id if _SANDBOX_ID.fullmatch(sandbox_id) else ""

        async def handle(request: Request) -> Response:
            return await self._envd.serve(known, request, code=port == code.PORT)

        return handle

    async def _signed(self, request: Request) -> Response:
        sandbox_id = await self._envd.signed_for(request)
        if sandbox_id is None:
            raise Refused(401, "invalid signature")
        return await self._envd.serve(sandbox_id, request)

    async def _control_plane(self, request: Request) -> Response:
        if request.method == "PUT" and (found := _UPLOAD.fullmatch(request.url.path)) is not None:
            request.scope["path_params"] = found.groupdict()
            return await self._templates.upload(request)
        if (inside := _VOLUME_FILE.fullmatch(request.url.path)) is not None:
            return await self._volume_files.serve(request, inside["volume_id"], inside["what"])
        request.state.principal = await self._principal(request)
        allowed = set()
        for route, handler in self._routes:
            match, child = route.matches(request.scope)
            if match is Match.FULL:
                request.scope.update(child)
                return await handler(request)
            if match is Match.PARTIAL:
                allowed |= route.methods or set()
        if allowed:
            raise Refused(405, f"{request.method} is not served on {request.url.path[:200]}")
        raise Refused(501, f"{request.method} {request.url.path[:200]} is not served by Forkyard yet")

    async def _principal(self, request: Request) -> object:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else None)
        try:
            found = await self._control.identities.authenticate(given)
        except Unauthenticated:
            raise Refused(
                401, "unknown API key; `forkyard keys create NAME --format e2b` makes one for E2B_API_KEY"
            ) from None
        if not found.admin:
            raise Refused(403, f"{found.name!r} may not do this; it takes an API key")
        return found

    # ── and what is said when it goes wrong ──────────────────────────────────────────────────────────────────────

    async def _answered(self, handler: Handler, request: Request) -> Response:
        try:
            await self._until_ready()
            return await handler(request)
        except ClientDisconnect:
            raise
        except Refused as error:
            return refusal(error)
        except Failed as error:
            return answer(400, error.message)
        except ForkyardError as error:
            return answer(status_of(error), error.message)
        except Exception:
            log.exception("unexpected error in the E2B facade")
            return answer(500, "an unexpected error in the daemon; its log has the details")

    async def _until_ready(self) -> None:
        try:
            async with asyncio.timeout(READY_WAIT_S):
                await self._control.ready.wait()
        except TimeoutError:
            raise OperationTimeout("the daemon is still starting; try again shortly") from None


def _of_port(sandbox_id: str, port: int, error: ForkyardError) -> Response:
    if isinstance(error, SandboxEnded | StateConflict):
        return not_running(sandbox_id)
    if isinstance(error, PortClosed):
        return answer(502, "The sandbox is running but port is not open", sandboxId=sandbox_id, port=port)
    if isinstance(error, Unauthenticated | Forbidden):
        wanted = f"The sandbox is not open to everybody; send its traffic access token as {traffic.HEADER}"
        return answer(403, wanted, sandboxId=sandbox_id)
    return answer(status_of(error), error.message, sandboxId=sandbox_id)


@functools.lru_cache(4096)
def _port_of(name: str, domain: str) -> tuple[str, int] | None:
    """The sandbox and the port that a host is of."""
    for suffix in (f".{domain}", ".localhost"):
        label = _LABEL.fullmatch(name.removesuffix(suffix)) if name.endswith(suffix) else None
        if label is not None:
            return label[2], int(label[1])
    return None
