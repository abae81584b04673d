"""`http://git.forkyard.internal/NAME.git`: hosted repositories for sandboxes. Listens for their doors, and nobody else.

Owns: the address inside, and that nothing of what the guest or the door showed goes on: answers of git-lfs repeat the
credential they were asked with.
"""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from forkyard.api.git_http import GitHttp
from forkyard.control.inside import Inside
from forkyard.git.hosting import GitHosting

_DROPPED = {b"authorization", b"x-api-key"}
_PREFIX = "/git/"


class InsideGit:
    """An ASGI application."""

    def __init__(self, hosting: GitHosting, inside: Inside) -> None:
        self._git = GitHttp(hosting, inside.who)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        await self._git(
            {
                **scope,
                "path": path if path.startswith(_PREFIX) else f"/git{path}",
                "headers": [(name, value) for name, value in scope["headers"] if name not in _DROPPED],
            },
            receive,
            send,
        )
