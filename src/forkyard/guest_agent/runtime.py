"""Programs that the agent brings along into images that may have none, with their own loader and libraries.

The base image has them itself, and needs none of this.
"""

from __future__ import annotations

import os

_ROOT = "/opt/forkyard/runtime"


def program(name: str) -> list[str]:
    """How to start it: the words that come before its arguments."""
    path = f"{_ROOT}/bin/{name}"
    if not os.path.exists(path):
        return [name]
    return [f"{_ROOT}/lib/ld-linux-x86-64.so.2", "--library-path", f"{_ROOT}/lib", path]
