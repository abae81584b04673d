"""What of a request reaches the server in a sandbox, and what of its answer reaches the client. Pure.

Ours stays outside: tokens, cookies and links of the gateway, and API keys. The Host is the client's own, since dev
servers check it; where the request came from is said in X-Forwarded-*, by us and nobody else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from forkyard.control.previews import TOKEN_HEADER
from forkyard.gateway.names import Target, host_port
from forkyard.gateway.upstream import Headers

COOKIE_PREFIX = b"forkyard-"

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
#: Written anew by us, or answered by us.
_OURS = frozenset({b"host", b"content-length", b"expect", b"forwarded", b"x-real-ip", TOKEN_HEADER})
_HANDSHAKE = b"sec-websocket-"
#: They speak of the whole origin, or of another one, and would reach beyond this sandbox.
_NOT_FROM_GUESTS = frozenset({b"alt-svc"})
_NOT_FROM_PATHS = frozenset({b"clear-site-data", b"strict-transport-security", b"service-worker-allowed"})
_SANDBOXED = (
    b"content-security-policy",
    b"sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads",
)
_OWN_COOKIE = re.compile(rb"\s*forkyard-[0-9a-f]{16}=")
_API_KEY = re.compile(rb"\s*(?:bearer\s+)?fy_", re.IGNORECASE)


@dataclass(slots=True)
class Visit:
    """One request to a preview."""

    target: Target
    method: str
    path: bytes
    query: bytes
    host: bytes  # as the client said it
    headers: Headers
    client: str | None
    secure: bool
    prefix: bytes = b""  # of the path form, which the server in the sandbox does not see
    shared_domain: bool = True  # other sandboxes have names below the same domain
    html: bool = field(init=False)

    def __post_init__(self) -> None:
        accepts = any(name == b"accept" and b"text/html" in value for name, value in self.headers)
        self.html = accepts and self.method in ("GET", "HEAD")

    def header(self, wanted: bytes) -> bytes | None:
        for name, value in self.headers:
            if name == wanted:
                return value
        return None

    @property
    def request_target(self) -> bytes:
        return self.path + b"?" + self.query if self.query else self.path


def for_guest(visit: Visit, *, websocket: bool = False) -> Headers:
    """Without Host, and without what frames the body."""
    dropped = _listed(visit.headers)
    kept: Headers = []
    for name, value in visit.headers:
        if name in _HOP_BY_HOP or name in _OURS or name in dropped or name.startswith(b"x-forwarded-"):
            continue
        if websocket and name.startswith(_HANDSHAKE):
            continue
        if name == b"cookie":
            value = _without_ours(value)
            if not value:
                continue
        elif name in (b"authorization", b"x-api-key") and _API_KEY.match(value):
            continue
        kept.append((name, value))
    port = host_port(visit.host.decode("latin-1")) or (443 if visit.secure else 80)
    if visit.client is not None:
        kept.append((b"x-forwarded-for", visit.client.encode()))
    kept.append((b"x-forwarded-host", visit.host))
    kept.append((b"x-forwarded-proto", b"https" if visit.secure else b"http"))
    kept.append((b"x-forwarded-port", str(port).encode()))
    if visit.prefix:
        kept.append((b"x-forwarded-prefix", visit.prefix))
    return kept


def for_client(visit: Visit, status: int, headers: Headers) -> Headers:
    dropped = _listed(headers)
    kept: Headers = []
    for name, value in headers:
        if name in _HOP_BY_HOP or name in dropped or name in _NOT_FROM_GUESTS:
            continue
        if name == b"content-length" and status in (204, 304):
            continue
        if name == b"set-cookie":
            value = cookie_for_client(visit, value)
        elif visit.prefix:
            if name in _NOT_FROM_PATHS:
                continue
            if name in (b"location", b"content-location"):
                value = _prefixed(visit, value)
        kept.append((name, value))
    if visit.prefix:
        # Previews by path share an origin with the API and with each other. In a browser each gets one of its own.
        kept.append(_SANDBOXED)
    return kept


def cookie_for_client(visit: Visit, cookie: bytes) -> bytes:
    """For this host alone where the domain is shared, and for this path alone in the path form."""
    first, *attributes = cookie.split(b";")
    kept, path = [first], None
    for attribute in attributes:
        name, _, value = attribute.strip().partition(b"=")
        if name.lower() == b"domain" and visit.shared_domain:
            continue
        if name.lower() == b"path" and visit.prefix:
            path = value.strip()
            continue
        kept.append(attribute)
    if visit.prefix:
        kept.append(b" Path=" + visit.prefix + (path if path is not None and path.startswith(b"/") else b"/"))
    return b";".join(kept)


def _prefixed(visit: Visit, location: bytes) -> bytes:
    """A redirect to another page of the same server stays below the prefix."""
    for origin in (b"http://" + visit.host, b"https://" + visit.host):
        if location.startswith(origin) and location[len(origin) : len(origin) + 1] in (b"", b"/", b"?", b"#"):
            location = location[len(origin) :] or b"/"
            break
    if location.startswith(b"/") and not location.startswith(b"//"):
        return visit.prefix + location
    return location


def _listed(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Names that a Connection header makes hop-by-hop."""
    found = [value for name, value in headers if name == b"connection"]
    if not found or found in ([b"keep-alive"], [b"close"]):
        return frozenset()
    return frozenset(token.strip().lower() for value in found for token in value.split(b",")) - {b"cookie", b"host"}


def _without_ours(cookies: bytes) -> bytes:
    if COOKIE_PREFIX not in cookies:
        return cookies
    return b";".join(cookie for cookie in cookies.split(b";") if not _OWN_COOKIE.match(cookie)).strip()
