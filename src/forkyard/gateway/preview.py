"""The gateway: in front of the API, on the same port. Decides by the Host header whose request it is.

    <port>-<id>.localhost, <port>-<id>.<preview domain>, a verified domain   → the sandbox, whatever the path
    /s/<id>/<port>/… on a host of the API                                    → the sandbox
    anything else                                                            → the API

Nothing but the Host says which sandbox is meant. On the host of a preview only the sandbox answers, and an API key opens
nothing there; a page of a preview cannot use the API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import cast
from urllib.parse import urlsplit

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forkyard.control.domains import domain_info
from forkyard.control.plane import ControlPlane
from forkyard.errors import (
    DomainNotFound,
    DomainUnverified,
    Forbidden,
    ForkyardError,
    GuestUnreachable,
    InternalError,
    InvalidRequest,
    OperationTimeout,
    Unauthenticated,
)
from forkyard.gateway import access, names, pages
from forkyard.gateway.headers import Visit
from forkyard.gateway.names import Malformed, Target
from forkyard.gateway.proxy import Asked, Proxy
from forkyard.gateway.shortcut import Client
from forkyard.gateway.sockets import SocketRelay
from forkyard.gateway.upstream import Headers
from forkyard.lifecycle import State
from forkyard.store.records import SandboxRecord

log = structlog.get_logger(__name__)

#: Status, headers and body.
Told = tuple[int, Headers, bytes]
ToldAs = Callable[[str, int, ForkyardError], Awaitable[Told | None]]
READY_WAIT_S = 60.0
#: A browser that waits longer for a sandbox to wake is shown so.
WAKE_QUIETLY_S = 3.0


class Gateway:
    def __init__(self, app: ASGIApp, control: ControlPlane, *, api_hosts: Collection[str] = ()) -> None:
        """`api_hosts`: names the API is reached by, besides localhost and addresses."""
        self._app = app
        self._control = control
        self._previews = control.previews
        self._proxy = Proxy(control.previews, answered=self._answered_in, taking_over=self._taking_over)
        self._sockets = SocketRelay(control.previews)
        outcomes = control.metrics.previews
        self._answered, self._refused, self._failed = map(outcomes.labels, ("answered", "refused", "failed"))
        self._seconds = control.metrics.preview_seconds
        self._api_hosts = frozenset(host.lower() for host in api_hosts)
        #: How the host of a port says to programs what went wrong; None: as ours do. A facade may know better.
        self.told_as: ToldAs = _as_ours

    def close(self) -> None:
        self._proxy.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answering = _Answering(scope, send)
        visit: Visit | None = None
        try:
            if self._may_be_mapped(scope) and not self._control.domains.fresh:
                await self._control.domains.refresh()
            visit = self._visit(scope)
            if visit is None:
                _check_origin(scope, self._domain)
            else:
                self._proxy.enter(visit)
                await self._entered(visit, answering, self._serve(visit, scope, receive, answering))
        except Exception as error:
            await self._told(answering, error, visit)
        else:
            if visit is None:
                await self._app(scope, receive, send)

    def shortcut(self, scope: Scope, client: Client) -> bool:
        """The same, for a request of which everything is known: nothing is looked up, nobody is woken, nothing is
        explained. What is not that plain goes the long way."""
        try:
            visit = self._visit(scope)
            if visit is None or not (visit.shared_domain or self._control.domains.fresh):
                return False
            record = self._previews.known(visit.target.sandbox_id)
            if record is None or record.state is not State.RUNNING or not self._control.ready.is_set():
                return False
            if not visit.path or access.split_link(visit.query)[0] is not None:
                return False
            if _asks_for_token(record, visit.target.port):
                token = self._previews.known_token(visit.target.sandbox_id, visit.target.port)
                if token is None or not access.has_token(visit, token):
                    return False
            return self._proxy.pass_on(visit, record, client)
        except ForkyardError:
            return False

    def _taking_over(self, asked: Asked) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            answering, visit = _Answering(scope, send), asked.visit
            try:
                await self._entered(visit, answering, self._proxy.serve(visit, receive, answering.send, asked))
            except Exception as error:
                await self._told(answering, error, visit)

        return app

    async def _entered(self, visit: Visit, answering: _Answering, serving: Awaitable[None]) -> None:
        try:
            await serving
        finally:
            self._proxy.leave(visit)
        self._answered.inc()
        if answering.begun_at is not None:
            self._seconds.observe(answering.begun_at - answering.began)

    def _answered_in(self, seconds: float) -> None:
        self._answered.inc()
        self._seconds.observe(seconds)

    async def _told(self, answering: _Answering, error: Exception, visit: Visit | None) -> None:
        if not isinstance(error, ForkyardError):
            log.error("unexpected error in the gateway", exc_info=error)
            error = InternalError()
        (self._failed if error.status >= 500 else self._refused).inc()
        told = None
        if visit is not None and visit.shared_domain and not visit.prefix and not answering.html:
            told = await self.told_as(visit.target.sandbox_id, visit.target.port, error)
        await answering.fail(error, told)

    # ── whose request it is ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def _domain(self) -> str:
        return self._previews.address.domain

    def _may_be_mapped(self, scope: Scope) -> bool:
        name = names.host_name(_host(scope).decode("latin-1"))
        return names.of_host(name, self._domain) is None and not self._is_api(name, scope)

    def _is_api(self, name: str, scope: Scope) -> bool:
        return names.is_local(name) or name in self._api_hosts or _is_unix(scope)

    def _visit(self, scope: Scope) -> Visit | None:
        headers: Headers = scope["headers"]
        host = _host(scope)
        name = names.host_name(host.decode("latin-1"))
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        path, prefix, shared = raw_path, b"", True
        found: Target | Malformed | None = names.of_host(name, self._domain)
        if found is None and self._is_api(name, scope):
            by_path = names.of_path(raw_path)
            if not isinstance(by_path, names.PathTarget):
                found = by_path
            else:
                found, prefix, path = by_path.target, by_path.prefix, by_path.rest
        elif found is None:
            found, shared = self._mapped(name), False
        if found is None:
            return None
        if sum(name == b"host" for name, _ in headers) > 1:
            raise InvalidRequest("a request has one Host header, not several")
        if isinstance(found, Malformed):
            raise InvalidRequest(found.why)
        address = self._previews.address
        below_ours = name.endswith(f".{address.domain}") and address.domain != names.LOCAL_DOMAIN
        client = scope.get("client")
        return Visit(
            target=found,
            method=scope.get("method", "GET"),
            path=path,
            query=scope["query_string"],
            host=host,
            headers=headers,
            client=client[0] if client else None,
            secure=scope["scheme"] in ("https", "wss") or (below_ours and address.scheme == "https"),
            prefix=prefix,
            shared_domain=shared,
        )

    def _mapped(self, name: str) -> Target:
        """The target of a user's domain. Anything else is a name that somebody pointed at us."""
        record = self._control.domains.known(name)
        if record is None or record.sandbox_id is None or record.port is None:
            raise DomainNotFound(
                f"no sandbox is mapped to the name {name[:253]!r}, and this daemon has another; if the domain is yours: "
                "`forkyard domains add DOMAIN ID PORT`"
            )
        if record.verified_at is None:
            info = domain_info(record)
            raise DomainUnverified(
                f"set the TXT record `{info.record_name}` to `{info.record_value}`, "
                f"then run `forkyard domains verify {info.domain}`"
            )
        return Target(record.sandbox_id, record.port)

    # ── who may, and through ─────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, visit: Visit, scope: Scope, receive: Receive, answering: _Answering) -> None:
        answering.html = visit.html
        if not self._control.ready.is_set():
            await self._until_ready()
        if visit.prefix and not visit.path:
            await answering.redirect(visit.prefix + b"/" + (b"?" + visit.query if visit.query else b""))
            return
        link, query = access.split_link(visit.query)
        if not await self._admitted(visit):
            cookie = await self._redeemed(visit, link)
            await answering.redirect(visit.path + (b"?" + query if query else b""), cookie)
            return
        if link is not None:
            await answering.redirect(visit.prefix + visit.path + (b"?" + query if query else b""))
            return
        if scope["type"] == "websocket":
            await self._sockets.serve(visit, scope, receive, answering.send)
            return
        if visit.html:
            await self._wake_in_sight(visit)
        await self._proxy.serve(visit, receive, answering.send)

    async def _admitted(self, visit: Visit) -> bool:
        target = visit.target
        if not _asks_for_token(await self._previews.record(target.sandbox_id), target.port):
            return True
        token = await self._previews.token(target.sandbox_id, target.port)
        return token is not None and access.has_token(visit, token)

    async def _redeemed(self, visit: Visit, link: str | None) -> tuple[bytes, bytes]:
        """The cookie that a one-time link is exchanged for."""
        target = visit.target
        if link is None:
            raise Unauthenticated(
                f"send the token in X-Forkyard-Preview-Token, or open the link that "
                f"`forkyard url {target.sandbox_id} {target.port} --link` prints"
            )
        # Those who only look at a link (HEAD, chat programs that fetch a picture of it do not come with text/html)
        # leave it whole.
        if visit.prefix or not visit.html or visit.method != "GET":
            raise Unauthenticated("a one-time link is for browsers; send the token in X-Forkyard-Preview-Token instead")
        if not await self._previews.redeem(link, target.sandbox_id, target.port):
            raise Unauthenticated(
                f"this link was used before, or is no longer valid; "
                f"`forkyard url {target.sandbox_id} {target.port} --link` prints another"
            )
        token = await self._previews.token(target.sandbox_id, target.port)
        if token is None:
            raise Unauthenticated("this link is no longer valid")
        return access.cookie_header(visit, token)

    async def _wake_in_sight(self, visit: Visit) -> None:
        """The wake goes on when the page is sent; the page asks again."""
        record = await self._previews.record(visit.target.sandbox_id)
        if record.state is State.RUNNING:
            return
        try:
            async with asyncio.timeout(WAKE_QUIETLY_S):
                await self._previews.awake(visit.target.sandbox_id)
        except TimeoutError:
            raise GuestUnreachable(
                f"sandbox {visit.target.sandbox_id} was asleep and is waking up", state=State.RESUMING
            ) from None

    async def _until_ready(self) -> None:
        try:
            async with asyncio.timeout(READY_WAIT_S):
                await self._control.ready.wait()
        except TimeoutError:
            raise OperationTimeout("the daemon is still starting; try again shortly") from None


