"""Saved machines, `<state_dir>/snapshots/<id>/`: pages of RAM that differ from the template's, device state, manifest.

Owns: that a snapshot is whole or not there, and that a damaged one is found out before it is used. It is written to a
scratch directory, synced, and renamed; its manifest has the checksums. The disk stays where disks are; the manifest
names it. Never does: VMs.

RAM goes by page runs: on tmpfs a layer is a sparse file, and its holes mean "as in the template"; on disk the pages
stand one behind the other and the manifest says where they belong, so that no tool that fills holes can change what it
means.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from forkyard.errors import SnapshotCorrupt, SnapshotFailed, SnapshotNotFound
from forkyard.models import Shape
from forkyard.storage.durable import sync
from forkyard.storage.volumes import Mounted

PAGE = 4096
#: Hashed and written in pieces of this size: large enough to be fast, small enough to stay in the cache.
CHUNK = 1 << 20
FORMAT = 1
IOV_MAX = os.sysconf("SC_IOV_MAX")


@dataclass(frozen=True)
class Saved:
    """What a snapshot's manifest says."""

    id: str
    template: str
    shape: Shape
    disk: Path
    runs: list[tuple[int, int]]  # (first page, how many)
    pages_sha256: str
    device_state_sha256: str
    volumes: tuple[Mounted, ...] = ()  # with sealed disks

    @property
    def size_bytes(self) -> int:
        return sum(count for _, count in self.runs) * PAGE


class Snapshots:
    """Blocking: call it in a thread."""

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self._disks: dict[str, list[Path]] = {}  # of whole snapshots; filled by `clean`

    def write(
        self,
        snapshot_id: str,
        template: str,
        shape: Shape,
        layer: Path,
        device_state: Path,
        disk: Path,
        volumes: Sequence[Mounted] = (),
    ) -> Saved:
        """Durable when it returns. `layer` and `device_state` are read, not taken."""
        scratch = self._scratch(snapshot_id)
        try:
            runs = data_runs(layer)
            state = device_state.read_bytes()
            with ThreadPoolExecutor(2, "snapshot") as others:
                # All at once: the disk is slow to answer, and asked three times together answers once.
                syncing = [
                    others.submit(_write_synced, scratch / "device-state", state),
                    *(others.submit(sync, path) for path in (disk, *(mounted.disk for mounted in volumes))),
                ]
                pages_sha256 = _write_pages(layer, runs, scratch / "pages")
                for done in syncing:
                    done.result()
            state_sha256 = hashlib.sha256(state).hexdigest()
            saved = Saved(snapshot_id, template, shape, disk, runs, pages_sha256, state_sha256, tuple(volumes))
            self._publish(saved, scratch)
            return saved
        except OSError as error:
            raise _failed(error) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def copy(self, source_id: str, snapshot_id: str, disk: Path) -> Saved:
        """The same memory under another id. Nothing is copied: what is written is never changed, so links do."""
        source = self.read(source_id)
        scratch = self._scratch(snapshot_id)
        try:
            for name in ("pages", "device-state"):
                os.link(self._dir / source_id / name, scratch / name)
            saved = Saved(
                snapshot_id, source.template, source.shape, disk, source.runs,
                source.pages_sha256, source.device_state_sha256, source.volumes,
            )  # fmt: skip
            self._publish(saved, scratch)
            return saved
        except OSError as error:
            raise _failed(error) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def read(self, snapshot_id: str) -> Saved:
        try:
            body = json.loads((self._dir / snapshot_id / "manifest.json").read_text())
            return Saved(
                id=snapshot_id,
                template=body["template"],
                shape=Shape(**body["shape"]),
                disk=Path(body["disk"]),
                runs=[(int(first), int(count)) for first, count in body["runs"]],
                pages_sha256=body["pages_sha256"],
                device_state_sha256=body["device_state_sha256"],
                volumes=tuple(Mounted.of_json(mounted) for mounted in body.get("volumes", [])),
            )
        except FileNotFoundError:
            raise SnapshotNotFound(f"there is no saved memory {snapshot_id}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _corrupt(snapshot_id, f"its manifest cannot be read ({error})") from error

    def memory_files(self, snapshot_id: str) -> list[Path]:
        """All of it that differs from the template's."""
        return [self._dir / snapshot_id / name for name in ("pages", "device-state")]

    def device_state(self, snapshot_id: str) -> Path:
        return self._dir / snapshot_id / "device-state"

    def load(self, saved: Saved, layer: Path) -> None:
        """Put the pages on tmpfs, at `layer`, where VMs map them. Verifies everything on the way."""
        directory = self._dir / saved.id
        partial = layer.with_suffix(".partial")
        try:
            state = (directory / "device-state").read_bytes()
            if hashlib.sha256(state).hexdigest() != saved.device_state_sha256:
                raise _corrupt(saved.id, "its device state has changed")
            if _read_pages(directory / "pages", saved.runs, saved.shape, partial) != saved.pages_sha256:
                raise _corrupt(saved.id, "its memory pages have changed")
            partial.chmod(0o444)
            partial.rename(layer)
        except FileNotFoundError as error:
            raise _corrupt(saved.id, f"{error.filename} is missing") from error
        except ValueError as error:
            raise _corrupt(saved.id, str(error)) from error
        finally:
            partial.unlink(missing_ok=True)

    def delete(self, snapshot_id: str) -> None:
        directory = self._dir / snapshot_id
        # Without its manifest it is none, whatever happens during the rest.
        (directory / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)
        self._disks.pop(snapshot_id, None)

    def ids(self) -> list[str]:
        if not self._dir.is_dir():
            return []
        return sorted(
            p.name for p in self._dir.iterdir() if not p.name.startswith(".") and (p / "manifest.json").exists()
        )

    def clean(self) -> None:
        """Called once, at the start: removes what a crash left, and looks at what is there."""
        if not self._dir.is_dir():
            return
        for path in self._dir.iterdir():
            if path.name.startswith(".") or not (path / "manifest.json").exists():
                shutil.rmtree(path, ignore_errors=True)
                continue
            with contextlib.suppress(SnapshotCorrupt, SnapshotNotFound):
                self._disks[path.name] = _disks(self.read(path.name))

    def disks(self) -> list[Path]:
        """Disks that snapshots start from. One whose manifest is unreadable is nobody's."""
        return [disk for disks in self._disks.values() for disk in disks]

    def stored_bytes(self, snapshot_id: str) -> int:
        with contextlib.suppress(OSError):
            return (self._dir / snapshot_id / "pages").stat().st_size
        return 0

    def _scratch(self, snapshot_id: str) -> Path:
        self._dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        scratch = self._dir / f".{snapshot_id}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(mode=0o711)
        return scratch

    def _publish(self, saved: Saved, scratch: Path) -> None:
        manifest = {
            "format": FORMAT,
            "template": saved.template,
            "shape": saved.shape.model_dump(),
            "disk": str(saved.disk),
            "pages_sha256": saved.pages_sha256,
            "device_state_sha256": saved.device_state_sha256,
            "runs": saved.runs,
            "volumes": [mounted.to_json() for mounted in saved.volumes],
        }
        _write_synced(scratch / "manifest.json", json.dumps(manifest).encode())
        sync(scratch)
        final = self._dir / saved.id
        shutil.rmtree(final, ignore_errors=True)
        scratch.rename(final)
        sync(self._dir)
        self._disks[saved.id] = _disks(saved)


def _disks(saved: Saved) -> list[Path]:
    return [saved.disk, *(mounted.disk for mounted in saved.volumes)]


def data_runs(layer: Path) -> list[tuple[int, int]]:
    """Where a sparse file has data: (first page, how many)."""
    runs = []
    with layer.open("rb") as file:
        fd, at, end = file.fileno(), 0, os.fstat(file.fileno()).st_size
        while at < end:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    break
                raise
            at = os.lseek(fd, start, os.SEEK_HOLE)
            first, last = start // PAGE, (at + PAGE - 1) // PAGE
            runs.append((first, last - first))
    return runs


def _write_pages(layer: Path, runs: list[tuple[int, int]], target: Path) -> str:
    with layer.open("rb") as source, target.open("wb") as out, _Hashing() as hashing:
        if runs:  # an empty file cannot be mapped
            for pieces in _batches(mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ), runs):
                hashing.add(pieces)
                for piece in pieces:
                    out.write(piece)
        out.flush()
        os.fsync(out.fileno())
        target.chmod(0o400)
        return hashing.hexdigest()


