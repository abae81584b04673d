"""Looks for values in files that a machine has left: pages of memory, disks.

Never does: file systems. A value that a guest has stored as it is stands in its pages and blocks as it is; one that is
encrypted or compressed in there is not found, nor one that lies across two blocks which are not neighbours.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path


def find(files: Iterable[Path], values: Sequence[bytes]) -> set[int]:
    """Blocking: which of the values are in any of the files."""
    found: set[int] = set()
    for path in files:
        with path.open("rb") as file:
            if path.stat().st_size == 0:  # cannot be mapped
                continue
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                missing = [index for index in range(len(values)) if index not in found]
                found |= {index for index in missing if content.find(values[index]) >= 0}
    return found
