"""The little C this driver needs, compiled on first use.

Owns: `jail` (launcher), `ramshim.so` (preloaded into QEMU), `probe_init` (the probe guest's only program). The
sources ship in the package; the binaries live under `<cache_dir>/native/<hash of sources and flags>/`, so that an
upgrade builds new ones and a VM that still runs keeps the old.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from forkyard.errors import HostFailure

_SOURCES = Path(__file__).parent / "native"
_STRICT = ("-std=gnu11", "-O2", "-Wall", "-Wextra")
_BUILDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "jail": ("jail.c", (*_STRICT, "-D_FORTIFY_SOURCE=2", "-fstack-protector-strong", "-Wl,-z,relro,-z,now")),
    "ramshim.so": ("ramshim.c", (*_STRICT, "-shared", "-fPIC", "-pthread")),
    "probe_init": ("probe_init.c", (*_STRICT, "-static", "-nostdlib", "-ffreestanding", "-fno-stack-protector")),
}


@dataclass(frozen=True)
class Native:
    jail: Path
    ramshim: Path
    probe_init: Path


def ensure_native(cache_dir: Path) -> Native:
    """Blocking; compiles for about half a second the first time. Several processes may do it at once."""
    digest = hashlib.sha256()
    for name, (source, flags) in sorted(_BUILDS.items()):
        digest.update("\0".join([name, *flags, (_SOURCES / source).read_text()]).encode())
    target = cache_dir / "native" / digest.hexdigest()[:16]
    if not target.is_dir():
        _build(target)
    return Native(target / "jail", target / "ramshim.so", target / "probe_init")


def _build(target: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise HostFailure("no C compiler found to build the VM launcher; install one: apt install gcc libc6-dev")
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-", ignore_cleanup_errors=True) as scratch:
        for name, (source, flags) in _BUILDS.items():
            command = [compiler, *flags, "-o", f"{scratch}/{name}", str(_SOURCES / source)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode:
                raise HostFailure(f"could not compile {source}: {' '.join(command)}\n{done.stderr.strip()[-2000:]}")
        Path(scratch).chmod(0o755)
        try:
            os.rename(scratch, target)  # noqa: PTH104
        except OSError:
            if not target.is_dir():  # else another process was faster, with the same result
                raise