def _read_pages(source: Path, runs: list[tuple[int, int]], shape: Shape, target: Path) -> str:
    size = shape.memory_mib << 20
    if any(first < 0 or count < 1 or (first + count) * PAGE > size for first, count in runs):
        raise ValueError("its manifest names pages outside of the machine's memory")
    with source.open("rb") as file, target.open("wb+") as out, _Hashing() as hashing:
        if os.fstat(file.fileno()).st_size != sum(count for _, count in runs) * PAGE:
            raise ValueError("its file of memory pages has not the length it should have")
        os.truncate(out.fileno(), size)
        for pieces in _batches(mmap.mmap(out.fileno(), size), runs):
            if os.readv(file.fileno(), pieces) != sum(len(piece) for piece in pieces):
                raise ValueError("its file of memory pages is too short")
            hashing.add(pieces)
        return hashing.hexdigest()


class _Hashing:
    """SHA-256 in a thread of its own, beside the reading or writing: it takes as long as that."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "hash")
        self._added: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def add(self, pieces: list[memoryview]) -> None:
        self._added.append(self._thread.submit(self._update, pieces))

    def _update(self, pieces: list[memoryview]) -> None:
        for piece in pieces:
            self._digest.update(piece)

    def hexdigest(self) -> str:
        for added in self._added:
            added.result()
        return self._digest.hexdigest()


def _batches(mapped: mmap.mmap, runs: list[tuple[int, int]]) -> Iterator[list[memoryview]]:
    """The pages of these runs, about a chunk at a time, in no more pieces than one system call takes. The mapping ends
    with the last of them."""
    view = memoryview(mapped)
    pieces: list[memoryview] = []
    size = 0
    for start, end in _pieces(runs):
        pieces.append(view[start:end])
        size += end - start
        if size >= CHUNK or len(pieces) == IOV_MAX:
            yield pieces
            pieces, size = [], 0
    if pieces:
        yield pieces


def _pieces(runs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Byte ranges, none larger than a chunk."""
    for first, count in runs:
        start, end = first * PAGE, (first + count) * PAGE
        while start < end:
            yield start, min(start + CHUNK, end)
            start += CHUNK


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o400)


def _failed(error: OSError) -> SnapshotFailed:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SnapshotFailed(
            "there is no space left on the host's disk; delete sandboxes or snapshots, then try again"
        )
    return SnapshotFailed(f"the snapshot could not be written: {error}")


def _corrupt(snapshot_id: str, why: str) -> SnapshotCorrupt:
    return SnapshotCorrupt(
        f"saved memory {snapshot_id} is damaged: {why}. Its disk is intact: resume(memory=False) boots from it."
    )
