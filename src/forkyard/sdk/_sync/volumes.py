# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""Volumes: named disks that outlive sandboxes."""

from __future__ import annotations

import os
from pathlib import Path

from forkyard.errors import FileConflict, FileMissing
from forkyard.models import FileInfo, Page
from forkyard.models.volumes import VolumeInfo, VolumeVersionInfo
from forkyard.sdk import archive, validation, wire
from forkyard.sdk._sync import runtime
from forkyard.sdk._sync.files import Progress, counted, spool
from forkyard.sdk._sync.transport import Transport


class Volumes:
    """`sandboxes.create(volumes={"/data": "datasets"})` mounts one; `Volume("datasets", mode="cow")` says how."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, name: str, *, size_mib: int = 1024) -> VolumeInfo:
        """Empty. `size_mib` is what fits into it; on disk it takes what is written."""
        body = validation.volume_create(name=name, size_mib=size_mib).model_dump()
        answer = self._transport.request("POST", "/volumes", body=body)
        return wire.parse(VolumeInfo, answer.content)

    def get(self, name: str) -> VolumeInfo:
        answer = self._transport.request("GET", _path(name))
        return wire.parse(VolumeInfo, answer.content)

    def delete(self, name: str) -> None:
        """`VolumeInUse` while a sandbox has it."""
        self._transport.request("DELETE", _path(name))

    # ── versions ────────────────────────────────────────────────────────────────────────────────────────────────

    def versions(self, name: str) -> list[VolumeVersionInfo]:
        """Oldest first. The newest is what is mounted; older ones can be, with `Volume(name, mode="cow", version=…)`."""
        answer = self._transport.request("GET", f"{_path(name)}/versions")
        return wire.parse(Page[VolumeVersionInfo], answer.content).items

    def snapshot(self, name: str) -> VolumeVersionInfo:
        """Keep what is in it now as a version; also while a sandbox writes to it."""
        answer = self._transport.request("POST", f"{_path(name)}/versions")
        return wire.parse(VolumeVersionInfo, answer.content)

    def delete_version(self, name: str, version: int) -> None:
        self._transport.request("DELETE", f"{_path(name)}/versions/{version}")

    def commit(self, name: str, sandbox_id: str, *, path: str | None = None, force: bool = False) -> VolumeVersionInfo:
        """Make what a sandbox has written to its copy the newest version. `VolumeChanged` if there is a newer one than the
        copy was made of, unless `force`."""
        body = {"sandbox_id": sandbox_id, "path": path, "force": force}
        answer = self._transport.request("POST", f"{_path(name)}/commit", body=body)
        return wire.parse(VolumeVersionInfo, answer.content)

    # ── files ───────────────────────────────────────────────────────────────────────────────────────────────────

    def files(self, name: str, path: str = "/", *, depth: int = 1, version: int | None = None) -> list[FileInfo]:
        """What is in a directory of it."""
        params = {"path": path, "depth": depth, "version": version}
        answer = self._transport.request("GET", f"{_path(name)}/files/list", params=params)
        return wire.parse(Page[FileInfo], answer.content).items

    def read_bytes(self, name: str, path: str, *, version: int | None = None) -> bytes:
        answer = self._transport.request("GET", f"{_path(name)}/files", params={"path": path, "version": version})
        return answer.content

    def write(self, name: str, path: str, data: str | bytes, *, mode: int | None = None) -> FileInfo:
        """`VolumeInUse` if a sandbox writes to the volume: then write there."""
        content = data.encode() if isinstance(data, str) else data
        params = {"path": path, "mode": None if mode is None else f"{mode:o}"}
        answer = self._transport.request("PUT", f"{_path(name)}/files", params=params, content=content)
        return wire.parse(FileInfo, answer.content)

    def remove(self, name: str, path: str, *, recursive: bool = False) -> None:
        params = {"path": path, "recursive": recursive}
        self._transport.request("DELETE", f"{_path(name)}/files", params=params, again=False)

    def upload(
        self, name: str, local: str | os.PathLike[str], path: str = "/", *, progress: Progress | None = None
    ) -> None:
        """Copy a local file to the file `path`, or what is in a local directory into the directory `path`."""
        source = Path(local)
        if runtime.blocking(source.is_dir):
            content = runtime.body(counted(archive.pack(source), progress))
            self._transport.request("PUT", f"{_path(name)}/files/tar", params={"path": path}, content=content)
            return
        try:
            mode = (runtime.blocking(source.stat)).st_mode & 0o777
        except OSError as exc:
            raise FileMissing(f"{source} cannot be read on this machine: {exc.strerror}.", path=str(source)) from exc
        target = path + source.name if path.endswith("/") else path
        content = runtime.body(counted(archive.read_chunks(source), progress))
        params = {"path": target, "mode": f"{mode:o}"}
        self._transport.request("PUT", f"{_path(name)}/files", params=params, content=content)

    def download(
        self,
        name: str,
        path: str,
        local: str | os.PathLike[str],
        *,
        version: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Copy the file `path` to the local file, or what is in the directory `path` into the local directory."""
        params, target = {"path": path, "version": version}, Path(local)
        answer = self._transport.request("GET", f"{_path(name)}/files/stat", params=params)
        info = wire.parse(FileInfo, answer.content)
        try:
            if info.type == "directory":
                with archive.spool_beside(target) as part:
                    with self._transport.stream("GET", f"{_path(name)}/files/tar", params=params) as chunks:
                        spool(chunks, part, progress)
                    runtime.blocking(archive.unpack, part, target)
            else:
                with archive.incoming(target, info.mode & 0o777) as part:
                    with self._transport.stream("GET", f"{_path(name)}/files", params=params) as chunks:
                        spool(chunks, part, progress)
        except OSError as exc:
            raise FileConflict(
                f"{target} cannot be written on this machine: {exc.strerror}.", path=str(target)
            ) from exc

    def list(self) -> list[VolumeInfo]:
        answer = self._transport.request("GET", "/volumes")
        return wire.parse(Page[VolumeInfo], answer.content).items


def _path(name: str) -> str:
    return f"/volumes/{wire.segment(name)}"
