"""One verb at a time per sandbox.

Owns: whose turn it is. A verb runs as a task of its own: a client that goes away does not leave half of one behind.
Turns of one sandbox are taken in the order they were asked for, so a verb sees what the one before it left; only
`delete` goes ahead, by `interrupt`. Whoever holds a turn never waits for the turn of another sandbox (it may take one
that is free): so there is no circle of waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from forkyard.errors import SandboxEnded
from forkyard.lifecycle import Cause

T = TypeVar("T")


class _Turn:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.wanted = 0  # holder and those who wait
        self.interruptible: asyncio.Task[Any] | None = None


class Turns:
    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def busy(self, sandbox_id: str) -> bool:
        return sandbox_id in self._turns

    @asynccontextmanager
    async def take(self, sandbox_id: str, *, interruptible: bool = False) -> AsyncIterator[None]:
        turn = self._turns.setdefault(sandbox_id, _Turn())
        turn.wanted += 1
        try:
            async with turn.lock:
                turn.interruptible = asyncio.current_task() if interruptible else None
                try:
                    yield
                finally:
                    turn.interruptible = None
        finally:
            turn.wanted -= 1
            if turn.wanted == 0:
                del self._turns[sandbox_id]

    async def run(
        self, sandbox_id: str, verb: str, work: Callable[[], Coroutine[Any, Any, T]], *, interruptible: bool = True
    ) -> T:
        """The outcome of `work`, done when it is this sandbox's turn; also after the caller has gone away."""
        return await outcome(self.begin(sandbox_id, verb, work, interruptible=interruptible))

    def begin(
        self, sandbox_id: str, verb: str, work: Callable[[], Coroutine[Any, Any, T]], *, interruptible: bool = True
    ) -> asyncio.Task[T]:
        async def turn() -> T:
            async with self.take(sandbox_id, interruptible=interruptible):
                return await work()

        return self.keep(asyncio.create_task(turn(), name=f"{verb} {sandbox_id}"))

    def keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Hold on to a task until it is done, and take note of its error even if nobody else does."""
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def interrupt(self, sandbox_id: str) -> None:
        """Cancel the verb under way, if it is one that may be left half done because all it has made is removed."""
        turn = self._turns.get(sandbox_id)
        if turn is not None and turn.interruptible is not None:
            turn.interruptible.cancel()

    async def settle(self, timeout_s: float) -> None:
        """Let what is under way finish. What does not is left to the next start."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)


async def outcome(task: asyncio.Task[T]) -> T:
    """A caller that is cancelled leaves the task running; a task that is cancelled was interrupted by `delete`."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelled():
            raise deleted_meanwhile() from None
        raise


def deleted_meanwhile() -> SandboxEnded:
    return SandboxEnded("the sandbox was deleted before this was done", cause=Cause.DELETED_BY_USER)
