"""The disks of all machines, `<state_dir>/disks/*.qcow2`: overlays on overlays on a template's disk.

Owns: names, and which files are still needed. A disk is needed if a machine or a snapshot writes to it or starts from
it, or if it backs one that is. Nobody counts references: `collect` walks from what is in use, so a crash between two
steps leaves at worst a file that the next walk removes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import struct
from collections.abc import Iterable
from pathlib import Path

from forkyard.errors import HostFailure

#: A chain longer than this is a fault (or an attack), not a disk.
LONGEST_CHAIN = 1000


class Disks:
    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self._reserved: set[Path] = set()

    def new_path(self) -> Path:
        """A name nobody has. The file is made by whoever uses it, and is not collected until it is released."""
        self._dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        path = self._dir / f"{secrets.token_hex(10)}.qcow2"
        self._reserved.add(path)
        return path

    def release(self, path: Path) -> None:
        """Whoever asked for it has done with it, or has told the journal."""
        self._reserved.discard(path)

    async def make_overlay(self, path: Path, backing: Path, size_gib: int) -> None:
        """An empty disk over another, at least as large."""
        over = ("-f", "qcow2", "-F", "qcow2", "-b", str(backing))
        process = await asyncio.create_subprocess_exec(
            *("qemu-img", "create", "-q", *over, str(path), f"{size_gib}G"), stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
        if process.returncode:
            raise HostFailure(
                f"could not make disk {path} over {backing}: {said.decode(errors='replace').strip()[:500]}"
            )

    def collect(self, in_use: Iterable[Path]) -> None:
        """Remove every disk that nothing in use rests on."""
        if not self._dir.is_dir():
            return
        needed = {path for top in (*in_use, *self._reserved) for path in chain(top)}
        for path in self._dir.iterdir():
            if path not in needed:
                path.unlink(missing_ok=True)

    def own_bytes(self, top: Path) -> int:
        """What a disk occupies above its template, sealed layers that others share included."""
        return sum(allocated_bytes(path) for path in chain(top) if path.parent == self._dir)

    def whole_bytes(self, top: Path) -> int:
        """What it occupies with its template."""
        return sum(map(allocated_bytes, chain(top)))

    def layers(self, top: Path) -> list[Path]:
        """A disk and what it rests on, down to its template, which is not among them."""
        return [path for path in chain(top) if path.parent == self._dir]

    def fold(self, top: Path) -> Path:
        """What the disk should rest on itself when its chain is too long: half of the layers go, and further ones as long
        as each is no larger than all above it together. So a large layer is not copied again and again for small ones."""
        whole = chain(top)
        sizes = [allocated_bytes(path) for path in self.layers(top)]
        folded = max(len(sizes) // 2, 1)
        while folded < len(sizes) and sizes[folded] <= sum(sizes[:folded]):
            folded += 1
        return whole[folded]


def seal(path: Path) -> None:
    """From now on it is only a base for others: nobody writes to it, and every VM may read it."""
    os.chown(path, 0, 0)
    path.chmod(0o444)


def chain(top: Path) -> list[Path]:
    """A disk, what it rests on, and so on down to what is no qcow2."""
    found: list[Path] = []
    path: Path | None = top
    while path is not None and path not in found and len(found) < LONGEST_CHAIN:
        found.append(path)
        path = backing_file(path)
    return found


def backing_file(path: Path) -> Path | None:
    """From the header: magic and version, then the offset of the name of the backing file, and its length."""
    try:
        with path.open("rb") as file:
            magic, _, offset, length = struct.unpack(">4sIQI", file.read(20))
            if magic != b"QFI\xfb" or not offset or not 0 < length <= 1023:
                return None
            file.seek(offset)
            name = file.read(length)
            return Path(os.fsdecode(name)) if name else None
    except (OSError, struct.error):
        return None


def allocated_bytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0
