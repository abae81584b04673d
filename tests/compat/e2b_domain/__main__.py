"""The package finds a daemon by its domain alone, over HTTPS: a sandbox, a command, a file, a signed URL."""

from __future__ import annotations

import json
import socket
import traceback
from typing import Any

_resolve = socket.getaddrinfo


def _here(host: Any, *rest: Any, **options: Any) -> Any:
    """Every name of the domain is this machine. (Clients since 2.35 do not ask Python; they take the proxy.)"""
    return _resolve("127.0.0.1" if str(host).endswith(".fork.test") else host, *rest, **options)


socket.getaddrinfo = _here


def check() -> None:
    import e2b
    import httpx

    made = e2b.Sandbox.create(timeout=300)
    try:
        assert made.commands.run("echo over TLS").stdout == "over TLS\n"
        path = "/tmp/e2b-domain.txt"
        made.files.write(path, "x")
        assert made.files.read(path) == "x"
        host = made.get_host(3000)
        assert host.startswith(f"3000-{made.sandbox_id}.fork.test"), host
        url = made.download_url(path)
        assert url.startswith(f"https://49983-{made.sandbox_id}.fork.test"), url
        assert httpx.get(url).text == "x"
        assert made.is_running()
        made.files.remove(path)
    finally:
        assert made.kill()


wrong = None
try:
    check()
except BaseException:
    wrong = traceback.format_exc(limit=-6)
print(json.dumps({"call": "by its domain", "wrong": wrong}))
