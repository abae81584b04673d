"""What must survive a loss of power is synced, files and the directories that name them."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """A file's content, or a directory's entries. Blocking."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
