"""One connection to one daemon: requests, streams, web sockets, and every foreign error translated.

Retries: a request that never reached a daemon, or that may safely be sent twice, is sent again for a short while, and
for a longer one if this daemon has answered before, because then it is most likely being restarted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import httpx
from websockets.exceptions import InvalidStatus, WebSocketException

from forkyard.errors import DaemonUnreachable, ForkyardError, from_problem
from forkyard.models import Page
from forkyard.sdk import connect, wire
from forkyard.sdk._async import runtime

Params = Mapping[str, Any]
T = TypeVar("T")

_SAFE = frozenset({"GET", "DELETE"})
_FIRST_CONTACT_S = 0.5
RESTART_S = 30.0


class AsyncTransport:
    def __init__(self, find: Callable[[], connect.Endpoint], transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._find = find
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._endpoint: connect.Endpoint | None = None
        self._lock = runtime.Lock()
        self._answered = False

    async def aclose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def endpoint(self) -> connect.Endpoint:
        async with self._lock:
            if self._endpoint is None:
                self._endpoint = await runtime.blocking(self._find)
            return self._endpoint

    async def _open(self) -> tuple[httpx.AsyncClient, str]:
        endpoint = await self.endpoint()
        if self._client is None:
            transport = self._transport
            if transport is None and endpoint.socket is not None:
                transport = runtime.unix_transport(endpoint.socket)
            self._client = httpx.AsyncClient(
                base_url=endpoint.base_url + "/api/v1",
                headers=endpoint.headers,
                transport=transport,
                trust_env=endpoint.behind_proxies,
                limits=runtime.LIMITS,
            )
        return self._client, endpoint.where

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        body: object = None,
        content: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        again: bool | None = None,
        timeout_s: float | None = wire.ANSWER_S,
    ) -> httpx.Response:
        """An answer read to its end. `again`: it may be sent twice (default: by the method)."""
        client, where = await self._open()
        url = wire.path_with_query(path, params)
        if body is not None:
            content, headers = wire.json_body(body), {"Content-Type": "application/json", **(headers or {})}
        if isinstance(content, bytes):
            headers = {"Content-Length": str(len(content)), **(headers or {})}
        again = method in _SAFE if again is None else again
        patience = wire.Patience(RESTART_S if self._answered else _FIRST_CONTACT_S)
        while True:
            try:
                response = await client.request(
                    method,
                    url,
                    content=runtime.pieces(content) if isinstance(content, bytes) else content,
                    headers=headers,
                    timeout=wire.timeouts(timeout_s),
                )
            except httpx.HTTPError as exc:
                error = wire.broken(exc, where)
                retry = isinstance(error, DaemonUnreachable) and (again or wire.never_sent(exc))
                pause_s = patience.next_pause_s() if retry else None
                if pause_s is None:
                    raise error from exc
                await runtime.sleep(pause_s)
                continue
            self._answered = True
            if response.is_error:
                raise wire.error_of(response.status_code, response.content, where)
            return response

    async def items(self, page: type[Page[T]], path: str, params: Params, limit: int | None = None) -> list[T]:
        """A list read to its last page, or to its first `limit` items."""
        found: list[T] = []
        cursor: str | None = None
        while limit is None or len(found) < limit:
            wanted = wire.PAGE_ITEMS if limit is None else min(wire.PAGE_ITEMS, limit - len(found))
            answer = await self.request("GET", path, params={**params, "limit": wanted, "cursor": cursor})
            read = wire.parse(page, answer.content)
            found += read.items
            cursor = read.next_cursor
            if cursor is None:
                break
        return found

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        body: object = None,
        timeout_s: float | None = wire.STREAM_SILENCE_S,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """An answer read as it comes. Connecting is tried again; a stream that breaks is the caller's to resume."""
        client, where = await self._open()
        patience = wire.Patience(RESTART_S if self._answered else _FIRST_CONTACT_S)
        request = client.build_request(
            method,
            wire.path_with_query(path, params),
            content=None if body is None else wire.json_body(body),
            headers=None if body is None else {"Content-Type": "application/json"},
            timeout=wire.timeouts(timeout_s),
        )
        while True:
            try:
                response = await client.send(request, stream=True)
                break
            except httpx.HTTPError as exc:
                pause_s = patience.next_pause_s() if wire.never_sent(exc) else None
                if pause_s is None:
                    raise wire.broken(exc, where) from exc
                await runtime.sleep(pause_s)
        self._answered = True
        try:
            if response.is_error:
                raise wire.error_of(response.status_code, await response.aread(), where)
            yield response.aiter_bytes()
        except httpx.HTTPError as exc:
            raise wire.broken(exc, where) from exc
        finally:
            await response.aclose()

    async def lines(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        body: object = None,
        timeout_s: float | None = wire.STREAM_SILENCE_S,
    ) -> runtime.Flow[dict[str, Any] | None]:
        """The documents of an NDJSON answer; None is a keep-alive. Close it when leaving early."""
        lines = wire.Lines()
        async with self.stream(method, path, params=params, body=body, timeout_s=timeout_s) as chunks:
            async for chunk in chunks:
                for document in lines.feed(chunk):
                    yield document

    async def follow(
        self,
        path: str,
        parse: Callable[[dict[str, Any]], T],
        number: Callable[[T], int | None],
        *,
        params: Params | None = None,
        after: int | None = None,
        follow: bool = True,
    ) -> runtime.Flow[T]:
        """The documents of a numbered stream, as they come, without end, over restarts of the daemon: it is asked again
        for those after the last that came. Without `follow`, those there are."""
        patience = wire.Patience(RESTART_S)
        while True:
            asked = {**(params or {}), "after": after, "follow": follow or None}
            try:
                async with aclosing(self.lines("GET", path, params=asked)) as lines:
                    async for line in lines:
                        patience.reset()
                        if line is None:
                            continue
                        if line.get("type") == "error":
                            raise from_problem(line["problem"])
                        document = parse(line)
                        after = number(document)
                        yield document
                if not follow:
                    return
                raise DaemonUnreachable("The daemon ended the stream.")
            except ForkyardError as exc:
                pause_s = patience.next_pause_s() if exc.retryable else None
                if pause_s is None:
                    raise
                await runtime.sleep(pause_s)

    async def websocket(self, path: str, params: Params) -> runtime.Connection:
        endpoint = await self.endpoint()
        try:
            return await runtime.open_websocket(
                endpoint.websocket_url("/api/v1" + wire.path_with_query(path, params)),
                socket=endpoint.socket,
                headers=endpoint.headers,
                use_proxy=endpoint.behind_proxies,
                timeout_s=wire.CONNECT_S,
            )
        except InvalidStatus as exc:
            raise wire.error_of(exc.response.status_code, bytes(exc.response.body or b""), endpoint.where) from exc
        except (OSError, WebSocketException) as exc:
            raise DaemonUnreachable(
                f"No terminal could be opened at {endpoint.where}: {exc or type(exc).__name__}.", where=endpoint.where
            ) from exc
