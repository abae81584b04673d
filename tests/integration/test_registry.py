"""Images out of a registry that runs on this machine: public, private, missing, for another machine, unreachable."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from forkyard.errors import Forbidden, ImageNotFound, InvalidImage, RegistryUnreachable
from forkyard.images import oci
from forkyard.images.registry import pull

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
