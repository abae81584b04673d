"""Opening previews from tests: names below `localhost` lead to this machine, whatever its resolver thinks of them."""

from __future__ import annotations

import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
from websockets.sync.client import ClientConnection, connect

from forkyard import Sandbox


def get(url: str, path: str = "/", **options: Any) -> httpx.Response:
    parts = urlsplit(url)
    headers = {"Host": parts.netloc, **options.pop("headers", {})}
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.request(
            options.pop("method", "GET"), f"http://127.0.0.1:{parts.port}{path}", headers=headers, **options
        )


def open_socket(url: str, path: str = "/") -> ClientConnection:
    parts = urlsplit(url)
    made = socket.create_connection(("127.0.0.1", parts.port or 80))
    return connect(f"ws://{parts.netloc}{path}", sock=made, open_timeout=30)


def serve(sandbox: Sandbox, *command: str, cwd: str = "/root") -> None:
    """Start a server; the gateway waits for it to listen."""
    sandbox.spawn(list(command), cwd=cwd)


def until_served(url: str, path: str = "/", within_s: float = 60) -> httpx.Response:
    """A machine that is emulated may need longer for a server than the gateway waits."""
    deadline = time.monotonic() + within_s
    while (answer := get(url, path)).status_code == 502 and time.monotonic() < deadline:
        assert answer.json()["code"] == "port_closed", answer.text
    return answer
