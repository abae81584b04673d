"""Where the names lead that a policy denies, for connections that name nothing.

Owns: their addresses, asked for again once in a while and remembered for longer: what is behind a name changes. Names
with a `*` in them cannot be asked for. Never does: deciding.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

from forkyard.net.outside import Resolver

_ASKED_AGAIN_S = 30.0
_REMEMBERED_S = 3600.0
_PATIENCE_S = 1.0
_ADDRESSES_PER_NAME = 256


class DeniedNames:
    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._found: dict[str, dict[str, float]] = {}
        self._asked: dict[str, float] = {}
        self._asking: set[asyncio.Task[None]] = set()

    async def learn(self, names: Iterable[str]) -> None:
        """Ask for those that were not asked for lately. A resolver that is slow is not waited for long."""
        now = time.monotonic()
        for name in names:
            if now - self._asked.get(name, float("-inf")) > _ASKED_AGAIN_S:
                self._asked[name] = now
                task = asyncio.create_task(self._ask(name))
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
        if self._asking:
            await asyncio.wait(tuple(self._asking), timeout=_PATIENCE_S)

    def leading_to(self, names: Iterable[str], address: str) -> list[str]:
        """Those of these names that gave this address."""
        oldest = time.monotonic() - _REMEMBERED_S
        return [name for name in names if self._found.get(name, {}).get(address, oldest) > oldest]

    async def close(self) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def _ask(self, name: str) -> None:
        with contextlib.suppress(OSError):
            addresses = await self._resolver.resolve(name)
            found = self._found.setdefault(name, {})
            for address in addresses:
                found.pop(address, None)
                found[address] = time.monotonic()
            while len(found) > _ADDRESSES_PER_NAME:
                del found[next(iter(found))]
