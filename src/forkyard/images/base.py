"""The base image: what every template is booted from.

Owns: when an image is built (its key), that it is built once, and that it is either whole or not there.
Stands between `build.py`, which makes the files, and the templates of `host/`, which boot them.

    <cache_dir>/images/<key>/disk.raw vmlinuz initramfs.cpio manifest.json
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forkyard.errors import ImageBuildFailed
from forkyard.images import build
from forkyard.images.build import Progress
from forkyard.images.hostconfig import read_ca_certificates

# Raise it when the builder makes something else of the same inputs.
FORMAT_VERSION = 2

_LOCK_POLL_S = 0.2

Builder = Callable[[Path, Progress], Awaitable[dict[str, object]]]


@dataclass(frozen=True)
class BaseImage:
    key: str
    dir: Path
    disk: Path
    kernel: Path
    initramfs: Path
    kernel_version: str
    min_disk_gib: int
    made_at: str = ""  # of one that can be removed and made again under the same key, with another disk


def base_image_key(files: Mapping[str, bytes], ca_certificates: Mapping[str, bytes]) -> str:
    """Names an image by what goes into it, asking no network.

    Mirrors are left out: they hold the same packages. Versions of packages are left out too, so an image stays what it
    is until its recipe changes or it is deleted.
    """
    recipe = {
        "format": FORMAT_VERSION,
        "codename": build.CODENAME,
        "packages": sorted(build.PACKAGES),
        "npm_packages": build.NPM_PACKAGES,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        "ca_certificates": {name: hashlib.sha256(data).hexdigest() for name, data in ca_certificates.items()},
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


async def ensure_base_image(cache_dir: Path, progress: Progress, *, builder: Builder = build.build) -> BaseImage:
    """The base image of this version of Forkyard on this host; built if it is not there yet.

    Any number of processes may ask at once: one builds, the others wait for it.
    """
    key = await asyncio.to_thread(lambda: base_image_key(_embedded_files(), read_ca_certificates()))
    images = cache_dir / "images"
    target = images / key
    if image := await asyncio.to_thread(load, target):
        return image
    try:
        await asyncio.to_thread(images.mkdir, parents=True, exist_ok=True)
        async with locked(target, progress):
            if image := await asyncio.to_thread(load, target):
                return image
            await build_into(target, progress, builder)
    except OSError as error:
        raise ImageBuildFailed(f"Building the base image in {images} failed: {error}") from error
    image = await asyncio.to_thread(load, target)
    assert image is not None
    return image


async def build_into(target: Path, progress: Progress, builder: Builder) -> None:
    await asyncio.to_thread(remove_dead_builds, target.parent, held=target.name)
    work = _work_dir(target)
    await asyncio.to_thread(work.mkdir)
    started = time.monotonic()
    try:
        manifest = await builder(work, progress)
        manifest |= {"key": target.name, "build_s": round(time.monotonic() - started, 1)}
        await asyncio.to_thread((work / "manifest.json").write_text, json.dumps(manifest, indent=2) + "\n")
        progress("writing to disk")
        await asyncio.to_thread(_publish, work, target)
    except BaseException:
        # A thread of a cancelled step may still be writing; what it leaves, the next builder removes.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(_remove_tree, work)
        raise


def _work_dir(target: Path) -> Path:
    return target.with_name(f".{target.name}.building")


def _lock_file(target: Path) -> Path:
    return target.with_name(f".{target.name}.lock")


def remove_dead_builds(images: Path, *, held: str | None = None) -> None:
    """Half-built images nobody works on: of keys whose lock is free, or is `held` by the caller."""
    for other in images.glob(".*.building"):
        key = other.name[1:].removesuffix(".building")
        if key == held:
            _remove_tree(other)
            continue
        fd = _open_lock(_lock_file(images / key))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_tree(other)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)


def _embedded_files() -> dict[str, bytes]:
    folders = (build.DATA_DIR / "rootfs", build.DATA_DIR / "scripts")
    return {
        str(file.relative_to(build.DATA_DIR)): file.read_bytes()
        for folder in folders
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def load(target: Path) -> BaseImage | None:
    try:
        manifest = json.loads((target / "manifest.json").read_text())
        return BaseImage(
            key=target.name,
            dir=target,
            disk=target / "disk.raw",
            kernel=target / "vmlinuz",
            initramfs=target / "initramfs.cpio",
            kernel_version=manifest["kernel_version"],
            min_disk_gib=manifest["min_disk_gib"],
            made_at=manifest.get("image", {}).get("created_at", ""),
        )
    except (FileNotFoundError, ValueError, KeyError):
        return None


def _publish(work: Path, target: Path) -> None:
    """Make a finished build visible in one step, and only when all of it is on disk."""
    # Virtual machines run under users of their own and read these files.
    for path, mode in (*((file, 0o644) for file in work.iterdir()), (work, 0o755)):
        path.chmod(mode)
        _fsync(path)
    _remove_tree(target)
    work.rename(target)
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_tree(path: Path) -> None:
    # A mount below would lead the deletion out of the tree, into the host's own /dev for one.
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    inside = [mount for mount in mounts if Path(mount).is_relative_to(path)]
    if inside:
        raise ImageBuildFailed(f"{path} has file systems mounted in it ({', '.join(inside)}). Unmount them first.")
    if path.exists():
        shutil.rmtree(path)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


@contextlib.asynccontextmanager
async def locked(target: Path, progress: Progress) -> AsyncIterator[None]:
    """Held by one process at a time; the kernel releases it when that process dies."""
    fd = _open_lock(_lock_file(target))
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("waiting for another process that builds this image")
                await asyncio.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(fd)
