"""A daemon for measuring: its own process and state, with the images and templates of this machine.

So a benchmark neither disturbs nor counts what else runs here, and can turn the warm pool off, or on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from forkyard import AsyncForkyard
from forkyard.errors import DaemonUnreachable, HostFailure
from forkyard.settings import Settings

START_S = 600.0


@contextlib.asynccontextmanager
async def daemon(**settings: object) -> AsyncIterator[AsyncForkyard]:
    # Short, because unix sockets live below it; on the disk where sandboxes would be.
    root = Path(tempfile.mkdtemp(prefix="fyb-", dir="/var/tmp"))
    root.chmod(0o711)
    env = {
        **os.environ,
        "FORKYARD_STATE_DIR": str(root),
        "FORKYARD_RUN_DIR": str(root / "run"),
        "FORKYARD_CACHE_DIR": str(Settings().cache_dir),
        "FORKYARD_LISTEN_PORT": "0",
        **{f"FORKYARD_{name.upper()}": str(value) for name, value in settings.items()},
    }
    process = _start(root, env)
    try:
        client = await _client(process, root)
        try:
            yield client
        finally:
            await client.shutdown(destroy=True)
            await client.aclose()
            await asyncio.to_thread(process.wait, 120)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(root, ignore_errors=True)


def _start(root: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with (root / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "forkyard.daemon"], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


async def _client(process: subprocess.Popen[bytes], root: Path) -> AsyncForkyard:
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(DaemonUnreachable, OSError):
                await asyncio.to_thread((root / "api-key").stat)  # it is there before the daemon serves
                client = AsyncForkyard(socket=root / "run" / "api.sock", key_file=root / "api-key")
                await client.health()
                return client
            if process.poll() is not None:
                raise HostFailure(f"the daemon for measuring did not start:\n{(root / 'log').read_text()[-2000:]}")
            await asyncio.sleep(0.05)
