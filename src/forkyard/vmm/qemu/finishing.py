"""Work that must not be left half done when its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """If the caller is cancelled, wait for the work all the same; what it made can then be undone."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue  # asked again; the answer is the same
        task.cancelled() or task.exception()
        raise


async def in_thread(work: Callable[[], T], executor: Executor | None = None) -> T:
    """Run blocking work in a thread. A thread cannot be cancelled: so, to the end."""

    async def run() -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    return await to_the_end(run())