class _Answering:
    """One answer, whoever gives it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.began = time.perf_counter()
        self._send = send
        self._websocket = scope["type"] == "websocket"
        self._head_only = scope.get("method") == "HEAD"
        self.begun_at: float | None = None
        self.html = not self._websocket and any(
            name == b"accept" and b"text/html" in value for name, value in scope["headers"]
        )

    async def send(self, message: Message) -> None:
        if self.begun_at is None:
            self.begun_at = time.perf_counter()
        await self._send(message)

    async def fail(self, error: ForkyardError, told: Told | None = None) -> None:
        if self.begun_at is None:
            await self._answer(*(told or pages.answer(error, html=self.html)))

    async def redirect(self, location: bytes, cookie: tuple[bytes, bytes] | None = None) -> None:
        # `//other.host/` would be another host.
        headers = [
            (b"location", b"/" + location.lstrip(b"/")),
            (b"cache-control", b"no-store"),
            (b"content-length", b"0"),
        ]
        headers += [(b"referrer-policy", b"no-referrer")]
        await self._answer(307 if cookie is None else 303, headers + ([cookie] if cookie else []), b"")

    async def _answer(self, status: int, headers: Headers, body: bytes) -> None:
        kind = "websocket.http.response" if self._websocket else "http.response"
        await self.send({"type": f"{kind}.start", "status": status, "headers": headers})
        await self.send({"type": f"{kind}.body", "body": b"" if self._head_only else body})


async def _as_ours(_sandbox_id: str, _port: int, _error: ForkyardError) -> None:
    return None


def _host(scope: Scope) -> bytes:
    """As the client said it."""
    for name, value in scope["headers"]:
        if name == b"host":
            return cast(bytes, value)
    return b""


def _asks_for_token(record: SandboxRecord, port: int) -> bool:
    match record.network.access(port):
        case "public":
            return False
        case "off":
            raise Forbidden(
                f"port {port} of this sandbox is not open to the outside; its network policy says `off`, and its owner can "
                f"open it: `forkyard set ID --port-access {port}=public`"
            )
        case _:
            return True


def _check_origin(scope: Scope, domain: str) -> None:
    """Keys are sent in headers, never by a browser of itself. Even so, pages from sandboxes have no business here."""
    for name, value in scope["headers"]:
        if name == b"origin":
            origin = names.host_name(urlsplit(value.decode("latin-1")).netloc)
            if names.of_host(origin, domain) is not None:
                raise Forbidden(f"a page of a preview ({origin}) may not use the API")


def _is_unix(scope: Scope) -> bool:
    server = scope.get("server")
    return server is not None and str(server[0]).startswith("/")
