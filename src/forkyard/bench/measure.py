"""How each figure is measured: as a user would see it, through the async SDK against a running daemon."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from forkyard import AsyncForkyard, AsyncSandbox
from forkyard.bench.figures import Sample
from forkyard.daemon import qemu_driver
from forkyard.errors import ForkyardError
from forkyard.images import ensure_base_image
from forkyard.settings import Settings

Say = Callable[[str], None]
Bench = Callable[[AsyncForkyard, int | None, Say], Awaitable[dict[str, Sample]]]

FILE_BYTES = 64_000_000
DENSITY = 50


async def reference(settings: Settings, n: int = 15) -> tuple[str, Sample]:
    """The accelerator, and T0: an idle hypervisor started to its first answer, and ended."""
    driver = await qemu_driver(settings, await ensure_base_image(settings.cache_dir, lambda *_: None))
    with tempfile.TemporaryDirectory() as scratch:
        return driver.accel, Sample([(await driver.start_idle_ms(Path(scratch))).answer_ms for _ in range(n)])


async def timed(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return (time.perf_counter() - started) * 1000


async def create(fy: AsyncForkyard, n: int | None, say: Say) -> dict[str, Sample]:
    values = []
    for i in range(n or 20):
        say(f"create {i + 1}")
        started = time.perf_counter()
        sandbox = await fy.sandboxes.create(labels={"bench": "create"})
        values.append((time.perf_counter() - started) * 1000)
        await sandbox.delete()
    return {"create_cold": Sample(values)}


async def exec_(fy: AsyncForkyard, n: int | None, say: Say) -> dict[str, Sample]:
    async with await fy.sandboxes.create(labels={"bench": "exec"}) as sandbox:
        for _ in range(5):  # "used": its first commands have been translated
            await sandbox.exec("true")
        values = []
        for i in range(n or 40):
            say(f"exec {i + 1}")
            values.append(await timed(sandbox.exec("true")))
    return {"exec_true": Sample(values)}


async def files(fy: AsyncForkyard, n: int | None, say: Say) -> dict[str, Sample]:
    data = os.urandom(FILE_BYTES)
    write, read = [], []
    async with await fy.sandboxes.create(labels={"bench": "files"}) as sandbox:
        for i in range(n or 5):
            say(f"files {i + 1}")
            write.append(await timed(sandbox.files.write("/root/bench", data)))
            started = time.perf_counter()
            back = await sandbox.files.read_bytes("/root/bench")
            read.append((time.perf_counter() - started) * 1000)
            if back != data:
                raise ForkyardError("the file read back differs from the file written")
    return {"file_write_64mb": Sample(write), "file_read_64mb": Sample(read)}


async def density(fy: AsyncForkyard, n: int | None, say: Say) -> dict[str, Sample]:
    wanted = n or DENSITY
    sandboxes: list[AsyncSandbox] = []
    at_once = asyncio.Semaphore(4)

    async def one() -> None:
        async with at_once:
            sandboxes.append(await fy.sandboxes.create(labels={"bench": "density"}))
            say(f"density: {len(sandboxes)} of {wanted} alive")

    async def answers(sandbox: AsyncSandbox) -> bool:
        async with at_once:
            return (await sandbox.exec(["echo", sandbox.id])).stdout.strip() == sandbox.id

    try:
        await asyncio.gather(*(one() for _ in range(wanted)))
        await asyncio.sleep(2)
        pss = [(await sandbox.usage()).pss_mib for sandbox in sandboxes]
        say("density: an exec in each")
        alive = sum(await asyncio.gather(*(answers(sandbox) for sandbox in sandboxes)))
    finally:
        await asyncio.gather(*(sandbox.delete() for sandbox in sandboxes))
    return {"idle_pss_mib": Sample(pss, "MiB"), "alive_at_once": Sample([alive], "sandboxes")}


MEASURES: dict[str, Bench] = {"create": create, "exec": exec_, "files": files, "density": density}
