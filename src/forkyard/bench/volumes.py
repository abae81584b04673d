"""What it costs a create to have a copy of a large volume: beside a create without, one after the other, many times."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from forkyard import AsyncForkyard, Volume
from forkyard.bench.figures import Sample

SIZE_MIB = 1024
DATA_BYTES = 32_000_000


async def attach(fy: AsyncForkyard, n: int, say: Callable[[str], None], *, rest_s: float = 0.0) -> Sample:
    """The difference of each pair: what else the machine does meanwhile is in both. The first ones are in it, too: those for
    which nothing was prepared. `rest_s`: time for the pool to be refilled."""
    await fy.volumes.create("bench", size_mib=SIZE_MIB)
    await fy.volumes.write("bench", "/data", os.urandom(DATA_BYTES))
    differences = []
    for i in range(n):
        say(f"volumes {i + 1}")
        await asyncio.sleep(rest_s)
        without_ms = await _create_ms(fy, {})
        await asyncio.sleep(rest_s)
        with_ms = await _create_ms(fy, {"/data": Volume("bench", mode="cow")})
        differences.append(with_ms - without_ms)
    return Sample(differences)


async def _create_ms(fy: AsyncForkyard, volumes: dict[str, str | Volume]) -> float:
    started = time.perf_counter()
    sandbox = await fy.sandboxes.create(volumes=volumes)
    took_ms = (time.perf_counter() - started) * 1000
    await sandbox.delete()
    return took_ms
