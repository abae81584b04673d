"""Secrets in HTTP headers: placeholders out, values in; and values out of what comes back. Pure.

Headers that the policy adds (`put`) are set whatever the guest has sent.

On the way to the hosts of a secret, in its header and nowhere else:

- a header that is the placeholder alone becomes what the secret's `format` says: `Bearer <value>`;
- a placeholder inside other text (`token <placeholder>`) is replaced where it stands;
- of `Basic` credentials (what git sends for `https://x:<placeholder>@host`) the decoded text is looked at.

A request without the placeholder is sent as it is. On the way back every occurrence of a value that was put in, in
headers and bodies, is overwritten with as many `*`, so that a server that repeats what it was sent does not tell.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable

from forkyard.net.base import Header, Injection
from forkyard.net.policy import matches

Headers = list[tuple[bytes, bytes]]
#: What is shorter would be found anywhere.
_TELLING_BYTES = 4


def wanted(injections: Iterable[Injection], name: str) -> list[Injection]:
    """Those that may go to this host."""
    return [injection for injection in injections if any(matches(pattern, name) for pattern in injection.hosts)]


def inject(headers: Headers, injections: Iterable[Injection]) -> tuple[Headers, set[bytes]]:
    """The headers with values in them, and what must not come back."""
    found: Headers = []
    used: set[bytes] = set()
    for name, value in headers:
        for injection in injections:
            if name.lower() == injection.header.lower().encode("ascii"):
                filled = _filled(value, injection)
                if filled is not None:
                    value = filled
                    used |= _forms(injection, filled)
        found.append((name, value))
    return found, used


def put(headers: Headers, more: Iterable[Header]) -> tuple[Headers, set[bytes]]:
    """The headers with more of them, the last of each name alone; and what must not come back."""
    used: set[bytes] = set()
    for one in more:
        name, value = one.name.encode("ascii"), one.value.encode()
        headers = [*((known, text) for known, text in headers if known.lower() != name.lower()), (name, value)]
        for hidden in one.hidden:
            used |= {hidden.encode(), base64.b64encode(hidden.encode())}
    return headers, {form for form in used if len(form) >= _TELLING_BYTES}


def _filled(header: bytes, injection: Injection) -> bytes | None:
    """None: the placeholder is not in it."""
    placeholder, value = injection.placeholder.encode(), injection.value.encode()
    basic = "{basic}" in injection.format
    core = base64.b64encode(value) if basic else value
    if header.strip() == placeholder:
        before, _, after = injection.format.partition("{basic}" if basic else "{}")
        return before.encode() + core + after.encode()
    if placeholder in header:
        return header.replace(placeholder, core)
    scheme, _, credentials = header.strip().partition(b" ")
    if scheme.lower() == b"basic":
        try:
            plain = base64.b64decode(credentials.strip(), validate=True)
        except (binascii.Error, ValueError):
            return None
        if placeholder in plain:
            return scheme + b" " + base64.b64encode(plain.replace(placeholder, value))
    return None


def _forms(injection: Injection, header: bytes) -> set[bytes]:
    """How the value may come back: as it is, or as it stood in the header. Not one that is so short that it would
    be found anywhere."""
    value = injection.value.encode()
    scheme, _, credentials = header.strip().partition(b" ")
    forms = {value, base64.b64encode(value)}
    if scheme.lower() == b"basic":
        forms.add(credentials.strip())
    return {form for form in forms if len(form) >= _TELLING_BYTES}


class Scrubber:
    """Overwrites secrets in a stream, also where one is cut in two. Holds back only what may be the beginning of one."""

    def __init__(self, secrets: Iterable[bytes]) -> None:
        self._secrets = sorted(secrets, key=len, reverse=True)
        self._held = b""

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def whole(self, data: bytes) -> bytes:
        for secret in self._secrets:
            data = data.replace(secret, b"*" * len(secret))
        return data

    def feed(self, data: bytes) -> bytes:
        if not self._secrets:
            return data
        data = self.whole(self._held + data)
        held = max((_overlap(data, secret) for secret in self._secrets), default=0)
        self._held = data[len(data) - held :]
        return data[: len(data) - held]

    def finish(self) -> bytes:
        held, self._held = self._held, b""
        return held


def _overlap(data: bytes, secret: bytes) -> int:
    """How many of the last bytes of `data` are the beginning of `secret`."""
    for size in range(min(len(data), len(secret) - 1), 0, -1):
        if data.endswith(secret[:size]):
            return size
    return 0
