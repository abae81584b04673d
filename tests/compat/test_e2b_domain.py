"""Clients that are given a domain and nothing else: `https://api.<domain>`, `https://49983-<id>.<domain>`, with certificates of
our own authority. The names lead nowhere in the world; a proxy, or an own resolver (npm), brings them here."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from forkyard.control.previews import Address
from forkyard.gateway import tls
from forkyard.net.authority import CERTIFICATE_NAME, Authority

from ..contract.sdk_daemon import Daemon, running_daemon  # noqa: TID252
from .clients import HERE, Client, Run, clients

DOMAIN = "fork.test"
_PYPI = clients("pypi", "e2b")
CLIENTS = [_PYPI[0], _PYPI[-1], *clients("npm", "e2b")[-1:]]
PROGRAMS = {"pypi": HERE / "e2b_domain", "npm": HERE / "e2b_npm_domain"}


class SecureDaemon(Daemon):
    """Listens on a port with TLS too."""

    tls_port = 0

    async def _listen(self) -> None:
        await super()._listen()
        context = tls.context(Authority.load_or_make(self.root), DOMAIN, lambda _: False)
        listening = socket.create_server(("127.0.0.1", self.tls_port))
        self.tls_port = listening.getsockname()[1]
        self._control.previews.address = Address(DOMAIN, "https", self.tls_port)
        config = uvicorn.Config(self._e2b, log_level="error", lifespan="off")
        config.load()
        config.ssl = context
        self._secure = uvicorn.Server(config)
        self._serving_tls = asyncio.create_task(self._secure.serve(sockets=[listening]))

    async def _close(self) -> None:
        self._secure.should_exit = self._secure.force_exit = True
        await self._serving_tls
        await super()._close()


class Proxy:
    """CONNECT to any name leads to one port of this machine."""

    def __init__(self, to: int) -> None:
        self._to = to

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"CONNECT ")
            there = await asyncio.open_connection("127.0.0.1", self._to)
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


@pytest.fixture(scope="module")
def daemon() -> Iterator[SecureDaemon]:
    with running_daemon(of=SecureDaemon) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def proxy(daemon: SecureDaemon) -> Iterator[int]:
    """On the daemon's loop, which runs in a thread of its own."""

    async def start() -> asyncio.Server:
        return await asyncio.start_server(Proxy(daemon.tls_port).handle, "127.0.0.1", 0)

    server = daemon._run(start())
    yield server.sockets[0].getsockname()[1]
    daemon._run(asyncio.sleep(0))
    server.get_loop().call_soon_threadsafe(server.close)


@pytest.mark.parametrize("client", CLIENTS, ids=str)
def test_a_client_finds_the_daemon_by_its_domain(daemon: SecureDaemon, proxy: int, client: Client) -> None:
    certificate = str(Path(daemon.root) / CERTIFICATE_NAME)
    key = daemon.cli("keys", "create", "e2b", "--format", "e2b").stdout.strip()
    env = {"E2B_API_KEY": key, "E2B_DOMAIN": f"{DOMAIN}:{daemon.tls_port}"}
    if client.kind == "npm":
        env |= {"NODE_EXTRA_CA_CERTS": certificate}
    else:
        env |= {"SSL_CERT_FILE": certificate, "HTTPS_PROXY": f"http://127.0.0.1:{proxy}", "NO_PROXY": ""}
    run = Run(client, PROGRAMS[client.kind], env)
    try:
        assert run.outcomes == {"by its domain": None}
    finally:
        run.end()
