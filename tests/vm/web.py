"""An HTTPS server with a certificate authority of its own, for tests of what the door does with HTTP.

Server and daemon live in two network namespaces of the test's, with a cable between them, and the server on an address
that looks public and leads nowhere. The daemon finds its names in a hosts file that only it sees, and trusts its
authority by FORKYARD_EXTRA_CA_FILE.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shlex
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from forkyard.models.network import EgressPolicy, EgressRule
from forkyard.net.authority import Authority
from forkyard.net.namespace import inside

from .conftest import Daemon, remove_daemon

ADDRESS, HOST = "11.7.0.1", "11.7.0.2"
API, OTHER = "api.forkyard.test", "other.forkyard.test"
RULES = [EgressRule(domain="*.forkyard.test"), EgressRule(cidr=f"{ADDRESS}/32")]
REACHABLE = EgressPolicy(preset="none", rules=RULES)


@dataclass
class Request:
    host: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Web:
    """`/headers` repeats the headers; `/count` says how many requests came; `/bytes` is large; `/repo.git` wants Basic
    credentials, as a host of Git does."""

    def __init__(self, directory: Path, namespace: str, names: Sequence[str]) -> None:
        self.authority = Authority.load_or_make(directory)
        self.ca_file = directory / "ca.pem"
        self.requests: list[Request] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                web.answer(self)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((ADDRESS, 443), Handler, bind_and_activate=False)
        self._server.daemon_threads = True
        self._server.socket.close()
        self._server.socket = asyncio.run(inside(Path("/run/netns") / namespace, _listening))
        context = self.authority.context_for(names)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        body = handler.rfile.read(int(headers.get("content-length", 0)))
        request = Request(headers.get("host", ""), handler.command, handler.path, headers, body)
        self.requests.append(request)
        status, answer = 200, b"hello\n"
        if handler.path.startswith("/headers"):
            answer = json.dumps(headers).encode()
        elif handler.path == "/count":
            answer = str(len(self.requests)).encode()
        elif handler.path == "/bytes":
            answer = bytes(range(256)) * 4096
        elif handler.path.startswith("/repo.git") and "authorization" not in headers:
            status = 401
        handler.send_response(status)
        if status == 401:
            handler.send_header("WWW-Authenticate", 'Basic realm="test"')
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        handler.wfile.write(answer)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def authorizations(self, host: str = API) -> list[str]:
        """Of the requests that came to this name since the last call."""
        found = [one.headers.get("authorization", "") for one in self.requests if one.host == host]
        self.requests = [one for one in self.requests if one.host != host]
        return found


def _listening() -> socket.socket:
    return socket.create_server((ADDRESS, 443))


@dataclass
class WebDaemon(Daemon):
    hosts: Path = field(default_factory=Path)
    namespace: str = ""

    @property
    def command(self) -> list[str]:
        script = f"mount --bind {shlex.quote(str(self.hosts))} /etc/hosts && exec {shlex.join(super().command)}"
        return [
            *("nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--mount", "--propagation", "slave"),
            *("sh", "-c", script),
        ]


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


@contextlib.contextmanager
def web_daemon(names: Sequence[str] = (API, OTHER)) -> Iterator[tuple[Web, WebDaemon]]:
    namespace = f"fyw-{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory(prefix="fyw-", dir="/tmp") as directory, contextlib.ExitStack() as stack:
        outside = f"{namespace}-out"
        for name in (namespace, outside):
            _ip(f"netns add {name}")
            stack.callback(_ip, f"netns del {name}")
            _ip(f"-n {name} link set lo up")
        _ip(f"-n {namespace} link add cable type veth peer name cable netns {outside}")
        for name, address in ((namespace, HOST), (outside, ADDRESS)):
            _ip(f"-n {name} addr add {address}/24 dev cable")
            _ip(f"-n {name} link set cable up")
        web = Web(Path(directory) / "authority", outside, names)
        stack.callback(web.close)
        hosts = Path(directory) / "hosts"
        hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} {' '.join(names)}\n")
        root = Path(tempfile.mkdtemp(prefix="fyt-", dir="/tmp"))
        root.chmod(0o711)
        extra_env = {"FORKYARD_EXTRA_CA_FILE": str(web.ca_file)}
        daemon = WebDaemon(root, extra_env=extra_env, hosts=hosts, namespace=namespace)
        daemon.start()
        try:
            yield web, daemon
        finally:
            remove_daemon(daemon)
