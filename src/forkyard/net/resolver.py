"""Addresses of names outside, as this host sees them.

Owns: a bounded cache in front of the host's own resolver (its /etc/hosts included), one question at a time per name,
and a deadline. Which names may be asked for at all is decided before they come here.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_FOUND_TTL_S = 30.0
_ABSENT_TTL_S = 5.0
_TIMEOUT_S = 5.0
_CACHED_NAMES = 4096
_THREADS = 16
_ABSENT = (socket.EAI_NONAME, socket.EAI_NODATA)  # type: ignore[attr-defined, unused-ignore]

Lookup = Callable[[str], list[str]]


def host_lookup(name: str) -> list[str]:
    """Blocks. Empty if the name has no IPv4 address."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _ABSENT:
            return []
        raise
    except UnicodeError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class HostResolver:
    """One per daemon."""

    def __init__(self, lookup: Lookup = host_lookup, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._lookup = lookup
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="resolve")
        self._cache: OrderedDict[str, tuple[float, list[str]]] = OrderedDict()
        self._asked: dict[str, asyncio.Future[list[str]]] = {}

    async def resolve(self, name: str) -> list[str]:
        now = time.monotonic()
        if (hit := self._cache.get(name)) and hit[0] > now:
            self._cache.move_to_end(name)
            return hit[1]
        asked = self._asked.get(name)
        if asked is None:
            asked = asyncio.get_running_loop().run_in_executor(self._threads, self._lookup, name)
            self._asked[name] = asked
            asked.add_done_callback(lambda done: self._keep(name, done))
        async with asyncio.timeout(self._timeout_s):
            return await asyncio.shield(asked)

    def _keep(self, name: str, done: asyncio.Future[list[str]]) -> None:
        self._asked.pop(name, None)
        if done.cancelled() or done.exception():
            return
        addresses = done.result()
        self._cache[name] = (time.monotonic() + (_FOUND_TTL_S if addresses else _ABSENT_TTL_S), addresses)
        while len(self._cache) > _CACHED_NAMES:
            self._cache.popitem(last=False)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
