"""What a browser shows when a preview cannot be shown. Pure.

People get a page, programs a problem document. Pages of states that pass load themselves again.
"""

from __future__ import annotations

import json
import math
from html import escape

from forkyard.errors import (
    BadAnswer,
    DomainNotFound,
    DomainUnverified,
    Forbidden,
    ForkyardError,
    GuestUnreachable,
    InvalidRequest,
    OperationTimeout,
    PortClosed,
    SandboxBusy,
    SandboxEnded,
    SandboxNotFound,
    StateConflict,
    Unauthenticated,
)
from forkyard.gateway.upstream import Headers
from forkyard.lifecycle import State

RETRY_S = 1
_TITLES: dict[type[ForkyardError], str] = {
    SandboxNotFound: "No such sandbox",
    SandboxEnded: "This sandbox has ended",
    PortClosed: "Nothing listens on this port yet",
    BadAnswer: "No answer that a browser could show",
    GuestUnreachable: "This sandbox does not answer",
    OperationTimeout: "This takes too long",
    StateConflict: "This sandbox is not running",
    Forbidden: "This port is not open",
    Unauthenticated: "This preview needs a token",
    SandboxBusy: "This sandbox is busy",
    DomainNotFound: "Nothing is at this address",
    DomainUnverified: "This domain is not verified yet",
    InvalidRequest: "This is no address of a preview",
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="robots" content="noindex">{refresh}
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 36em; margin: 20vh auto 0; padding: 0 1.5em }}
h1 {{ font-size: 1.3em }}
code {{ font-size: .9em }}
footer {{ margin-top: 3em; opacity: .6; font-size: .85em }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{text}</p>{note}
<footer>Forkyard</footer>
</body>
</html>
"""


def answer(error: ForkyardError, *, html: bool) -> tuple[int, Headers, bytes]:
    """Status, headers and body."""
    headers: Headers = [(b"cache-control", b"no-store")]
    if error.retryable:
        wait_s = max(RETRY_S, math.ceil(error.details.get("retry_after_s", RETRY_S)))
        headers.append((b"retry-after", str(wait_s).encode()))
    if html:
        body = _page(error)
        headers.append((b"content-type", b"text/html; charset=utf-8"))
        headers.append((b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'"))
    else:
        body = json.dumps(error.to_problem(), default=str).encode("ascii")
        headers.append((b"content-type", b"application/problem+json"))
    headers.append((b"content-length", str(len(body)).encode()))
    return error.status, headers, body


def _page(error: ForkyardError) -> bytes:
    title = next((text for kind, text in _TITLES.items() if isinstance(error, kind)), "This did not work")
    if error.details.get("state") == State.RESUMING:
        title = "Asleep, waking up"
    again = error.retryable
    return _PAGE.format(
        title=escape(title),
        text=_prose(error.message),
        refresh=f'\n<meta http-equiv="refresh" content="{RETRY_S}">' if again else "",
        note="\n<p>This page tries again by itself.</p>" if again else "",
    ).encode("utf-8", "replace")


def _prose(message: str) -> str:
    """A sentence; what stands between backticks is code."""
    text = message[:1].upper() + message[1:]
    pieces = escape(text).split("`")
    if len(pieces) % 2 == 0:
        return "`".join(pieces)
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
