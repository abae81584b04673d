"""What a user would pick instead, measured in the same run: a container (`runc`), gVisor (`runsc`), a VM that boots.

Owns: how each is started, with the same file system as our sandboxes have, and how it is cleaned up. Nothing is promised of
these; a tool that is not installed is left out, with the way to get it. Never does: judging.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkyard.bench.figures import Sample
from forkyard.bench.measure import NO_POOL, Say, timed, warm_daemon
from forkyard.errors import HostFailure
from forkyard.images import ensure_base_image
from forkyard.settings import Settings

STEP_S = 60.0
#: Says that it is there, after it has filled a heap, and stays.
HEAP = "x = bytearray({mib} << 20)\nx[::4096] = b'x' * len(x[::4096])\nprint('up', flush=True)\nimport time; time.sleep(1e6)"
RUNC = ("runc",)
RUNSC = ("runsc", "--platform=systrap", "--network=none", "--ignore-cgroups")
HOW_TO_GET = {
    "runc": "apt install runc",
    "runsc": "apt install -t bookworm-backports runsc",
}


@dataclass(frozen=True)
class Missing:
    """Why a peer was not measured."""

    why: str

    def as_json(self) -> dict[str, str]:
        return {"missing": self.why}


Peers = dict[str, Sample | Missing]


async def peers(n: int | None, say: Say) -> Peers:
    count = n or 5
    found: Peers = {}
    async with _root_file_system() as root:
        for names, measure in (
            (("peer_runc_start",), _runc),
            (("peer_runsc_start", "peer_runsc_fork"), _runsc),
        ):
            found |= await _unless_missing(names, lambda m=measure: m(root, count, say))  # type: ignore[misc]
    return found | await _qemu_boot(min(count, 3), say)


async def _unless_missing(names: tuple[str, ...], measure: Callable[[], Awaitable[Peers]]) -> Peers:
    tool = names[0].split("_")[1]
    if shutil.which(tool) is None:
        return {name: Missing(f"not installed: {HOW_TO_GET[tool]}") for name in names}
    try:
        return await measure()
    except (HostFailure, TimeoutError, OSError) as error:
        return {name: Missing(f"{tool} does not work here: {error}") for name in names}


async def _runc(root: Path, n: int, say: Say) -> Peers:
    values = []
    for i in range(n):
        say(f"runc {i + 1}")
        async with _container(RUNC, root, ["/bin/sh", "-c", "echo up; exec sleep 1000"]) as (_, started_ms):
            values.append(started_ms)
    return {"peer_runc_start": Sample(values)}


async def _runsc(root: Path, n: int, say: Say) -> Peers:
    starts, forks = [], []
    for i in range(n):
        say(f"runsc {i + 1}")
        async with _container(RUNSC, root, ["/bin/sh", "-c", "echo up; exec sleep 1000"]) as (_, started_ms):
            starts.append(started_ms)
        async with _container(RUNSC, root, ["/usr/bin/python3", "-c", HEAP.format(mib=50)]) as (container, _):
            forks.append(await timed(container.fork()))
    return {"peer_runsc_start": Sample(starts), "peer_runsc_fork": Sample(forks)}


async def _qemu_boot(n: int, say: Say) -> Peers:
    """The same guest without a snapshot of its memory: to the answer of its agent."""
    values = []
    async with warm_daemon(say, **NO_POOL) as fy, await fy.sandboxes.create() as sandbox:
        for i in range(n):
            say(f"cold boot {i + 1}")
            await sandbox.stop()
            values.append(await timed(sandbox.start()))
    return {"peer_qemu_boot": Sample(values)}


@dataclass(frozen=True)
class _Container:
    tool: tuple[str, ...]
    bundle: Path
    name: str

    def command(self, *words: str) -> list[str]:
        return [self.tool[0], f"--root={self.bundle / 'state'}", *self.tool[1:], *words]

    async def fork(self) -> None:
        """A second one that goes on where the first is, which goes on too."""
        image = self.bundle / "image"
        await _run(self.command("checkpoint", "--leave-running", f"--image-path={image}", self.name))
        restore = ("restore", "--detach", f"--image-path={image}", f"--bundle={self.bundle}", f"{self.name}-child")
        await _run(self.command(*restore))


@contextlib.asynccontextmanager
async def _container(tool: tuple[str, ...], root: Path, argv: list[str]) -> AsyncIterator[tuple[_Container, float]]:
    """One that has said that it is there, and how long that took."""
    with tempfile.TemporaryDirectory(prefix="fyp-") as directory:
        bundle = Path(directory)
        (bundle / "config.json").write_text(json.dumps(_config(root, argv)))
        container = _Container(tool, bundle, f"forkyard-bench-{bundle.name}")
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *container.command("run", f"--bundle={bundle}", container.name),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(STEP_S):
                said = await process.stdout.readline()
                if said != b"up\n":
                    raise HostFailure((await process.communicate())[1].decode(errors="replace").strip()[-300:])
            yield container, (time.perf_counter() - started) * 1000
        finally:
            for name in (f"{container.name}-child", container.name):
                with contextlib.suppress(HostFailure, TimeoutError):
                    await _run(container.command("delete", "--force", name))
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _config(root: Path, argv: list[str]) -> dict[str, Any]:
    """Of an OCI bundle: nothing but what both tools need."""
    return {
        "ociVersion": "1.0.2",
        "process": {"terminal": False, "user": {"uid": 0, "gid": 0}, "args": argv, "env": ["PATH=/bin"], "cwd": "/"},
        "root": {"path": str(root), "readonly": True},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
    }


@contextlib.asynccontextmanager
async def _root_file_system() -> AsyncIterator[Path]:
    """That of our own guests, read-only."""
    image = await ensure_base_image(Settings().cache_dir, lambda *_: None)
    with tempfile.TemporaryDirectory(prefix="fyp-") as directory:
        await _run(["mount", "-o", "ro,loop,noload", str(image.disk), directory])
        try:
            yield Path(directory)
        finally:
            await _run(["umount", "--lazy", directory])


async def _run(argv: list[str]) -> None:
    # A file, not a pipe: what a detached container inherits would keep a pipe open.
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        async with asyncio.timeout(STEP_S):
            status = await process.wait()
        if status:
            errors.seek(0)
            raise HostFailure(f"{argv[0]} failed: {errors.read().decode(errors='replace').strip()[-300:]}")
