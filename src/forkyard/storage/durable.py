"""What must survive a loss of power is synced, files and the directories that name them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2


def sync(path: Path) -> None:
    """A file's content, or a directory's entries. Blocking."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_all(paths: Sequence[Path]) -> None:
    """In no order, and together: a file system writes its own journal once for all who wait. Blocking."""
    with ThreadPoolExecutor(len(paths), "sync") as threads:
        list(threads.map(sync, paths))


def begin_sync(fd: int, start: int, end: int) -> None:
    """Let the disk begin with this part of a file, so that less is left when it is synced. Promises nothing."""
    _libc.sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(end - start), _SYNC_FILE_RANGE_WRITE)
