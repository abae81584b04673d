"""Streams that outlive a sleep: output of execs, changes of files.

Owns: what a stream does while its sandbox sleeps. It stays open and quiet, and goes on where it was when the sandbox
wakes: after a hot pause nothing happened to it; after a cold one it is attached again, to the same exec and from the
next byte (or, a watch: armed again, with an `overflow` first, for nobody watched meanwhile). It never wakes a sandbox
and, being only open, does not keep one awake; every piece that flows is a sign of life.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from forkyard.control.ground import Ground, machine, refusal
from forkyard.control.sandboxes import Sandboxes
from forkyard.errors import GuestUnreachable, SandboxNotFound
from forkyard.guest.base import ExecSpec, Execution, Exit, Guest, Lost, Output, Stream
from forkyard.hosts.base import Incarnation
from forkyard.lifecycle import State
from forkyard.models import WatchEvent
from forkyard.telemetry.metrics import Metrics

_ASLEEP = frozenset({State.PAUSING, State.PAUSED, State.RESUMING})

T = TypeVar("T")
Source: TypeAlias = Callable[[Guest], AbstractAsyncContextManager[T]]


class Following:
    def __init__(self, ground: Ground, sandboxes: Sandboxes, metrics: Metrics) -> None:
        self._ground = ground
        self._sandboxes = sandboxes
        self._metrics = metrics

    @asynccontextmanager
    async def execute(self, sandbox_id: str, spec: ExecSpec, *, hold: bool = False) -> AsyncIterator[Feed]:
        """Start a process and follow it. With `hold` somebody waits for its end: that is a call under way, and keeps
        the sandbox awake however quiet the process is."""
        async with AsyncExitStack() as stack:
            if hold:
                stack.enter_context(self._ground.activity.using(sandbox_id))
            link = await stack.enter_async_context(_Link(self._ground, sandbox_id))
            execution = await self._open(link, lambda guest: guest.execute(spec))
            self._metrics.execs.inc()
            yield Feed(link, execution)

    @asynccontextmanager
    async def attach(
        self, sandbox_id: str, exec_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0
    ) -> AsyncIterator[Feed]:
        async with _Link(self._ground, sandbox_id) as link:
            execution = await self._open(
                link, lambda guest: guest.attach(exec_id, stdout_offset=stdout_offset, stderr_offset=stderr_offset)
            )
            yield Feed(link, execution, stdout_offset, stderr_offset)

    @asynccontextmanager
    async def watch(
        self, sandbox_id: str, path: str, *, recursive: bool = False
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        async with _Link(self._ground, sandbox_id) as link:
            events = await self._open(link, lambda guest: guest.watch(path, recursive=recursive))
            yield _watched(link, events, path, recursive)

    async def _open(self, link: _Link, source: Source[T]) -> T:
        with self._ground.activity.using(link.sandbox_id):
            link.incarnation, guest = await self._sandboxes.entered(link.sandbox_id)
            return await link.opened.enter_async_context(source(guest))


class Feed:
    """An `Execution` that outlives a sleep."""

    def __init__(self, link: _Link, execution: Execution, stdout_offset: int = 0, stderr_offset: int = 0) -> None:
        self._link = link
        self._execution = execution
        self._next: dict[Stream, int] = {"stdout": stdout_offset, "stderr": stderr_offset}

    @property
    def id(self) -> str:
        return self._execution.id

    @property
    def pid(self) -> int | None:
        return self._execution.pid

    async def __aiter__(self) -> AsyncIterator[Output | Lost | Exit]:
        while True:
            broken = GuestUnreachable(f"the channel to exec {self.id} broke; attach to it again to go on")
            try:
                async for item in self._execution:
                    self._link.alive()
                    if not isinstance(item, Exit):
                        length = len(item.data) if isinstance(item, Output) else item.count
                        self._next[item.stream] = item.offset + length
                    yield item
                    if isinstance(item, Exit):
                        return
            except GuestUnreachable as error:
                broken = error
            self._execution = await self._link.again(broken, self._attached)

    def _attached(self, guest: Guest) -> AbstractAsyncContextManager[Execution]:
        return guest.attach(self.id, stdout_offset=self._next["stdout"], stderr_offset=self._next["stderr"])


async def _watched(
    link: _Link, events: AsyncIterator[WatchEvent], path: str, recursive: bool
) -> AsyncIterator[WatchEvent]:
    while True:
        broken = GuestUnreachable(f"the watch of {path} broke; begin it again, and look what changed meanwhile")
        try:
            async for event in events:
                link.alive()
                yield event
        except GuestUnreachable as error:
            broken = error
        events = await link.again(broken, lambda guest: guest.watch(path, recursive=recursive))
        yield WatchEvent(type="overflow", path=path)


class _Link:
    """What a stream holds open in a guest: given up when the guest goes, taken up again when there is a new one."""

    def __init__(self, ground: Ground, sandbox_id: str) -> None:
        self._ground = ground
        self.sandbox_id = sandbox_id
        self.incarnation = Incarnation(sandbox_id, 0)
        self.opened = AsyncExitStack()

    async def __aenter__(self) -> _Link:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.opened.aclose()

    def alive(self) -> None:
        self._ground.activity.touch(self.sandbox_id)

    async def again(self, broken: GuestUnreachable, source: Source[T]) -> T:
        """Open it in the machine that came after a sleep. If the sandbox did not sleep, `broken` is the truth."""
        slept = False
        while True:
            news = self._ground.store.news
            record = await self._ground.record(self.sandbox_id)
            if record.state in _ASLEEP:
                slept = True
                await news.wait()
                continue
            if record.state is not State.RUNNING:
                raise refusal(record, "this stream has come to its end")
            if not slept and machine(record) == self.incarnation:
                raise broken
            slept, self.incarnation = False, machine(record)
            await self.opened.aclose()
            try:
                return await self.opened.enter_async_context(source(self._ground.host.guest(self.incarnation)))
            except (GuestUnreachable, SandboxNotFound) as error:  # asleep again, or gone
                broken = error if isinstance(error, GuestUnreachable) else broken


if TYPE_CHECKING:
    _feed: type[Execution] = Feed
