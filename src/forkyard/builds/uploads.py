"""What clients send ahead of a build: contexts and image archives, kept by their content for some days.

Owns: `<state_dir>/uploads/`. A name is there when all of its bytes are. Never looks into them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterable
from pathlib import Path

from forkyard.errors import InvalidRequest, NoCapacity, UploadNotFound
from forkyard.images.archives import RESERVE_BYTES
from forkyard.models.bases import UploadInfo

MAX_BYTES = 32 * 2**30
KEPT_S = 7 * 86400.0
_WRITE_BYTES = 1 << 20
#: What is on its way; gone after a restart.
PARTIAL = ".partial-"


class Uploads:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def scratch(self) -> Path:
        """For files whose names begin with `PARTIAL`."""
        return self._directory

    def start(self) -> None:
        """Blocking. What an earlier daemon did not come to finish is removed."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._directory.glob(f"{PARTIAL}*"):
            path.unlink(missing_ok=True)
        self._sweep()

    async def receive(self, chunks: AsyncIterable[bytes], digest: str | None = None) -> UploadInfo:
        """Kept when it is whole. With a `digest`, it must be that."""
        await asyncio.to_thread(self._sweep)
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix=PARTIAL, delete=False) as file:
            try:
                info = await self._written(file.fileno(), chunks)
                if digest is not None and info.id != digest:
                    raise InvalidRequest(f"what came is {info.id}, not {digest}; send it again", field="digest")
                await asyncio.to_thread(os.fsync, file.fileno())
                await asyncio.to_thread(Path(file.name).rename, self._path(info.id))
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        return info

    async def _written(self, fd: int, chunks: AsyncIterable[bytes]) -> UploadInfo:
        hashed, size_bytes, waiting = hashlib.sha256(), 0, bytearray()

        def put() -> None:
            if shutil.disk_usage(self._directory).free < RESERVE_BYTES:
                raise NoCapacity("there is no room on the disk for this upload; delete snapshots, or try later")
            hashed.update(waiting)
            view = memoryview(waiting)
            while view:
                view = view[os.write(fd, view) :]

        async for chunk in chunks:
            waiting += chunk
            size_bytes += len(chunk)
            if size_bytes > MAX_BYTES:
                raise InvalidRequest(f"an upload has at most {MAX_BYTES} bytes")
            if len(waiting) >= _WRITE_BYTES:
                await asyncio.to_thread(put)
                waiting = bytearray()
        await asyncio.to_thread(put)
        return UploadInfo(id=f"sha256:{hashed.hexdigest()}", size_bytes=size_bytes)

    def find(self, digest: str) -> Path:
        """It counts as used now."""
        path = self._path(digest)
        try:
            os.utime(path)
        except OSError:
            raise UploadNotFound(f"there is no upload {digest}, or no more; send it again", digest=digest) from None
        return path

    def info(self, digest: str) -> UploadInfo:
        return UploadInfo(id=digest, size_bytes=self.find(digest).stat().st_size)

    def _path(self, digest: str) -> Path:
        return self._directory / digest.removeprefix("sha256:")

    def _sweep(self) -> None:
        for path in self._directory.iterdir():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > KEPT_S:
                    path.unlink()
