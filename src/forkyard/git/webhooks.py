"""One POST to an address somebody else chose: bounded in time, in what is read and in where it may lead.

The name is resolved here, its addresses are checked, and the connection goes to the one that was checked: a name that
answers differently the second time gains nothing. Redirects are followed a few times, each checked the same way.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address
from urllib.parse import urljoin, urlsplit

import httpcore

from forkyard.net.outside import Resolver
from forkyard.net.policy import Abroad, address_of
from forkyard.net.watch import is_own

MAX_REDIRECTS = 3
MAX_RESPONSE_BYTES = 4096
REDIRECTS = (301, 302, 307, 308)
HOW = "set allow_private if that is meant, or FORKYARD_GIT_ALLOW_PRIVATE for all"


@dataclass(frozen=True)
class Outcome:
    """How one attempt went."""

    ok: bool
    duration_ms: float
    status: int | None = None
    error: str | None = None
    response: str | None = None
    #: Whether trying again could help.
    retry: bool = True


class Refused(Exception):
    """It leads where it must not."""


class Sender:
    def __init__(
        self,
        resolver: Resolver,
        context: ssl.SSLContext,
        *,
        timeout_s: float,
        allow_private: bool,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._max_response_bytes = max_response_bytes
        self._resolver = resolver
        self._context = context
        self._timeout_s = timeout_s
        self._allow_private = allow_private

    async def post(
        self, url: str, headers: Mapping[str, str], private: Mapping[str, str], body: bytes, *, allow_private: bool
    ) -> Outcome:
        """`private` headers are for the host of `url` alone, and go to no other it redirects to."""
        began = time.monotonic()
        status: int | None = None
        answered: bytes | None = None
        error: str | None = None
        retry = True
        try:
            async with asyncio.timeout(self._timeout_s):
                status, answered = await self._follow(url, headers, private, body, allow_private or self._allow_private)
            if not 200 <= status < 300:
                error = f"it answered {status}"
        except TimeoutError:
            error = f"no whole answer within {self._timeout_s:g} s"
        except Refused as refusal:
            error, retry = str(refusal), False
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError) as failure:
            error = f"it cannot be reached: {failure or type(failure).__name__}"
        except (httpcore.UnsupportedProtocol, ValueError) as failure:
            error = f"it is no address to post to: {failure}"
        return Outcome(
            ok=error is None,
            duration_ms=round((time.monotonic() - began) * 1000, 1),
            status=status,
            error=error,
            response=None if answered is None else answered.decode("utf-8", "replace"),
            retry=retry,
        )

    async def _follow(
        self, url: str, headers: Mapping[str, str], private: Mapping[str, str], body: bytes, allow_private: bool
    ) -> tuple[int, bytes]:
        backend = Checked(self._resolver, Abroad(HOW, private=allow_private))
        origin = origin_of(url)
        for _ in range(MAX_REDIRECTS + 1):
            given = {**headers, **(private if origin_of(url) == origin else {})}
            async with (
                httpcore.AsyncConnectionPool(ssl_context=self._context, network_backend=backend) as pool,
                pool.stream("POST", url, headers=list(given.items()), content=body) as answer,
            ):
                target = redirected(url, answer)
                if target is None:
                    return answer.status, await _beginning(answer, self._max_response_bytes)
            url = target
        raise Refused(f"it redirects more than {MAX_REDIRECTS} times")


class Checked(httpcore.AsyncNetworkBackend):
    """Connects to addresses, after a look at them."""

    def __init__(self, resolver: Resolver, abroad: Abroad) -> None:
        self._inner = httpcore.AnyIOBackend()
        self._resolver = resolver
        self._abroad = abroad

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        literal = address_of(host)
        found = [str(literal)] if literal is not None else await self._resolver.resolve(host.lower())
        if not found:
            raise httpcore.ConnectError(f"{host} has no IPv4 address")
        for text in found:
            address = IPv4Address(text)
            decision = self._abroad.connection(None if literal else host, address, port, own=is_own(address))
            if not decision.allowed:
                raise Refused(decision.reason)
        return await self._inner.connect_tcp(found[0], port, timeout, local_address, socket_options)


def redirected(url: str, answer: httpcore.Response) -> str | None:
    """Where it says that the answer is, if it does."""
    location = next((value for name, value in answer.headers if name.lower() == b"location"), None)
    if answer.status not in REDIRECTS or location is None:
        return None
    target = urljoin(url, location.decode("latin-1"))
    if url.startswith("https:") and not target.startswith("https:"):
        raise Refused("it redirects from https to something less safe; that is not followed")
    return target


async def _beginning(answer: httpcore.Response, most_bytes: int) -> bytes:
    kept = b""
    async for chunk in answer.aiter_stream():
        kept += chunk
        if len(kept) >= most_bytes:
            break
    return kept[:most_bytes]


def origin_of(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
