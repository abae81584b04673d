"""Previews: what they are called, who may open them, and the way to a port of a guest.

Owns: tokens and one-time links, and what the gateway needs per request, remembered between two commits of the store so
that a warm request costs no query. Never does: HTTP (`gateway`).

A token is per sandbox and port and is kept, so it survives restarts; `rotate` makes another, and with it go all cookies
and links, which are derived from it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import socket
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime

from forkyard.control.ground import Ground, ended, machine
from forkyard.control.ports import explained
from forkyard.control.sleep import Sleep
from forkyard.errors import (
    GuestUnreachable,
    InvalidRequest,
    OperationTimeout,
    PortClosed,
    SandboxNotFound,
)
from forkyard.lifecycle import ENDED, State
from forkyard.models.network import PreviewInfo
from forkyard.store.records import SandboxRecord

LINK_PARAMETER = "forkyard_link"
TOKEN_HEADER = b"x-forkyard-preview-token"
LINK_LIFETIME_S = 3600
CONNECT_S = 10.0
_LINK = re.compile(r"([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})", re.ASCII)
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Address:
    """How previews are reached from outside."""

    domain: str = "localhost"
    scheme: str = "http"
    port: int = 7070

    def url(self, sandbox_id: str, port: int) -> str:
        outside = "" if self.port == _DEFAULT_PORTS.get(self.scheme) else f":{self.port}"
        return f"{self.scheme}://{port}-{sandbox_id}.{self.domain}{outside}"


class Previews:
    def __init__(self, ground: Ground, sleep: Sleep) -> None:
        self._ground = ground
        self._sleep = sleep
        #: Set by whoever listens.
        self.address = Address()
        self._news: asyncio.Event | None = None
        self._records: dict[str, SandboxRecord] = {}
        self._tokens: dict[tuple[str, int], str] = {}

    # ── for users ────────────────────────────────────────────────────────────────────────────────────────────────

    async def info(self, sandbox_id: str, port: int, *, origin: str | None = None) -> PreviewInfo:
        """`origin`: where the daemon is for this caller, if names below `localhost` do not lead there."""
        record = await self._living(sandbox_id, port)
        if origin is None or self.address.domain != "localhost":
            url = self.address.url(sandbox_id, port)
        else:
            url = f"{origin}/s/{sandbox_id}/{port}/"
            origin = None
        access = record.network.access(port)
        if access != "token":
            return PreviewInfo(url=url, access=access)
        token = await self._ground.store.put_preview_token(sandbox_id, port, _new_token(), replace=False)
        link = None if url.endswith("/") else f"{url}/?{LINK_PARAMETER}={_new_link(token, sandbox_id, port)}"
        return PreviewInfo(url=url, access=access, token=token, link=link)

    async def rotate(self, sandbox_id: str, port: int, *, origin: str | None = None) -> PreviewInfo:
        await self._living(sandbox_id, port)
        await self._ground.store.put_preview_token(sandbox_id, port, _new_token(), replace=True)
        return await self.info(sandbox_id, port, origin=origin)

    async def _living(self, sandbox_id: str, port: int) -> SandboxRecord:
        if not 1 <= port <= 65535:
            raise InvalidRequest(f"{port} is no port; ports are numbers from 1 to 65535", field="port")
        record = await self._ground.record(sandbox_id)
        if record.state in ENDED or record.state is State.DELETING:
            raise ended(record)
        return record

    # ── for the gateway ──────────────────────────────────────────────────────────────────────────────────────────

    def known(self, sandbox_id: str) -> SandboxRecord | None:
        """Exact: every change of a record is a commit, and after a commit nothing is remembered."""
        self._forget_the_outdated()
        return self._records.get(sandbox_id)

    def known_token(self, sandbox_id: str, port: int) -> str | None:
        self._forget_the_outdated()
        return self._tokens.get((sandbox_id, port))

    async def record(self, sandbox_id: str) -> SandboxRecord:
        found = self.known(sandbox_id)
        if found is None:
            news = self._news
            found = await self._ground.record(sandbox_id)
            if self._ground.store.news is news is self._news:
                self._records[sandbox_id] = found
        return found

    async def token(self, sandbox_id: str, port: int) -> str | None:
        found = self.known_token(sandbox_id, port)
        if found is None:
            news = self._news
            found = await self._ground.store.preview_token(sandbox_id, port)
            if found is not None and self._ground.store.news is news is self._news:
                self._tokens[sandbox_id, port] = found
        return found

    def _forget_the_outdated(self) -> None:
        news = self._ground.store.news
        if self._news is not news:
            self._news = news
            self._records.clear()
            self._tokens.clear()

    async def awake(self, sandbox_id: str) -> SandboxRecord:
        """The record of a running sandbox, woken if need be. Inside `using` it stays so."""
        record = await self.record(sandbox_id)
        return record if record.state is State.RUNNING else await self._sleep.awake(sandbox_id)

    async def connect(self, record: SandboxRecord, port: int) -> socket.socket:
        """To a port of this machine of a sandbox. `PortClosed` if nothing listens."""
        try:
            async with asyncio.timeout(CONNECT_S):
                return await self._ground.host.connect(machine(record), port)
        except TimeoutError:
            raise OperationTimeout(f"port {port} of sandbox {record.id} did not answer in {CONNECT_S:.0f} s") from None
        except SandboxNotFound:
            raise GuestUnreachable(f"the machine of sandbox {record.id} is gone; try again in a moment") from None

    async def closed(self, error: PortClosed, record: SandboxRecord, port: int) -> PortClosed:
        """The same, and what the guest knows about it."""
        return await explained(error, self._ground.host, machine(record), port)

    def using(self, sandbox_id: str) -> AbstractContextManager[None]:
        return self._ground.activity.using(sandbox_id)

    def begin(self, sandbox_id: str) -> None:
        """`using`, for those who cannot wait: until `end`."""
        self._ground.activity.begin(sandbox_id)

    def end(self, sandbox_id: str) -> None:
        self._ground.activity.end(sandbox_id)

    def passed(self, sandbox_id: str, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """Something flows: it is counted, and a sign of life."""
        self._ground.activity.touch(sandbox_id)
        self._ground.ingress.passed(sandbox_id, bytes_in=bytes_in, bytes_out=bytes_out)

    async def redeem(self, link: str, sandbox_id: str, port: int) -> bool:
        """Whether this one-time link opens this port. It never does so again."""
        token = await self.token(sandbox_id, port)
        found = _LINK.fullmatch(link)
        if token is None or found is None:
            return False
        expires_s, nonce = int(found[1]), found[2]
        if expires_s < time.time() or not hmac.compare_digest(
            found[3], _sign(token, sandbox_id, port, expires_s, nonce)
        ):
            return False
        return await self._ground.store.use_preview_link(nonce, datetime.fromtimestamp(expires_s, UTC))


def _new_token() -> str:
    return "fyp_" + secrets.token_urlsafe(24)


def _new_link(token: str, sandbox_id: str, port: int) -> str:
    expires_s, nonce = int(time.time()) + LINK_LIFETIME_S, secrets.token_hex(16)
    return f"{expires_s}.{nonce}.{_sign(token, sandbox_id, port, expires_s, nonce)}"


def _sign(token: str, sandbox_id: str, port: int, expires_s: int, nonce: str) -> str:
    message = f"link:{sandbox_id}:{port}:{expires_s}:{nonce}"
    return hmac.new(token.encode(), message.encode(), hashlib.sha256).hexdigest()
