"""Images out of a registry that runs on this machine: public, private, missing, for another machine, unreachable."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from forkyard.errors import (
    Forbidden,
    ForkyardError,
    ImageNotFound,
    InvalidImage,
    InvalidRequest,
    RegistryUnreachable,
)
from forkyard.host.registries import Registries
from forkyard.images import oci
from forkyard.images.registry import pull
from forkyard.net.outside import Outside, tcp_connect
from forkyard.net.resolver import HostResolver

from .registry import PASSWORD, USER, Registry, running_registry


@pytest.fixture(params=["public", "private"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    with running_registry(tmp_path, private=request.param == "private") as found:
        yield found


def test_an_image_is_pulled_with_the_credentials_it_needs_and_none_is_left(registry: Registry, tmp_path: Path) -> None:
    digest = registry.push("team/app", b"\0" * 10240)
    registry.push("team/arm", b"\0" * 10240, architecture="arm64")
    credentials = registry.credentials

    async def go() -> None:
        ref = f"{registry.name}/team/app:1"
        await pull(ref, tmp_path / "good", credentials=credentials, plain_http=True)
        contents = oci.read_layout(tmp_path / "good")
        assert (contents.config.env, len(contents.layers)) == ({"A": "1"}, 1)
        for wrong in (None, (USER, "guessed")) if credentials else ():
            with pytest.raises(Forbidden, match="refuses"):
                await pull(ref, tmp_path / "none", credentials=wrong, plain_http=True)
        with pytest.raises(ImageNotFound):
            await pull(f"{registry.name}/team/app:2", tmp_path / "none", credentials=credentials, plain_http=True)
        await pull(f"{registry.name}/team/arm:1", tmp_path / "arm", credentials=credentials, plain_http=True)
        with pytest.raises(InvalidImage, match="arm64"):
            oci.read_layout(tmp_path / "arm")
        await pull(f"{ref}@{digest}", tmp_path / "exact", credentials=credentials, plain_http=True)
        assert oci.read_layout(tmp_path / "exact").digest == contents.digest, "a tag beside a digest is of no account"
        with pytest.raises(InvalidRequest, match="cannot be the name"):
            await pull(f"{ref}:", tmp_path / "none", credentials=credentials, plain_http=True)
        with pytest.raises(RegistryUnreachable):
            await pull("127.0.0.1:1/a:1", tmp_path / "none", credentials=None, plain_http=True)

    asyncio.run(go())
    assert PASSWORD.encode() not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


# ── where a registry may be ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["127.0.0.1:5000", "169.254.169.254", "10.1.2.3:443", "localhost:5000"])
def test_a_registry_on_this_host_or_in_a_private_network_is_not_asked(name: str, tmp_path: Path) -> None:
    ways = Registries(Outside(HostResolver()), [])
    with pytest.raises(Forbidden, match="FORKYARD_PRIVATE_REGISTRIES"):
        asyncio.run(pull(f"{name}/a:1", tmp_path / "x", credentials=None, plain_http=True, way_to=ways.way))


class _Public:
    """A registry on the Internet, as far as whoever asks can tell."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def resolve(self, name: str) -> list[str]:
        return ["93.184.216.34"] if name == "registry.test" else []

    async def connect(self, _address: str, _port: int) -> socket.socket:
        return await tcp_connect("127.0.0.1", self._port)

    def ways(self) -> Registries:
        return Registries(Outside(self, connect=self.connect), [])


def test_a_public_registry_is_pulled_from_through_an_errand(registry: Registry, tmp_path: Path) -> None:
    registry.push("team/app", b"\0" * 10240)
    public = _Public(int(registry.name.partition(":")[2]))
    to = tmp_path / "good"
    asyncio.run(
        pull(
            "registry.test/team/app:1",
            to,
            credentials=registry.credentials,
            plain_http=True,
            way_to=public.ways().way,
        )
    )
    assert oci.read_layout(to).config.env == {"A": "1"}


def test_a_registry_leads_nobody_to_this_host(tmp_path: Path) -> None:
    asked = []

    class Victim(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    victim = ThreadingHTTPServer(("127.0.0.1", 0), Victim)

    class Liar(Victim):
        def do_GET(self) -> None:
            self.send_response(401)
            realm = f"http://127.0.0.1:{victim.server_port}/token"
            self.send_header("WWW-Authenticate", f'Bearer realm="{realm}",service="x"')
            self.end_headers()

    liar = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    for server in (victim, liar):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(ForkyardError):
            asyncio.run(
                pull(
                    "registry.test/a:1",
                    tmp_path / "x",
                    credentials=None,
                    plain_http=True,
                    way_to=_Public(liar.server_port).ways().way,
                )
            )
        with pytest.raises(RegistryUnreachable):
            asyncio.run(
                pull(
                    "nowhere.test/a:1",
                    tmp_path / "x",
                    credentials=None,
                    plain_http=True,
                    way_to=_Public(liar.server_port).ways().way,
                )
            )
    finally:
        for server in (victim, liar):
            server.shutdown()
            server.server_close()
    assert asked == []
