"""Images and templates that nobody needs any more: removed from the cache after a while.

Owns: what "needed" means. The cache is shared: by daemons that run, by daemons that do not run now but have disks which
rest on a template, and by builders. So each daemon leaves its address in the cache (`users/`), every use of an image or
template renews the time on its manifest, and what is removed is looked at again under the lock that its builders take.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import structlog

from forkyard.errors import Conflict
from forkyard.storage.disks import chain

log = structlog.get_logger(__name__)

DAY_S = 86400.0
#: Not when a daemon has just started: others want the disk then.
FIRST_SWEEP_S = 600.0
MANIFEST = "manifest.json"


def used_now(entry: Path) -> None:
    """An image or template was used: its time begins anew."""
    with contextlib.suppress(OSError):
        os.utime(entry / MANIFEST)


class Cache:
    def __init__(self, directory: Path, state_dir: Path, scope: str, keep_days: float) -> None:
        self._dir = directory
        self._state_dir = state_dir.absolute()
        self._scope = scope
        self._keep_s = keep_days * DAY_S
        self._sweeping: asyncio.Task[None] | None = None

    def start(self, in_use: Callable[[], Iterable[Path]]) -> None:
        """Sweep now and then. `in_use`: images and templates that this daemon works with."""
        self._sweeping = asyncio.create_task(self._sweep_daily(in_use), name="sweep the cache")

    def stop(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()

    async def _sweep_daily(self, in_use: Callable[[], Iterable[Path]]) -> None:
        await asyncio.sleep(FIRST_SWEEP_S)
        while True:
            for entry in in_use():
                used_now(entry)
            try:
                await asyncio.to_thread(self.sweep)
            except OSError as error:
                log.warning("the cache could not be swept", error=str(error))
            await asyncio.sleep(DAY_S)

    # ── blocking ─────────────────────────────────────────────────────────────────────────────────────────────────

    def register(self) -> None:
        users = self._dir / "users"
        users.mkdir(parents=True, exist_ok=True)
        (users / self._scope).write_text(str(self._state_dir))

    def sweep(self) -> list[Path]:
        """Remove what is old and what nothing rests on; returns what that was."""
        removed = []
        for kind in ("templates", "images"):  # templates rest on images
            needed = set(self._needed())
            for entry in self._entries(kind):
                if entry not in needed and self._is_old(entry) and self._remove(entry, self._is_old):
                    log.info("unused for long, removed from the cache", path=str(entry))
                    removed.append(entry)
        return removed

    def remove_image(self, image: Path) -> None:
        """And the templates made of it. `Conflict` if a disk of any daemon rests on it."""
        disks = [disk for disk in self._disks() if any(path.parent == image for path in chain(disk)[1:])]
        if disks:
            raise Conflict(
                f"{len(disks)} disks of sandboxes, snapshots, layers or volumes rest on this image; delete those "
                "(`forkyard builds prune` removes all layers), and then the image"
            )
        for template in self._entries("templates"):
            if any(path.parent == image for path in chain(template / "disk.qcow2")[1:]):
                self._remove(template)
        if image in self._needed() or not self._remove(image):
            raise Conflict("a machine is made of this image right now; try again")

    def _entries(self, kind: str) -> list[Path]:
        directory = self._dir / kind
        if not directory.is_dir():
            return []
        return sorted(path for path in directory.iterdir() if not path.name.startswith(".") and path.is_dir())

    def _disks(self) -> Iterator[Path]:
        for user in sorted((self._dir / "users").glob("*")):
            yield from Path(user.read_text(), "disks").glob("*.qcow2")

    def _needed(self) -> Iterator[Path]:
        for disk in self._disks():
            yield from (path.parent for path in chain(disk)[1:])
        for template in self._entries("templates"):
            yield from (path.parent for path in chain(template / "disk.qcow2")[1:])

    def _is_old(self, entry: Path) -> bool:
        try:
            return time.time() - (entry / MANIFEST).stat().st_mtime >= self._keep_s
        except OSError:
            return False  # being built, or removed by somebody else

    def _remove(self, entry: Path, if_still: Callable[[Path], bool] = Path.is_dir) -> bool:
        lock = os.open(entry.with_name(f".{entry.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not if_still(entry):
                return False
            # Without its manifest it is none, whatever happens during the rest.
            (entry / MANIFEST).unlink()
            shutil.rmtree(entry, ignore_errors=True)
            return True
        except OSError:  # somebody builds it, or has just removed it
            return False
        finally:
            os.close(lock)
