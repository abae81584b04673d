"""The agent's programs in C (`guest_agent/front.c`, `init.c`), compiled on first use.

Owns: their binaries, static because they run in whatever root file system a guest has; under `<cache_dir>/native/`, named
after their source. Never does: starting them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from forkyard.errors import HostFailure

_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-static", "-s")


def ensure_program(source: Path, cache_dir: Path) -> Path:
    """Blocking; compiles for about half a second the first time. Several processes may do it at once."""
    name = hashlib.sha256("\0".join([*_FLAGS, source.read_text()]).encode()).hexdigest()[:16]
    target = cache_dir / "native" / f"{source.stem}-{name}"
    if target.exists():
        return target
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise HostFailure("no C compiler found to build the guest agent; install one: apt install gcc libc6-dev")
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as scratch:
        command = [compiler, *_FLAGS, "-o", f"{scratch}/program", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise HostFailure(f"could not compile {source.name}: {' '.join(command)}\n{done.stderr.strip()[-2000:]}")
        os.replace(f"{scratch}/program", target)  # noqa: PTH105
    return target
