"""Images that are not ours, made bootable: their files, and what an agent needs, on a disk beside our kernel.

Owns: `<cache_dir>/images/<key>/` of imported images, by content, whole or not there, like the base image and swept like
it; and the names they were imported under. Never starts a VM.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forkyard.errors import ImageBuildFailed, InvalidImage, NoCapacity
from forkyard.images import oci, registry
from forkyard.images.base import BaseImage, build_into, load, locked, remove_dead_builds
from forkyard.images.build import Progress, make_disk
from forkyard.images.process import run
from forkyard.images.runtime import VERSION, ensure_runtime
from forkyard.models.bases import ImageConfig, ImageInfo, registry_of

SCRATCH = "scratch"
#: Raise it when the importer makes something else of the same image.
FORMAT = 2
MAX_BYTES = 64 * 2**30
RESERVE_BYTES = 2 * 2**30
_UNPACK_S = 3600.0
_LOOK_S = 1.0
_GIB = 1 << 30
_ID = "img-"
_WORK = ".import-"

_FILES = {
    # The base image's own unit, with the interpreter that was brought along.
    "/etc/systemd/system/forkyard-agent.service.d/runtime.conf": (
        "[Service]\nExecStartPre=\nExecStart=\nExecStart=/opt/forkyard/agent/init agent\n"
    ),
    # Masked, for nobody sits at a console. Without udev every boot would wait a minute and a half for its device.
    "/etc/systemd/system/getty.target": "",
}
_DEFAULTS = {
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "/etc/group": "root:x:0:\n",
    # Without it systemd takes every boot for the first, and asks questions at a console that nobody sits at.
    "/etc/machine-id": "",
}
_LINKS = {"/sbin/init": "/opt/forkyard/agent/init"}


class ForeignImages:
    def __init__(
        self,
        cache_dir: Path,
        base: BaseImage,
        plain_http: Sequence[str] = (),
        way_to: registry.WayTo = registry.straight,
    ) -> None:
        """`plain_http`: registries that are spoken to without TLS."""
        self._way_to = way_to
        self._dir = cache_dir / "images"
        self._base = base
        self._plain_http = frozenset(plain_http)

    async def find(self, name: str) -> ImageInfo | None:
        """By its id, or a name it was imported under."""
        return await asyncio.to_thread(
            lambda: next((one for one in self._read() if name in (one.id, *one.names)), None)
        )

    async def all(self) -> list[ImageInfo]:
        return await asyncio.to_thread(lambda: sorted(self._read(), key=lambda one: one.created_at, reverse=True))

    def image(self, image_id: str) -> BaseImage | None:
        return load(self._dir / image_id.removeprefix(_ID))

    def _read(self) -> list[ImageInfo]:
        found = []
        for path in self._dir.glob("*/manifest.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                manifest = json.loads(path.read_text())
                if "image" in manifest:
                    found.append(_info(path, manifest))
        return found

    def clean(self) -> None:
        """What a daemon that was killed has left. Blocking; before the first import."""
        self._remove_dead(starting=True)
        remove_dead_builds(self._dir)

    async def import_(
        self,
        name: str,
        progress: Progress,
        *,
        archive: Path | None = None,
        credentials: tuple[str, str] | None = None,
    ) -> ImageInfo:
        runtime = await ensure_runtime(self._base)
        await asyncio.to_thread(self._dir.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(self._remove_dead)
        work = self._dir / f"{_WORK}{os.getpid()}-{os.urandom(6).hex()}"
        await asyncio.to_thread(work.mkdir, 0o700)
        try:
            progress(f"fetching {name}")
            contents = await self._fetched(name, work / "oci", archive, credentials)
            target = self._dir / self._key(contents)
            async with locked(target, progress):
                if load(target) is None:
                    await self._build(name, contents, runtime, target, progress)
                return await asyncio.to_thread(_named, target, name)
        except OSError as error:
            raise ImageBuildFailed(f"importing {name} failed: {error}") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)

    def _remove_dead(self, *, starting: bool = False) -> None:
        """What importers that are gone have left."""
        for path in self._dir.glob(f"{_WORK}*"):
            pid = path.name.removeprefix(_WORK).partition("-")[0]
            # In a container every daemon has the same number.
            if (starting and pid == str(os.getpid())) or not Path("/proc", pid).exists():
                shutil.rmtree(path, ignore_errors=True)

    async def _fetched(
        self, name: str, to: Path, archive: Path | None, credentials: tuple[str, str] | None
    ) -> oci.Contents:
        if archive is not None:
            return await asyncio.to_thread(oci.read_archive, archive, to, _room(self._dir))
        if name == SCRATCH:
            return oci.Contents()
        plain = registry_of(name) in self._plain_http
        pull = registry.pull(name, to, credentials=credentials, plain_http=plain, way_to=self._way_to)
        await _while_there_is_room(pull, self._dir)
        return await asyncio.to_thread(oci.read_layout, to)

    def _key(self, contents: oci.Contents) -> str:
        parts = [str(FORMAT), str(VERSION), self._base.key, contents.digest, *_FILES.values(), *_DEFAULTS.values()]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    async def _build(self, name: str, contents: oci.Contents, runtime: Path, target: Path, progress: Progress) -> None:
        async def build(work: Path, progress: Progress) -> dict[str, object]:
            root = work / "root"
            await asyncio.to_thread(root.mkdir, 0o755)
            work.chmod(0o700)
            progress(f"unpacking {name}")
            systemd = await self._unpacked(contents, runtime, root, work / "task.json")
            progress(f"making the disk of {name}")
            disk_bytes = await make_disk(root, work / "disk.raw")
            await asyncio.to_thread(shutil.rmtree, root)
            (work / "task.json").unlink()
            for source, kept in ((self._base.kernel, "vmlinuz"), (self._base.initramfs, "initramfs.cpio")):
                await asyncio.to_thread(os.link, source, work / kept)
            return {
                "kernel_version": self._base.kernel_version,
                "disk_bytes": disk_bytes,
                "min_disk_gib": math.ceil(disk_bytes / _GIB),
                "image": {"names": [], "systemd": systemd, "created_at": datetime.now(UTC).isoformat()},
                "config": contents.config.model_dump(),
            }

        await build_into(target, progress, build)

    async def _unpacked(self, contents: oci.Contents, runtime: Path, root: Path, task: Path) -> bool:
        config = contents.config.model_dump_json()
        layers = [{"blob": str(layer.blob), "diff_id": layer.diff_id} for layer in contents.layers]
        wanted: dict[str, Any] = {
            # The files, and then the disk that they are put on.
            "most_bytes": _room(root) // 2,
            "layers": layers,
            "runtime": str(runtime),
            "files": {**_FILES, "/opt/forkyard/image.json": config},
            "defaults": _DEFAULTS,
            "links": _LINKS,
            "workdir": contents.config.workdir,
        }
        await asyncio.to_thread(task.write_text, json.dumps(wanted))
        said = await run(
            *(sys.executable, "-m", "forkyard.images.unpack", str(root), str(task)), timeout_s=_UNPACK_S, contained=True
        )
        answer = json.loads(said)
        if "refused" in answer:
            raise InvalidImage(str(answer["refused"]))
        if "failed" in answer:
            raise ImageBuildFailed(f"the image could not be unpacked: {answer['failed']}")
        return bool(answer["systemd"])


def _room(directory: Path) -> int:
    """What an image may take on the disk of this directory."""
    free = shutil.disk_usage(directory).free - RESERVE_BYTES
    if free <= 0:
        raise NoCapacity(
            "there is no room on the disk for another image; delete snapshots, or `forkyard images rm` one"
        )
    return min(MAX_BYTES, free)


async def _while_there_is_room(work: Coroutine[Any, Any, None], directory: Path) -> None:
    """A registry sends what it likes, and says how much only if it likes."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_S))[0]:
            await asyncio.to_thread(_room, directory)
        task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


def _named(target: Path, name: str) -> ImageInfo:
    """From now on this is what the name stands for."""
    for path in target.parent.glob("*/manifest.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            manifest = json.loads(path.read_text())
            names = [one for one in manifest["image"]["names"] if one != name]
            if path.parent == target:
                names.append(name)
            if names != manifest["image"]["names"]:
                manifest["image"]["names"] = names
                partial = path.with_name(f".manifest-{os.getpid()}")
                partial.write_text(json.dumps(manifest, indent=2) + "\n")
                partial.chmod(0o644)
                partial.rename(path)
    path = target / "manifest.json"
    return _info(path, json.loads(path.read_text()))


def _info(path: Path, manifest: dict[str, Any]) -> ImageInfo:
    image = manifest["image"]
    return ImageInfo(
        id=f"{_ID}{path.parent.name}",
        names=image["names"],
        config=ImageConfig.model_validate(manifest["config"]),
        systemd=image["systemd"],
        size_bytes=manifest["disk_bytes"],
        created_at=datetime.fromisoformat(image["created_at"]),
        used_at=datetime.fromtimestamp(path.stat().st_mtime, UTC),
    )
