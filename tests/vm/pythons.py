"""A CPython that the base image has not, offered as a mirror of uv's would.

No registry has one that uv would take. So it is compiled from Debian's source package of a newer release, which comes from
the archive that apt is configured with: once on a machine, and kept beside the images. Run as a program this makes it, so
that no test waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import http.server
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from forkyard.images.hostconfig import read_host_config
from forkyard.settings import Settings

SERIES = "3.13"
_RELEASE = "trixie"
#: Without what no test looks at. Not optimized, which would take much longer than all runs of it.
_MAKE = f"""
mkdir -p lists/partial cache/archives/partial
debian() {{
  apt-get -q -o Dir::Etc::SourceList="$PWD/sources.list" -o Dir::Etc::SourceParts=/dev/null \\
    -o Dir::State::Lists="$PWD/lists" -o Dir::Cache="$PWD/cache" -o APT::Sandbox::User=root "$@"
}}
debian update
debian source --download-only --only-source python{SERIES}
tar -xf python{SERIES}_*.orig.tar.*z
cd Python-{SERIES}*
./configure -q --prefix=/python --without-ensurepip --disable-test-modules CFLAGS=-O1 OPT=
make -s -j"$(nproc)"
make -s install DESTDIR="$PWD/made"
cd made
python/bin/python3 -c 'import ctypes, sqlite3, ssl, zlib'
strip python/bin/python{SERIES} python/lib/python*/lib-dynload/*.so
tar -czf ../../python.tar.gz --exclude='*.a' --exclude='*.opt-?.pyc' --exclude=idlelib --exclude=tkinter \\
  --exclude=turtledemo --exclude=pydoc_data --exclude=share python
"""


def archive() -> Path:
    """`cpython-VERSION-KEY.tar.gz`, named by how it is made too."""
    key = hashlib.sha256(_MAKE.encode()).hexdigest()[:16]
    kept = Settings().cache_dir / "tests"
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = next(kept.glob(f"cpython-*-{key}.tar.gz"), None)
        return found or _made(kept, key)


def _made(kept: Path, key: str) -> Path:
    work = kept / "making"
    shutil.rmtree(work, ignore_errors=True)  # of one that was killed
    work.mkdir()
    try:
        sources = asyncio.run(read_host_config(_RELEASE)).apt_sources
        lines = [f"deb-src {source.line().removeprefix('deb ')}\n" for source in sources if source.suite == _RELEASE]
        (work / "sources.list").write_text("".join(lines))
        done = subprocess.run(
            ["bash", "-eu", "-c", _MAKE], cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"no Python {SERIES} could be made; is all of `make setup-tests` there?\n{done.stdout[-4000:]}"
            )
        (source,) = work.glob(f"python{SERIES}_*.orig.tar.*z")
        version = source.name.partition("_")[2].partition(".orig")[0]
        return (work / "python.tar.gz").rename(kept / f"cpython-{version}-{key}.tar.gz")
    finally:
        shutil.rmtree(work)


class Mirror:
    """At the address of this machine, for guests that a rule lets through."""

    def __init__(self, packed: Path) -> None:
        self.version = packed.name.split("-")[1]
        self.asked: list[str] = []
        asked, files = self.asked, {f"/{packed.name}": packed.read_bytes()}

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                data = files.get(self.path)
                self.send_response(404 if data is None else 200)
                self.send_header("Content-Length", str(len(data or b"")))
                self.end_headers()
                self.wfile.write(data or b"")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer((_own_address(), 0), Handler)
        self.address, self.port = str(self._server.server_address[0]), self._server.server_port
        self.url = f"http://{self.address}:{self.port}/list.json"
        files["/list.json"] = self._list(packed.name, files[f"/{packed.name}"])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _list(self, name: str, data: bytes) -> bytes:
        """As uv reads it."""
        major, minor, patch = map(int, self.version.split("."))
        entry = {
            "name": "cpython",
            "arch": {"family": "x86_64", "variant": None},
            "os": "linux",
            "libc": "gnu",
            "major": major,
            "minor": minor,
            "patch": patch,
            "prerelease": "",
            "url": f"http://{self.address}:{self.port}/{name}",
            "sha256": hashlib.sha256(data).hexdigest(),
            "variant": None,
            "build": None,
        }
        return json.dumps({f"cpython-{self.version}-linux-x86_64-gnu": entry}).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _own_address() -> str:
    """Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.88.99.1", 9))
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def mirror() -> Iterator[Mirror]:
    made = Mirror(archive())
    try:
        yield made
    finally:
        made.close()


if __name__ == "__main__":
    archive()
