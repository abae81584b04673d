"""Images made here, without a registry: what `docker save` would write."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

from forkyard import Sandbox

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


#: Prints the files of packages and of all that they need, as they lie on the disk of a Debian.
_FILES_OF_PACKAGES = """
import os, re, sys
fields = [dict(re.findall(r"^([A-Za-z-]+): (.*)", part, re.M)) for part in open("/var/lib/dpkg/status").read().split("\\n\\n")]
there = {one["Package"]: one for one in fields if one.get("Status") == "install ok installed"}
given = {name: one["Package"] for one in there.values() for name in re.findall(r"[a-z0-9.+-]+", one.get("Provides", ""))}
wanted = [*sys.argv[1:], *(name for name, one in there.items() if one.get("Essential") == "yes")]
found = set()
while wanted:
    name = wanted.pop()
    name = name if name in there else given.get(name)
    if name is not None and name not in found:
        found.add(name)
        needs = there[name].get("Depends", "") + "," + there[name].get("Pre-Depends", "")
        wanted += [re.match(r"[a-z0-9.+-]+", one.split("|")[0].strip())[0] for one in needs.split(",") if one.strip()]
paths = {"/bin", "/sbin", "/lib", "/lib64", "/etc/passwd", "/etc/group", "/etc/ld.so.cache", "/etc/ld.so.conf"}
for name in found:
    for list_ in (name, name + ":amd64"):
        if os.path.exists(f"/var/lib/dpkg/info/{list_}.list"):
            paths.update(open(f"/var/lib/dpkg/info/{list_}.list").read().split("\\n"))
for path in sorted({os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in paths if path}):
    if os.path.lexists(path) and not path.startswith(("/usr/share/", "/var/lib/dpkg/")) and path != "/.":
        print(path)
"""


def debian_layer(sandbox: Sandbox) -> bytes:
    """A small Debian with systemd, and without Python, udev and what else the base image has: out of a machine of that."""
    sandbox.files.write("/root/files.py", _FILES_OF_PACKAGES)
    done = sandbox.exec(
        "python3 /root/files.py systemd-sysv > /root/files && tar -C / --no-recursion -cf /root/debian.tar -T /root/files",
        timeout_s=300,
    )
    assert done.exit_code == 0, done.stderr
    return b"".join(sandbox.files.read_stream("/root/debian.tar"))
