"""Requests as E2B's clients send them, without a client: for what no published one says, or shows."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
from collections.abc import Iterator
from typing import Any

import httpx

from ..contract.sdk_daemon import Daemon  # noqa: TID252


@contextlib.contextmanager
def api_of(daemon: Daemon) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=daemon.url, headers={"X-API-KEY": daemon.key}, timeout=30) as client:
        yield client


@contextlib.contextmanager
def envd_of(daemon: Daemon, sandbox: dict[str, str], port: int = 49983) -> Iterator[httpx.Client]:
    headers = {
        "E2b-Sandbox-Id": sandbox["sandboxID"],
        "E2b-Sandbox-Port": str(port),
        "X-Access-Token": sandbox["envdAccessToken"],
    }
    with httpx.Client(base_url=daemon.url, headers=headers, timeout=30) as client:
        yield client


def made(api: httpx.Client, **more: Any) -> dict[str, str]:
    answer = api.post("/v2/sandboxes", json={"templateID": "base", "timeout": 600, **more})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def is_error(answer: httpx.Response) -> bool:
    body = answer.json()
    return body["code"] == answer.status_code and isinstance(body["message"], str) and body["message"] != ""


def stream(envd: httpx.Client, method: str, message: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """All messages of a stream; the last one is its end."""
    body = json.dumps(message).encode()
    answer = envd.post(
        f"/{method}",
        content=struct.pack(">BI", 0, len(body)) + body,
        headers={"Content-Type": "application/connect+json", **headers},
    )
    assert answer.status_code == 200, answer.text
    found, rest = [], answer.content
    while rest:
        _, length = struct.unpack_from(">BI", rest)
        found.append(json.loads(rest[5 : 5 + length]))
        rest = rest[5 + length :]
    return found


def ran(envd: httpx.Client, command: str, **headers: str) -> str:
    """What a command wrote to stdout."""
    wanted = {"process": {"cmd": "/bin/sh", "args": ["-c", command]}}
    events = [one.get("event", {}) for one in stream(envd, "process.Process/Start", wanted, **headers)]
    return b"".join(base64.b64decode(one.get("data", {}).get("stdout", "")) for one in events).decode()


def of_user(name: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:".encode()).decode()}
