"""Images made here, without a registry: what `docker save` would write."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

from forkyard.images.build import CODENAME
from forkyard.images.hostconfig import read_host_config

APPLETS = (
    "sh ls cat echo id env ps mkdir touch sleep true false pwd hostname wget head grep df dd rm test stat kill wc httpd "
    "fallocate"
)
PASSWD = b"root:x:0:0:root:/root:/bin/sh\napp:x:1234:1234::/srv:/bin/sh\n"


def tar_of(members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def file(name: str, data: bytes = b"", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.mode = mode
    return member, data


def directory(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, mode
    return member, b""


def link(name: str, target: str, *, hard: bool = False) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.LNKTYPE if hard else tarfile.SYMTYPE, target
    return member, b""


def saved(layers: list[bytes], config: dict[str, object] | None = None, **top: object) -> bytes:
    """An archive as `docker save` writes it."""
    diff_ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    document = {
        "architecture": "amd64",
        "os": "linux",
        "config": config or {},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
        **top,
    }
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": "config.json", "RepoTags": None, "Layers": names}]).encode()
    return tar_of(
        [
            file("config.json", json.dumps(document).encode()),
            *(file(name, layer) for name, layer in zip(names, layers, strict=True)),
            file("manifest.json", manifest),
        ]
    )


def busybox_layer() -> bytes:
    """A whole system in one static program: no bash, no Python, no systemd, no C library."""
    busybox = Path("/bin/busybox").read_bytes()
    return tar_of(
        [
            directory("bin"),
            file("bin/busybox", busybox, 0o755),
            *(link(f"bin/{name}", "busybox") for name in APPLETS.split()),
            directory("etc"),
            file("etc/passwd", PASSWD),
            directory("srv"),
        ]
    )


BUSYBOX_CONFIG: dict[str, object] = {
    "Env": ["PATH=/bin", "GREETING=hello"],
    "User": "app",
    "WorkingDir": "/srv",
    "Cmd": ["sh"],
}


def debian_layer(directory: Path) -> bytes:
    """A small Debian with systemd, and without Python, udev and what else the base image has."""
    host = asyncio.run(read_host_config(CODENAME))
    sources = directory / "sources.list"
    sources.write_text("".join(f"{source.line()}\n" for source in host.apt_sources))
    options = [f'--aptopt={name} "{value}"' for name, value in host.apt_options.items()]
    target = directory / "debian.tar"
    subprocess.run(
        [
            *("mmdebstrap", "--quiet", "--mode=root", "--variant=essential", "--include=systemd,systemd-sysv"),
            *('--aptopt=Apt::Install-Recommends "false"', '--aptopt=APT::Sandbox::User "root"', *options),
            *("--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/locale/*"),
            *(CODENAME, str(target), str(sources)),
        ],
        check=True,
        capture_output=True,
    )
    return target.read_bytes()
