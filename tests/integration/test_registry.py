"""Images out of a registry that runs on this machine: public, private, missing, for another machine, unreachable."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from forkyard.errors import Forbidden, ForkyardError, ImageNotFound, InvalidImage, RegistryUnreachable
from forkyard.host.registries import Registries
from forkyard.images import oci
from forkyard.images.registry import pull
from forkyard.net.outside import Outside, tcp_connect
from forkyard.net.resolver import HostResolver

USER, PASSWORD = "me", "hidden-password"
PASSWORD_HASH = "$2b$04$gIqefNyORAnxa3ptLcR1EuhjaWSfXeuNFH0VjqiqMbrxrX8wKyEP6"
CONFIG = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "127.0.0.1:{port}"}}
{auth}
"""


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Registry:
    def __init__(self, port: int, auth: tuple[str, str] | None) -> None:
        self.name = f"127.0.0.1:{port}"
        self._client = httpx.Client(base_url=f"http://{self.name}/v2", auth=auth, trust_env=False)

    def wait(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                self._client.get("/")
                return
            except httpx.HTTPError:
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def close(self) -> None:
        self._client.close()

    def push(self, name: str, layer: bytes, architecture: str = "amd64") -> None:
        config = json.dumps(
            {
                "architecture": architecture,
                "os": "linux",
                "config": {"Env": ["A=1"]},
                "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
            }
        ).encode()
        for blob in (layer, config):
            self._finish(self._client.post(f"/{name}/blobs/uploads/"), blob)
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        manifest = {
            "schemaVersion": 2,
            "mediaType": kind,
            "config": {
                "mediaType": "application/vnd.docker.container.image.v1+json",
                "size": len(config),
                "digest": _digest(config),
            },
            "layers": [
                {
                    "mediaType": "application/vnd.docker.image.rootfs.diff.tar",
                    "size": len(layer),
                    "digest": _digest(layer),
                }
            ],
        }
        answer = self._client.put(f"/{name}/manifests/1", content=json.dumps(manifest), headers={"Content-Type": kind})
        assert answer.status_code == 201, answer.text

    def _finish(self, began: httpx.Response, blob: bytes) -> None:
        where = httpx.URL(began.headers["Location"]).copy_merge_params({"digest": _digest(blob)})
        answer = self._client.put(where, content=blob, headers={"Content-Type": "application/octet-stream"})
        assert answer.status_code == 201, answer.text


@pytest.fixture(params=["public", "private"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    private = request.param == "private"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    auth = ""
    if private:
        (tmp_path / "htpasswd").write_text(f"{USER}:{PASSWORD_HASH}\n")
        auth = f"auth: {{htpasswd: {{realm: test, path: {tmp_path}/htpasswd}}}}"
    (tmp_path / "config.yml").write_text(CONFIG.format(root=tmp_path / "registry", port=port, auth=auth))
    process = subprocess.Popen(
        ["docker-registry", "serve", str(tmp_path / "config.yml")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    found = Registry(port, (USER, PASSWORD) if private else None)
    try:
        found.wait()
        yield found
    finally:
        found.close()
        process.kill()
        process.wait()


def test_an_image_is_pulled_with_the_credentials_it_needs_and_none_is_left(registry: Registry, tmp_path: Path) -> None:
    registry.push("team/app", b"\0" * 10240)
    registry.push("team/arm", b"\0" * 10240, architecture="arm64")
    private = registry._client.auth is not None
    credentials = (USER, PASSWORD) if private else None

    async def go() -> None:
        ref = f"{registry.name}/team/app:1"
        await pull(ref, tmp_path / "good", credentials=credentials, plain_http=True)
        contents = oci.read_layout(tmp_path / "good")
        assert (contents.config.env, len(contents.layers)) == ({"A": "1"}, 1)
        for wrong in (None, (USER, "guessed")) if private else ():
            with pytest.raises(Forbidden, match="refuses"):
                await pull(ref, tmp_path / "none", credentials=wrong, plain_http=True)
        with pytest.raises(ImageNotFound):
            await pull(f"{registry.name}/team/app:2", tmp_path / "none", credentials=credentials, plain_http=True)
        await pull(f"{registry.name}/team/arm:1", tmp_path / "arm", credentials=credentials, plain_http=True)
        with pytest.raises(InvalidImage, match="arm64"):
            oci.read_layout(tmp_path / "arm")
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
    credentials = (USER, PASSWORD) if registry._client.auth is not None else None
    public = _Public(int(registry.name.partition(":")[2]))
    to = tmp_path / "good"
    asyncio.run(
        pull("registry.test/team/app:1", to, credentials=credentials, plain_http=True, way_to=public.ways().way)
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
