"""The way of this host's git to another host: where it may lead is decided before a word is sent there.

Owns: that imports and syncs reach public addresses only, through redirects and names that answer differently the second
time as well, unless more is allowed. Never does: git itself.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from forkyard.errors import Forbidden, ForkyardError, RemoteFailed
from forkyard.net.errands import Errand
from forkyard.net.outside import Outside
from forkyard.net.policy import Abroad

_PORTS = {"ssh": 22, "git": 9418, "http": 80, "https": 443}


@dataclass(frozen=True)
class Way:
    """What git is given, for as long as the way is open."""

    config: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


class Ways:
    def __init__(self, outside: Outside, *, allow_private: bool, ca: Path | None = None) -> None:
        """`ca`: certificate authorities to trust."""
        self._outside = outside
        self._config = {} if ca is None else {"http.sslCAInfo": str(ca)}
        self._allow_private = allow_private

    def refuse(self, url: str, how: str) -> None:
        """What can be said before anything is looked up."""
        decision = Abroad(how, private=self._allow_private).host(_host_and_port(url)[1])
        if not decision.allowed:
            raise Forbidden(f"{_clean(url)}: {decision.reason}", url=_clean(url))

    @contextlib.asynccontextmanager
    async def to(self, url: str, how: str, *, allow_private: bool = False) -> AsyncIterator[Way]:
        """An error on this way says so, if it was one that is not allowed. `how`: what allows it."""
        if allow_private or self._allow_private:
            yield Way(self._config)
            return
        errand = Errand(self._outside, Abroad(how), "git")
        scheme, host, port = _host_and_port(url)
        try:
            if scheme in ("http", "https"):
                async with errand.proxy() as proxy:
                    yield Way({**self._config, "http.proxy": proxy})
            else:
                yield await self._pinned(errand, scheme, host, port)
        except ForkyardError:
            if errand.denied is not None:
                raise Forbidden(f"{_clean(url)}: {errand.denied}", url=_clean(url)) from None
            raise

    async def _pinned(self, errand: Errand, scheme: str, host: str, port: int) -> Way:
        """These speak to one host only: the address that was looked at, under its name."""
        try:
            address = await errand.address(host, port)
        except OSError as error:
            raise RemoteFailed(f"{host} cannot be looked up: {error}") from None
        if address is None:
            raise RemoteFailed(f"{host} is not allowed")
        if scheme == "ssh":
            return Way(env={"GIT_SSH_COMMAND": f"ssh -oBatchMode=yes -oHostName={address} -oHostKeyAlias={host}"})
        place = f":{port}" if port != _PORTS["git"] else ""
        return Way(
            {f"url.git://{address}{place}/.insteadOf": f"git://{host}{place}/"},
            {"GIT_OVERRIDE_VIRTUAL_HOST": f"{host}{place}"},
        )


def _host_and_port(url: str) -> tuple[str, str, int]:
    """Of a checked url; `git@host:path` is ssh too."""
    parts = urlsplit(url)
    if parts.scheme in _PORTS and parts.hostname:
        return parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme]
    return "ssh", url.partition("@")[2].partition(":")[0].lower(), _PORTS["ssh"]


def _clean(url: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", url)
