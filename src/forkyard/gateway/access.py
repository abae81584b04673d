"""Who may open a port that asks for a token: by header, by cookie, by one-time link. Pure.

A cookie is derived from the token, name and value: it goes with it, and no other sandbox can guess what to set.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from urllib.parse import unquote_to_bytes, urlsplit

from forkyard.control.previews import LINK_PARAMETER, TOKEN_HEADER
from forkyard.gateway.headers import COOKIE_PREFIX, Visit

COOKIE_LIFETIME_S = 7 * 86400
_LINK = LINK_PARAMETER.encode() + b"="


def has_token(visit: Visit, token: str) -> bool:
    given = visit.header(TOKEN_HEADER)
    if given is not None:
        return hmac.compare_digest(given.strip(), token.encode())
    if visit.prefix or not _same_origin(visit):
        return False
    name, value = _cookie(token)
    return any(hmac.compare_digest(found, value) for found in _cookies(visit, name))


def cookie_header(visit: Visit, token: str) -> tuple[bytes, bytes]:
    name, value = _cookie(token)
    cookie = name + b"=" + value + f"; Path=/; HttpOnly; SameSite=Lax; Max-Age={COOKIE_LIFETIME_S}".encode()
    return b"set-cookie", cookie + (b"; Secure" if visit.secure else b"")


def split_link(query: bytes) -> tuple[str | None, bytes]:
    """The one-time link in a query, and the query without it."""
    if _LINK not in query:
        return None, query
    parts = query.split(b"&")
    links = [part.removeprefix(_LINK) for part in parts if part.startswith(_LINK)]
    rest = b"&".join(part for part in parts if not part.startswith(_LINK))
    return (unquote_to_bytes(links[0]).decode("latin-1") if links else None), rest


def _same_origin(visit: Visit) -> bool:
    """A browser also sends the cookie with what a page of a neighbour asks of us. That does not count; following a link
    from there does."""
    origin = visit.header(b"origin")
    if origin is not None:
        return urlsplit(origin.decode("latin-1")).netloc.lower() == visit.host.decode("latin-1").lower()
    site = visit.header(b"sec-fetch-site")
    return site in (None, b"same-origin", b"none") or visit.header(b"sec-fetch-mode") == b"navigate"


def _cookies(visit: Visit, wanted: bytes) -> Iterator[bytes]:
    for header, value in visit.headers:
        if header == b"cookie" and wanted in value:
            for pair in value.split(b";"):
                name, _, content = pair.strip().partition(b"=")
                if name == wanted:
                    yield content


def _cookie(token: str) -> tuple[bytes, bytes]:
    return COOKIE_PREFIX + _derived(token, b"cookie name")[:16], _derived(token, b"cookie value")


def _derived(token: str, what: bytes) -> bytes:
    return hmac.new(token.encode(), what, hashlib.sha256).hexdigest().encode()
