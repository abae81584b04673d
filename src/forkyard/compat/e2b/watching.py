"""Watches of directories: streamed (`WatchDir`), or collected here until they are asked for (`CreateWatcher`).

Owns: the collected ones, and how changes are counted: a file that is written is a create, a chmod and a write, as E2B's
clients expect, though here it appears whole, by a rename.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import Response

from forkyard.compat.e2b import connect, filesystem, users
from forkyard.compat.e2b.connect import Message
from forkyard.compat.e2b.errors import Failed, about
from forkyard.control.plane import ControlPlane
from forkyard.errors import ForkyardError
from forkyard.models import WatchEvent

KEEP_ALIVE: Message = {"keepalive": {}}
MAX_WATCHERS = 64
MAX_WAITING = 8192
#: Those who watch hear of an upload within this.
OVER_S = 10.0
_TEMPORARY = re.compile(r"(^|/)\.forkyard-[0-9a-f]{12}\.tmp$")
_TYPES = {"created": "CREATE", "modified": "WRITE", "deleted": "REMOVE", "attributes": "CHMOD"}


class Watches:
    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._watchers: dict[tuple[str, str], _Watcher] = {}
        self._open_on: Counter[str] = Counter()
        self._over: dict[tuple[str, str], float] = {}

    def watching(self, sandbox_id: str) -> bool:
        return self._open_on[sandbox_id] > 0

    def written_over(self, sandbox_id: str, path: str) -> None:
        """A file that is there is about to be replaced by an upload: for those who watch, it is written."""
        now = time.monotonic()
        self._over = {key: at for key, at in self._over.items() if now - at < OVER_S}
        self._over[sandbox_id, path] = now

    async def aclose(self) -> None:
        for watcher in list(self._watchers.values()):
            await watcher.aclose()
        self._watchers.clear()

    async def watch_dir(self, sandbox_id: str, request: Request) -> Response:
        codec = connect.codec_of(request, stream=True)
        message = await connect.only_frame(request, codec)
        opened = AsyncExitStack()
        changes = await self._open(opened, sandbox_id, request, message)
        return connect.Stream(request, codec, opened, _streamed(changes), KEEP_ALIVE)

    async def create(self, sandbox_id: str, request: Request, message: Message) -> Message:
        for key, old in list(self._watchers.items()):
            if old.over:
                del self._watchers[key]
        if sum(owner == sandbox_id for owner, _ in self._watchers) >= MAX_WATCHERS:
            raise Failed("resource_exhausted", f"a sandbox has at most {MAX_WATCHERS} watchers; remove one first")
        opened = AsyncExitStack()
        changes = await self._open(opened, sandbox_id, request, message)
        watcher_id = secrets.token_hex(8)
        self._watchers[sandbox_id, watcher_id] = _Watcher(opened, changes)
        return {"watcherId": watcher_id}

    async def events(self, sandbox_id: str, _request: Request, message: Message) -> Message:
        return {"events": self._find(sandbox_id, message).taken()}

    async def remove(self, sandbox_id: str, _request: Request, message: Message) -> Message:
        await self._find(sandbox_id, message).aclose()
        del self._watchers[sandbox_id, str(message.get("watcherId"))]
        return {}

    def _find(self, sandbox_id: str, message: Message) -> _Watcher:
        watcher_id = message.get("watcherId")
        found = self._watchers.get((sandbox_id, watcher_id)) if isinstance(watcher_id, str) else None
        if found is None:
            raise Failed("not_found", f"watcher with id {watcher_id!r:.60} not found")
        return found

    async def _open(
        self, opened: AsyncExitStack, sandbox_id: str, request: Request, message: Message
    ) -> AsyncIterator[Message]:
        path = users.of(request).path(message.get("path"))
        async with self._control.sandboxes.use(sandbox_id) as guest:
            with about(path):
                found = await filesystem.entry(guest, await guest.stat(path))
        if found["type"] != "FILE_TYPE_DIRECTORY":
            raise Failed("invalid_argument", f"path {path} is not a directory")
        recursive = message.get("recursive") is True
        self._open_on[sandbox_id] += 1
        opened.callback(self._closed, sandbox_id)
        events = await opened.enter_async_context(
            self._control.following.watch(sandbox_id, found["path"], recursive=recursive)
        )
        return self._changes(sandbox_id, events, found["path"], entries=message.get("includeEntry") is True)

    def _closed(self, sandbox_id: str) -> None:
        self._open_on[sandbox_id] -= 1
        if self._open_on[sandbox_id] <= 0:
            del self._open_on[sandbox_id]

    async def _changes(
        self, sandbox_id: str, events: AsyncIterator[WatchEvent], root: str, *, entries: bool
    ) -> AsyncIterator[Message]:
        async for event in events:
            over = event.to is not None and (sandbox_id, event.to) in self._over
            if event.type == "deleted":
                self._over.pop((sandbox_id, event.path), None)
            for kind, path in _as_told(event, over):
                name = path.removeprefix(root.rstrip("/") + "/") if path != root else posix_name(root)
                change: Message = {"name": name, "type": f"EVENT_TYPE_{kind}"}
                if entries and kind not in ("REMOVE", "RENAME"):
                    found = await self._entry(sandbox_id, path)
                    change = change if found is None else {**change, "entry": found}
                yield change

    async def _entry(self, sandbox_id: str, path: str) -> Message | None:
        try:
            async with self._control.sandboxes.use(sandbox_id) as guest:
                return await filesystem.entry(guest, await guest.stat(path))
        except ForkyardError:  # gone by now
            return None


def posix_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _as_told(event: WatchEvent, over: bool) -> list[tuple[str, str]]:
    """`over`: what it was moved to was there before."""
    if event.type == "moved" and event.to is not None:
        if _TEMPORARY.search(event.path):
            written = [("CHMOD", event.to), ("WRITE", event.to)]
            return written if over else [("CREATE", event.to), *written]
        return [("RENAME", event.path), ("CREATE", event.to)]
    if event.type == "overflow" or _TEMPORARY.search(event.path):
        return []
    return [(_TYPES.get(event.type, "RENAME"), event.path)]


async def _streamed(changes: AsyncIterator[Message]) -> AsyncGenerator[Message, None]:
    yield {"start": {}}
    async for change in changes:
        yield {"filesystem": change}


class _Watcher:
    def __init__(self, opened: AsyncExitStack, changes: AsyncIterator[Message]) -> None:
        self._opened = opened
        self._waiting: deque[Message] = deque(maxlen=MAX_WAITING)
        self._task = asyncio.create_task(self._collect(changes), name="E2B watcher")

    @property
    def over(self) -> bool:
        return self._task.done()

    def taken(self) -> list[Message]:
        events = list(self._waiting)
        self._waiting.clear()
        return events

    async def _collect(self, changes: AsyncIterator[Message]) -> None:
        try:
            async with self._opened:
                async for change in changes:
                    self._waiting.append(change)
        except ForkyardError:
            pass  # the sandbox ended; whoever asks is told so

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
