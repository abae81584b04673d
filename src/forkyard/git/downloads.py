"""A file at an address that somebody else chose, fetched to a file here: bounded in time, in size and in where it may lead."""

from __future__ import annotations

import asyncio
import base64
import ssl
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit, urlunsplit

import httpcore

from forkyard.errors import Forbidden, InvalidRequest, OperationTimeout, RemoteFailed, RepoFull
from forkyard.git.webhooks import MAX_REDIRECTS, Checked, Refused, origin_of, redirected
from forkyard.net.outside import Resolver
from forkyard.net.policy import Abroad

FETCH_S = 3600.0


class Downloads:
    def __init__(self, resolver: Resolver, *, allow_private: bool, ca: Path | None = None) -> None:
        """`ca`: certificate authorities to trust, besides those of this machine."""
        self._resolver = resolver
        self._allow_private = allow_private
        self._ca = ca

    async def fetch(self, url: str, file: IO[bytes], most_bytes: int, how: str, *, allow_private: bool) -> None:
        """`how`: what allows a private address. Credentials in `url` are for its host alone."""
        plain, private = _split(url)
        try:
            async with asyncio.timeout(FETCH_S):
                abroad = Abroad(how, private=allow_private or self._allow_private)
                await self._follow(plain, private, file, most_bytes, abroad)
        except TimeoutError:
            raise OperationTimeout(f"{plain} was not there as a whole within {FETCH_S:.0f} s") from None
        except Refused as refused:
            raise Forbidden(f"{plain}: {refused}", url=plain) from None
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError) as error:
            raise RemoteFailed(f"{plain} cannot be reached: {error or type(error).__name__}") from error
        except (httpcore.UnsupportedProtocol, ValueError) as error:
            raise InvalidRequest(f"{plain} is no address to fetch from: {error}", field="url") from error

    async def _follow(
        self, url: str, private: dict[str, str], file: IO[bytes], most_bytes: int, abroad: Abroad
    ) -> None:
        backend, origin = Checked(self._resolver, abroad), origin_of(url)
        context = await asyncio.to_thread(_context, self._ca)
        for _ in range(MAX_REDIRECTS + 1):
            headers = {"Accept": "*/*", "User-Agent": "forkyard", **(private if origin_of(url) == origin else {})}
            async with (
                httpcore.AsyncConnectionPool(ssl_context=context, network_backend=backend) as pool,
                pool.stream("GET", url, headers=list(headers.items())) as answer,
            ):
                target = redirected(url, answer)
                if target is None:
                    if answer.status != 200:
                        raise RemoteFailed(f"{url} answered {answer.status}")
                    await _keep(answer, file, most_bytes)
                    return
            url = target
        raise Refused(f"it redirects more than {MAX_REDIRECTS} times")


async def _keep(answer: httpcore.Response, file: IO[bytes], most_bytes: int) -> None:
    size = 0
    async for chunk in answer.aiter_stream():
        size += len(chunk)
        if size > most_bytes:
            raise RepoFull(f"the archive does not fit: the quota is {most_bytes} bytes")
        await asyncio.to_thread(file.write, chunk)
    file.seek(0)


def _split(url: str) -> tuple[str, dict[str, str]]:
    """Without credentials, and the header that has them."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or any(c.isspace() or ord(c) < 32 for c in url):
        raise InvalidRequest(
            "the address of an archive is http or https, such as https://example.com/a.tar.gz", field="url"
        )
    if parts.username is None:
        return url, {}
    given = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    plain = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return plain, {"Authorization": "Basic " + base64.b64encode(given.encode()).decode()}


def _context(ca: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if ca is not None:
        context.load_verify_locations(ca)
    return context
