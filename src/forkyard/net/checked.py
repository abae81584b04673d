"""Plain HTTP on a connection that is carried: each request is checked and written down.

Owns: what passes between two sockets while it is HTTP, and until a WebSocket was agreed on. Never does: deciding.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

from forkyard.net.outside import Request
from forkyard.net.relay import Relay
from forkyard.net.requests import Head, Requests

_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])[ \r\n]")
_STATUS_BYTES = len(b"HTTP/1.1 101 ")

#: Of each request: which headers to replace, or why it goes no further.
Check = Callable[[Head], Mapping[str, str]]


class Checked:
    """On a relay: requests are checked one by one and written down with the status they are answered with, and
    a WebSocket is let through once the server agrees.

    Where an answer ends is not looked for: it begins with the first that comes after its request. Once a guest does not
    wait for an answer before it asks again, that is no longer so, and no more statuses are told."""

    def __init__(self, relay: Relay, check: Check, log: Callable[[Request], None]) -> None:
        self._relay, self._check, self._log = relay, check, log
        self._requests = Requests(self._head)
        self._asked: tuple[Head, float] | None = None
        self._answer = b""
        self._in_step = True
        relay.up.filter = self._upward

    def over(self, status: int | None = None) -> None:
        """What was asked is answered, or never will be."""
        asked, self._asked = self._asked, None
        if asked is not None:
            head, began_s = asked
            self._log(Request(head.method, head.target, status, duration_s=time.monotonic() - began_s))

    def _head(self, head: Head) -> Mapping[str, str]:
        replaced = self._check(head)
        self._in_step = self._in_step and self._asked is None
        self.over()
        self._asked, self._answer = (head, time.monotonic()), b""
        if not self._in_step:
            self.over()
        return replaced

    def _upward(self, data: memoryview) -> bytes:
        passed = self._requests.feed(data)
        if self._requests.waiting:
            self._relay.up.pause()
        self._listen()
        return passed

    def _listen(self) -> None:
        self._relay.down.filter = self._downward if self._asked is not None or self._requests.waiting else None

    def _downward(self, data: memoryview) -> memoryview:
        self._answer += bytes(data[: _STATUS_BYTES - len(self._answer)])
        if len(self._answer) < _STATUS_BYTES:
            return data
        found = _STATUS.fullmatch(self._answer)
        status = None if found is None else int(found[1])
        self._answer = b""
        if self._requests.waiting:
            self.over(status)
            self._relay.up.write(self._requests.upgraded(status == 101))
            self._relay.up.resume()
        elif status is None or status >= 200:
            self._in_step = status is not None
            self.over(status)
        self._listen()
        return data
