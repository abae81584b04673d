"""What a foreign image needs to be a machine of ours: an interpreter for the agent, `tar`, and drivers for the kernel.

Owns: `<base image>/runtime.tar`, made once out of the base image's own disk and removed with it. Everything in it lies
below `/opt/forkyard`: programs with their own loader and libraries, so that nothing of the image is needed, not even a C
library.
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from forkyard.errors import ImageBuildFailed
from forkyard.images.base import BaseImage
from forkyard.images.initramfs import module_order
from forkyard.images.process import run

ROOT = "opt/forkyard"
PYTHON = "python3.11"
#: Raise it when something else is made of the same base image.
VERSION = 1
#: Loaded at every boot: an image need not have a program that could do it later.
MODULES = ("virtio_console", "virtio_net", "virtio_rng", "overlay", "fuse", "af_packet", "tun")
_PROGRAMS = {PYTHON: f"/usr/bin/{PYTHON}", "tar": "/usr/bin/tar"}
_LIBRARY_DIRS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")
_LOADER = "ld-linux-x86-64.so.2"
_NEEDED = re.compile(r"\(NEEDED\)\s+Shared library: \[(.+?)\]")
#: Parts of the standard library that no agent imports.
_LEFT_OUT = {
    *("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "distutils", "pydoc_data", "unittest"),
    *("__pycache__", "dist-packages", "site-packages", "venv", "sqlite3", "xmlrpc", "wsgiref", "curses", "dbm"),
}
_TIMEOUT_S = 300.0


async def ensure_runtime(base: BaseImage) -> Path:
    target = base.dir / f"runtime-{VERSION}.tar"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=base.dir, prefix=".runtime-") as scratch:
            made = await _made(base, Path(scratch))
            await asyncio.to_thread(os.replace, made, target)
    return target


async def _made(base: BaseImage, scratch: Path) -> Path:
    tree = scratch / "tree"
    for name in ("bin", "lib", "modules"):
        (tree / name).mkdir(parents=True)
    disk = _Disk(base.disk)
    for name, path in _PROGRAMS.items():
        await disk.dump(path, tree / "bin" / name)
    await disk.dump_tree(f"/usr/lib/{PYTHON}", tree / "lib")
    dynamic = sorted((tree / "lib" / PYTHON / "lib-dynload").glob("*.so"))
    await _libraries(disk, tree / "lib", [*(tree / "bin").iterdir(), *dynamic])
    modules = f"/usr/lib/modules/{base.kernel_version}"
    await disk.dump(f"{modules}/modules.dep", scratch / "modules.dep")
    order = module_order((scratch / "modules.dep").read_text(), MODULES)
    for path in order:
        await disk.dump(f"{modules}/{path}", tree / "modules" / PurePosixPath(path).name)
    (tree / "modules" / "order").write_text("".join(f"{PurePosixPath(path).name}\n" for path in order))
    made = scratch / "runtime.tar"
    await asyncio.to_thread(_pack, tree, made)
    return made


async def _libraries(disk: _Disk, lib: Path, programs: list[Path]) -> None:
    """All that these need, and what those need."""
    waiting, done = list(programs), {_LOADER}
    await disk.dump(f"{_LIBRARY_DIRS[0]}/{_LOADER}", lib / _LOADER)
    while waiting:
        needed = _NEEDED.findall(await run("readelf", "-d", str(waiting.pop()), timeout_s=60))
        for name in needed:
            if name not in done:
                done.add(name)
                if await disk.dump(f"{_LIBRARY_DIRS[0]}/{name}", lib / name, missing_ok=True):
                    waiting.append(lib / name)


class _Disk:
    """Reads an ext4 image without mounting it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def dump(self, path: str, to: Path, *, missing_ok: bool = False) -> bool:
        await run("debugfs", "-R", f"dump {await self._resolved(path)} {to}", str(self._path), timeout_s=_TIMEOUT_S)
        found = to.exists() and to.stat().st_size > 0
        if not found:
            to.unlink(missing_ok=True)
            if not missing_ok:
                raise ImageBuildFailed(f"the base image {self._path} has no {path}")
        return found

    async def dump_tree(self, path: str, to: Path) -> None:
        await run("debugfs", "-R", f"rdump {path} {to}", str(self._path), timeout_s=_TIMEOUT_S)

    async def _resolved(self, path: str) -> str:
        """debugfs follows links of directories, not that at the end."""
        for _ in range(8):
            said = await run("debugfs", "-R", f"stat {path}", str(self._path), timeout_s=_TIMEOUT_S)
            link = re.search(r'Fast link dest: "(.+?)"', said)
            if link is None:
                break
            path = os.path.normpath(PurePosixPath(path).parent / link[1])
        return path


def _pack(tree: Path, target: Path) -> None:
    """Owner root, time 0, names sorted: equal trees give equal bytes."""

    def settled(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = PurePosixPath(member.name).parts
        if _LEFT_OUT.intersection(parts) or any(part.startswith("config-") for part in parts):
            return None
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        executable = member.isdir() or "bin" in parts or member.name.endswith(_LOADER)
        member.mode = 0o777 if member.issym() else 0o755 if executable else 0o644
        return member

    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("opt", ROOT):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(directory, io.BytesIO())
        archive.add(tree / "bin", f"{ROOT}/runtime/bin", filter=settled)
        archive.add(tree / "lib", f"{ROOT}/runtime/lib", filter=settled)
        archive.add(tree / "modules", f"{ROOT}/modules", filter=settled)
