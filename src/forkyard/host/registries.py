"""The way to registries of images, for the program that pulls them.

Owns: which may be on this host or in private networks: those that the settings name, which are spoken to directly. For
any other, the program runs in a network of its own with nothing in it but the proxy of an errand, so whatever a registry
leads it to (a redirect, where tokens come from) is decided as the registry itself is.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, closing
from socket import socket

from forkyard.errors import Forbidden, RegistryUnreachable
from forkyard.images.registry import Way
from forkyard.net import namespace
from forkyard.net.errands import Errand
from forkyard.net.outside import Outside
from forkyard.net.policy import Abroad

_HTTPS = 443
_BACKLOG = 128
_COMMAND_S = 30.0


class Registries:
    def __init__(self, outside: Outside, trusted: Collection[str]) -> None:
        self._outside = outside
        self._trusted = frozenset(trusted)

    @asynccontextmanager
    async def way(self, registry: str) -> AsyncIterator[Way]:
        if registry in self._trusted:
            yield Way()
            return
        how = f"whoever runs this daemon allows it: FORKYARD_PRIVATE_REGISTRIES={registry}"
        errand = Errand(self._outside, Abroad(how), f"pull from {registry}")
        await self._ask(errand, registry)
        fd, listener = await namespace.alone(_listening)
        try:
            with closing(listener):
                async with errand.proxy(listener) as proxy:
                    proxy = proxy.replace("socks5h:", "socks5:")  # which is the same to it
                    yield Way(
                        ("nsenter", f"--net=/proc/{os.getpid()}/fd/{fd}", "--"),
                        {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "NO_PROXY": "", "no_proxy": ""},
                        lambda: errand.denied,
                        lambda: errand.failed,
                    )
        finally:
            os.close(fd)

    async def _ask(self, errand: Errand, registry: str) -> None:
        """Most of what can be wrong is known before anything is started."""
        host, _, port = registry.partition(":")
        try:
            address = await errand.address(host, int(port) if port.isdecimal() else _HTTPS)
        except OSError as error:
            raise RegistryUnreachable(f"the registry {registry} cannot be reached: {error}") from None
        if address is None:
            raise Forbidden(f"the registry {registry} is not asked: {errand.denied}")


def _listening() -> socket:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, capture_output=True, timeout=_COMMAND_S)
    listener = socket()
    try:
        listener.bind(("127.0.0.1", 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
