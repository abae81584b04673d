"""A registry of images on this machine, without TLS: a public one, or one that wants a password."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

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
    def __init__(self, port: int, credentials: tuple[str, str] | None) -> None:
        self.name = f"127.0.0.1:{port}"
        self.credentials = credentials
        self._client = httpx.Client(base_url=f"http://{self.name}/v2", auth=credentials, trust_env=False)

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

    def push(
        self, name: str, layer: bytes, architecture: str = "amd64", config: Mapping[str, object] | None = None
    ) -> str:
        """As `name:1`. Returns the digest of its manifest."""
        image = json.dumps(
            {
                "architecture": architecture,
                "os": "linux",
                "config": config or {"Env": ["A=1"]},
                "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
            }
        ).encode()
        for blob in (layer, image):
            self._finish(self._client.post(f"/{name}/blobs/uploads/"), blob)
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        manifest = {
            "schemaVersion": 2,
            "mediaType": kind,
            "config": {
                "mediaType": "application/vnd.docker.container.image.v1+json",
                "size": len(image),
                "digest": _digest(image),
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
        return answer.headers["Docker-Content-Digest"]

    def _finish(self, began: httpx.Response, blob: bytes) -> None:
        where = httpx.URL(began.headers["Location"]).copy_merge_params({"digest": _digest(blob)})
        answer = self._client.put(where, content=blob, headers={"Content-Type": "application/octet-stream"})
        assert answer.status_code == 201, answer.text


@contextlib.contextmanager
def running_registry(directory: Path, *, private: bool) -> Iterator[Registry]:
    """Its files are in `directory`, which is the caller's to remove."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    auth = ""
    if private:
        (directory / "htpasswd").write_text(f"{USER}:{PASSWORD_HASH}\n")
        auth = f"auth: {{htpasswd: {{realm: test, path: {directory}/htpasswd}}}}"
    (directory / "config.yml").write_text(CONFIG.format(root=directory / "registry", port=port, auth=auth))
    process = subprocess.Popen(
        ["docker-registry", "serve", str(directory / "config.yml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    found = Registry(port, (USER, PASSWORD) if private else None)
    try:
        found.wait()
        yield found
    finally:
        found.close()
        process.kill()
        process.wait()
