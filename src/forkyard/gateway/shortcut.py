"""What the server and an app agree on for requests that need no task: see `server`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from starlette.types import ASGIApp, Scope

from forkyard.gateway.upstream import Headers


class Client(Protocol):
    """Whoever waits for the answer to a request that took the shortcut."""

    #: Set by whoever took it; called if the client goes away before it was answered.
    gone: Callable[[], None] | None

    def answer(self, status: int, headers: Headers, body: bytes) -> bool:
        """All of it, in one piece. False: not now, or not this; nothing was sent. The body of an answer to HEAD is empty."""

    def go_on(self, app: ASGIApp) -> None:
        """As a task, from here."""


#: Says whether it took the request. If it did, it answers or goes on as a task, unless the client is gone before.
Shortcut = Callable[[Scope, Client], bool]
