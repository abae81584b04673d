"""HTTPS as a daemon's settings make it: with a certificate that the user brings, or with the local authority's."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.asyncio.client import connect

from forkyard import Forkyard, HostFailure

from .gateway_yard import Backend, Seen, backend
from .test_preview_sockets import socket_server
from .whole_daemon import WholeDaemon, free_port, running

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def brought(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wildcard certificate that signs itself, and its key."""
    directory = tmp_path_factory.mktemp("brought")
    certificate, key = directory / "cert.pem", directory / "key.pem"
    names = "subjectAltName=DNS:*.preview.test,DNS:preview.test"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=preview.test"),
            *("-addext", names),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.fixture(scope="module")
def own(brought: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeDaemon]:
    certificate, key = brought
    settings = {"tls_port": free_port(), "tls_cert_file": certificate, "tls_key_file": key}
    with running(tmp_path_factory.mktemp("o"), preview_domain="preview.test", **settings) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeDaemon]:
    with running(tmp_path_factory.mktemp("l"), tls_port=free_port()) as daemon:
        yield daemon


async def asked(port: int, name: str, context: ssl.SSLContext, path: str = "/") -> str:
    """What a client that trusts `context` gets from https://name:port."""
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n".encode())
            return (await reader.read()).decode()
        finally:
            writer.close()


def told(server: Backend) -> dict[str, str]:
    seen: Seen = server.seen[-1]
    return {name: value for name, value in seen.headers.items() if name.startswith("x-forwarded")}


async def test_a_certificate_that_is_brought_is_shown_for_previews_and_the_api(
    own: WholeDaemon, brought: tuple[Path, Path]
) -> None:
    port, trusting = own.settings.tls_port or 0, ssl.create_default_context(cafile=brought[0])
    async with backend() as server:
        with own.client() as fy, fy.sandboxes.create() as sandbox:
            name = f"{server.port}-{sandbox.id}.preview.test"
            assert sandbox.url(server.port) == f"https://{name}:{port}"
            assert "hello" in await asked(port, name, trusting)
            assert told(server) == {
                "x-forwarded-for": "127.0.0.1",
                "x-forwarded-host": f"{name}:{port}",
                "x-forwarded-proto": "https",
                "x-forwarded-port": str(port),
            }
        assert '"status"' in await asked(port, "preview.test", trusting, "/api/v1/health")
    with pytest.raises(ssl.SSLCertVerificationError):
        await asked(port, "preview.test", ssl.create_default_context())


async def test_the_local_authority_makes_a_certificate_for_each_preview(local: WholeDaemon) -> None:
    port = local.settings.tls_port or 0
    with local.client() as fy, fy.sandboxes.create() as sandbox:
        trusting = ssl.create_default_context(cadata=fy.ca())
        async with backend() as server:
            name = f"{server.port}-{sandbox.id}.localhost"
            assert "hello" in await asked(port, name, trusting)
            assert told(server)["x-forwarded-proto"] == "https"
        assert '"status"' in await asked(port, "localhost", trusting, "/api/v1/health")
        async with (
            socket_server() as echoing,
            connect(
                f"wss://{echoing}-{sandbox.id}.localhost:{port}/",
                host="127.0.0.1",
                port=port,
                ssl=trusting,
                proxy=None,
            ) as one,
        ):
            await one.send("over TLS")
            assert await one.recv() == "over TLS"
        for stranger in ("example.com", f"0-{sandbox.id}.localhost"):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asked(port, stranger, trusting)


def test_the_authority_is_the_same_after_a_restart(tmp_path: Path) -> None:
    certificates = []
    for _ in range(2):
        with running(tmp_path, tls_port=0) as daemon, daemon.client() as fy:
            certificates.append(fy.ca())
    assert certificates[0] == certificates[1]


@pytest.mark.parametrize("broken", ["tls_cert_file", "tls_key_file", "tls_cert_dir"])
def test_a_certificate_that_cannot_be_used_is_named(broken: str, brought: tuple[Path, Path], tmp_path: Path) -> None:
    files = {"tls_cert_file": brought[0], "tls_key_file": brought[1], broken: tmp_path / "nothing.pem"}
    named = "DIR" if broken == "tls_cert_dir" else "FILE"
    refused = pytest.raises(HostFailure, match=rf"nothing.pem .*FORKYARD_TLS_CERT_{named}")
    with refused, running(tmp_path / "d", tls_port=0, **files):
        raise AssertionError("it started")


def test_without_a_port_there_is_no_https(tmp_path: Path) -> None:
    with running(tmp_path) as daemon, daemon.client() as fy, fy.sandboxes.create() as sandbox:
        assert isinstance(fy, Forkyard)
        assert sandbox.url(3000).startswith("http://")
