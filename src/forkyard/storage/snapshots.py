"""Saved machines, `<state_dir>/snapshots/<id>/`: pages of RAM that differ from the template's, device state, manifest.

Owns: that a snapshot is whole or not there, and that a damaged one is found out before it is used. It is written to a
scratch directory, synced, and renamed; its manifest has the checksums. The disk stays where disks are; the manifest
names it. Never does: VMs.

RAM goes by page runs: on tmpfs a layer is a sparse file, and its holes mean "as in the template"; on disk the pages
stand one behind the other and the manifest says where they belong, so that no tool that fills holes can change what it
means. Machines map them from there: nothing that is published is ever changed, only unlinked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from forkyard.errors import SnapshotCorrupt, SnapshotFailed, SnapshotNotFound
from forkyard.models import Shape
from forkyard.storage.durable import begin_sync, sync, sync_all
from forkyard.storage.volumes import Mounted

PAGE = 4096
#: Hashed and written in pieces of this size: large enough to be fast, small enough to stay in the cache.
CHUNK = 1 << 20
#: The disk begins with what is written when there is so much of it.
EARLY = 4 << 20
#: Larger pieces are written as they are.
BUFFER = 1 << 16
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
        with contextlib.closing(self.begin(snapshot_id)) as writing:
            writing.add_layer(layer)
            return writing.finish(template, shape, device_state, disk, volumes)

    def begin(self, snapshot_id: str) -> Writing:
        """One that comes page by page. To be closed in any case; if it was not finished, nothing is left of it then."""
        with _failures_named():
            return Writing(snapshot_id, self._scratch(snapshot_id), self._publish)

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

    def pages(self, snapshot_id: str) -> Path:
        return self._dir / snapshot_id / "pages"

    def open(self, snapshot_id: str) -> tuple[Saved, tuple[int, ...]]:
        """What a manifest says, and a mark that is another one whenever the pages have been written since. Checks all but
        what is in the pages."""
        saved = self.read(snapshot_id)
        try:
            state = self.device_state(snapshot_id).read_bytes()
            pages = self.pages(snapshot_id).stat()
        except FileNotFoundError as error:
            raise _corrupt(saved.id, f"{error.filename} is missing") from error
        if hashlib.sha256(state).hexdigest() != saved.device_state_sha256:
            raise _corrupt(saved.id, "its device state has changed")
        most = (saved.shape.memory_mib << 20) // PAGE
        if any(first < 0 or count < 1 or first + count > most for first, count in saved.runs):
            raise _corrupt(saved.id, "its manifest names pages outside of the machine's memory")
        if pages.st_size != saved.size_bytes:
            raise _corrupt(saved.id, "its file of memory pages has not the length it should have")
        return saved, (pages.st_ino, pages.st_mtime_ns, pages.st_ctime_ns)

    def verify(self, saved: Saved) -> None:
        """Reads its pages through. They are in the host's memory afterwards."""
        digest, buffer = hashlib.sha256(), bytearray(CHUNK)
        try:
            with self.pages(saved.id).open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(memoryview(buffer)[:count])
        except OSError as error:
            raise _corrupt(saved.id, f"its memory pages cannot be read ({error})") from error
        if digest.hexdigest() != saved.pages_sha256:
            raise _corrupt(saved.id, "its memory pages have changed")

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
        """All files are written; synced together, because a disk that is asked for them at once answers once."""
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
        _write(scratch / "manifest.json", json.dumps(manifest).encode())
        sync_all([*scratch.iterdir(), scratch, *_disks(saved)])
        final = self._dir / saved.id
        shutil.rmtree(final, ignore_errors=True)
        scratch.rename(final)
        sync(self._dir)
        self._disks[saved.id] = _disks(saved)


def _disks(saved: Saved) -> list[Path]:
    return [saved.disk, *(mounted.disk for mounted in saved.volumes)]


class Writing:
    """A snapshot that is being written. Pages come in any order; one that comes again replaces the first."""

    def __init__(self, snapshot_id: str, scratch: Path, publish: Callable[[Saved, Path], None]) -> None:
        self._id = snapshot_id
        self._scratch = scratch
        self._publish = publish
        self._pages = (scratch / "pages").open("wb", buffering=BUFFER)
        self._hashing = _Hashing()
        self._runs: list[tuple[int, int]] = []
        self._written = self._begun = 0

    def save(self, runs: Sequence[tuple[int, int]], content: memoryview) -> None:
        """These parts of RAM (from byte, to byte), one behind the other in `content`, which is not needed afterwards."""
        with _failures_named():
            self._add(runs, [memoryview(bytes(content))])

    def add_layer(self, layer: Path) -> None:
        with _failures_named():
            runs = data_runs(layer)
            if runs:  # an empty file cannot be mapped
                with layer.open("rb") as source:
                    mapped = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
                for parts, pieces in _batches(mapped, runs):
                    self._add(parts, pieces)

    def finish(
        self, template: str, shape: Shape, device_state: Path, disk: Path, volumes: Sequence[Mounted] = ()
    ) -> Saved:
        """Durable when it returns."""
        with _failures_named():
            state = device_state.read_bytes()
            _write(self._scratch / "device-state", state)
            self._pages.flush()
            (self._scratch / "pages").chmod(0o400)
            pages_sha256, state_sha256 = self._hashing.hexdigest(), hashlib.sha256(state).hexdigest()
            saved = Saved(self._id, template, shape, disk, self._runs, pages_sha256, state_sha256, tuple(volumes))
            self._publish(saved, self._scratch)
            return saved

    def close(self) -> None:
        self._hashing.close()
        with contextlib.suppress(OSError):  # what was not written is not missed: it is not finished
            self._pages.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _add(self, runs: Sequence[tuple[int, int]], pieces: list[memoryview]) -> None:
        self._hashing.add(pieces)
        for piece in pieces:
            self._written += self._pages.write(piece)
        if self._written - self._begun >= EARLY:
            begin_sync(self._pages.fileno(), self._begun, self._written)
            self._begun = self._written
        for start, end in runs:
            first, count = start // PAGE, (end - start) // PAGE
            if self._runs and sum(self._runs[-1]) == first:
                self._runs[-1] = (self._runs[-1][0], self._runs[-1][1] + count)
            else:
                self._runs.append((first, count))


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


class _Hashing:
    """SHA-256 in a thread of its own, beside the writing: it takes as long as that."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1, "hash")
        self._added: list[Future[None]] = []

    def close(self) -> None:
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


def _batches(
    mapped: mmap.mmap, runs: list[tuple[int, int]]
) -> Iterator[tuple[list[tuple[int, int]], list[memoryview]]]:
    """Byte ranges of these runs and what is there, about a chunk at a time, in no more pieces than one system call takes.
    A batch goes on only upwards. The mapping ends with the last of them."""
    view = memoryview(mapped)
    parts: list[tuple[int, int]] = []
    size = 0
    for start, end in _pieces(runs):
        if parts and (size >= CHUNK or len(parts) == IOV_MAX or start < parts[-1][1]):
            yield parts, [view[a:b] for a, b in parts]
            parts, size = [], 0
        parts.append((start, end))
        size += end - start
    if parts:
        yield parts, [view[a:b] for a, b in parts]


def _pieces(runs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Byte ranges, none larger than a chunk."""
    for first, count in runs:
        start, end = first * PAGE, (first + count) * PAGE
        while start < end:
            yield start, min(start + CHUNK, end)
            start += CHUNK


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o400)


@contextlib.contextmanager
def _failures_named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _failed(error) from error


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
