"""A guest without a machine: a file tree in memory and a handful of commands. For tests of all above the channel.

Commands: `true`, `false`, `exit N`, `echo [-n] WORDS [>&2]`, `cat` (its stdin), `sleep N`, `yes COUNT` (so many lines),
`env NAME`, `pwd`, `hostname`; `;` separates several. Anything else is not found: exit code 127, as a shell says.
Unlike a real guest it keeps all output, and does not hold back a process whose reader is slow.
"""

from __future__ import annotations

import asyncio
import copy
import io
import secrets
import shlex
import signal as signals
import tarfile
import time
from collections.abc import AsyncIterable, AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from forkyard.errors import (
    CommandNotFound,
    Conflict,
    ExecNotFound,
    FileConflict,
    FileMissing,
    GuestUnreachable,
    InvalidPath,
    InvalidRequest,
)
from forkyard.guest.base import ExecSpec, Exit, Guest, Identity, Lost, Output, SocketOwner, Stream
from forkyard.models import ExecInfo, FileInfo, WatchEvent

_HOMES = {"root": "/root", "user": "/home/user"}


@dataclass
class _Node:
    is_directory: bool
    data: bytes = b""
    mode: int = 0o644
    owner: str = "root"
    attributes: dict[str, str] = field(default_factory=dict)
    modified_at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass
class _Watch:
    path: str
    recursive: bool
    events: asyncio.Queue[WatchEvent] = field(default_factory=asyncio.Queue)


class _Exec:
    def __init__(self, spec: ExecSpec, env: dict[str, str], hostname: str) -> None:
        self.id = spec.id or secrets.token_hex(8)
        self.spec = spec
        self.pid = secrets.randbelow(30_000) + 1000
        self.started_at = datetime.now(UTC)
        self.begun = time.monotonic()
        self.output: list[Output] = []
        self.totals: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self.ended: Exit | None = None
        self.stdin: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.stdin_closed = not spec.stdin and not spec.pty
        self.size = (spec.rows, spec.cols)
        self.news = asyncio.Condition()
        self.killed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._env = env
        self._hostname = hostname
        self.task = asyncio.create_task(self._run())

    async def write(self, stream: Stream, data: bytes) -> None:
        async with self.news:
            self.output.append(Output(stream, self.totals[stream], data))
            self.totals[stream] += len(data)
            self.news.notify_all()

    async def _run(self) -> None:
        work = asyncio.create_task(self._commands())
        await asyncio.wait({work, self.killed}, timeout=self.spec.timeout_s, return_when=asyncio.FIRST_COMPLETED)
        code: int | None = None
        signal: int | None = None
        timed_out = False
        if work.done():
            code = work.result()
        else:
            work.cancel()
            timed_out = not self.killed.done()
            signal = int(signals.SIGKILL) if timed_out else self.killed.result()
        async with self.news:
            self.ended = Exit(code, signal, timed_out, (time.monotonic() - self.begun) * 1000)
            self.news.notify_all()

    async def _commands(self) -> int:
        command = self.spec.command
        try:
            lines = [command] if isinstance(command, list) else [shlex.split(part) for part in command.split(";")]
        except ValueError as error:
            await self.write("stderr", f"bash: {error}\n".encode())
            return 2
        code = 0
        for words in lines:
            if words and words[0] == "exit":
                return int(words[1]) % 256 if len(words) > 1 else code
            if words:
                code = await self._command(words)
        return code

    async def _command(self, words: list[str]) -> int:
        name, arguments = words[0], words[1:]
        stream: Stream = "stdout"
        if arguments and arguments[-1] == ">&2":
            stream, arguments = "stderr", arguments[:-1]
        if name in ("true", "false"):
            return int(name == "false")
        if name == "echo":
            newline = "\n"
            if arguments[:1] == ["-n"]:
                newline, arguments = "", arguments[1:]
            await self.write(stream, (" ".join(arguments) + newline).encode())
        elif name == "cat":
            while not self.stdin_closed or not self.stdin.empty():
                data = await self.stdin.get()
                if data is None:
                    break
                await self.write("stdout", data)
        elif name == "sleep":
            await asyncio.sleep(float(arguments[0]))
        elif name == "yes":
            for _ in range(int(arguments[0]) // 4096):
                await self.write("stdout", b"y\n" * 4096)
                await asyncio.sleep(0)
            await self.write("stdout", b"y\n" * (int(arguments[0]) % 4096))
        elif name == "env":
            await self.write("stdout", f"{self._env.get(arguments[0], '')}\n".encode())
        elif name == "pwd":
            await self.write("stdout", f"{self.spec.cwd or _HOMES[self.spec.user or 'root']}\n".encode())
        elif name == "hostname":
            await self.write("stdout", f"{self._hostname}\n".encode())
        else:
            await self.write("stderr", f"bash: {name}: command not found\n".encode())
            return 127
        return 0

    def info(self) -> ExecInfo:
        return ExecInfo(
            id=self.id,
            command=self.spec.command,
            cwd=self.spec.cwd or _HOMES[self.spec.user or "root"],
            user=self.spec.user or "root",
            pty=self.spec.pty,
            label=self.spec.label,
            trace_id=self.spec.trace_id,
            running=self.ended is None,
            pid=self.pid,
            exit_code=self.ended.exit_code if self.ended else None,
            signal=self.ended.signal if self.ended else None,
            timed_out=self.ended.timed_out if self.ended else False,
            started_at=self.started_at,
            duration_ms=self.ended.duration_ms if self.ended else None,
            stdout_bytes=self.totals["stdout"],
            stderr_bytes=self.totals["stderr"],
        )


class _Execution:
    def __init__(self, guest: FakeGuest, source: _Exec, offsets: dict[Stream, int]) -> None:
        self._guest = guest
        self._exec = source
        self._offsets = offsets

    @property
    def id(self) -> str:
        return self._exec.id

    @property
    def pid(self) -> int | None:
        return self._exec.pid

    async def __aiter__(self) -> AsyncIterator[Output | Lost | Exit]:
        source, index = self._exec, 0
        while True:
            async with source.news:
                while len(source.output) == index and source.ended is None and not self._guest.gone:
                    await source.news.wait()
            self._guest.check()
            while index < len(source.output):
                piece = source.output[index]
                index += 1
                skip = max(0, self._offsets[piece.stream] - piece.offset)
                if skip < len(piece.data):
                    yield Output(piece.stream, piece.offset + skip, piece.data[skip:])
            if source.ended is not None and index == len(source.output):
                yield source.ended
                return


class FakeGuest:
    """`vanish()` makes it unreachable, as when the machine or its agent died."""

    def __init__(self) -> None:
        directories = ("/", "/root", "/home", "/home/user", "/tmp", "/etc")
        self._nodes: dict[str, _Node] = {path: _Node(True, mode=0o755) for path in directories}
        self._execs: dict[str, _Exec] = {}
        self._watches: list[_Watch] = []
        self.identity: Identity | None = None
        self.frozen: set[int] = set()  # slots
        self.mounts: dict[int, tuple[str, bool]] = {}  # by slot: where, and whether read-only
        #: Whose connection it is, by (protocol, source port, address, port); a test fills it in.
        self.owners: dict[tuple[str, int, str, int], SocketOwner] = {}
        self.gone = False
        self.closed = asyncio.Event()

    @property
    def agent_version(self) -> str:
        return "fake"

    def check(self) -> None:
        if self.gone:
            raise GuestUnreachable()

    async def vanish(self) -> None:
        self.gone = True
        self.closed.set()
        for item in self._execs.values():
            async with item.news:
                item.news.notify_all()

    def twin(self, *, memory: bool) -> FakeGuest:
        """The guest of a machine copied from this one: the same files and, if `memory`, the same processes."""
        other = copy.copy(self)
        other._nodes = {path: replace(node) for path, node in self._nodes.items()}
        other._execs = dict(self._execs) if memory else {}
        other._watches = []
        other.gone = False
        other.closed = asyncio.Event()
        return other

    async def aclose(self) -> None:
        """The channel is closed; the guest and its processes are what they are."""
        self.closed.set()

    async def ping(self) -> None:
        self.check()

    async def adopt_identity(self, identity: Identity) -> None:
        self.check()
        self.identity = identity

    # ── sockets ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def socket_owner(
        self, protocol: Literal["tcp", "udp"], source_port: int, address: str, port: int
    ) -> SocketOwner | None:
        self.check()
        return self.owners.get((protocol, source_port, address, port))

    async def connections(self) -> dict[str, int]:
        self.check()
        return {}

    async def disconnect(self, names: Collection[str]) -> None:  # noqa: ARG002
        self.check()

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    async def start(self, spec: ExecSpec) -> ExecInfo:
        return self._start(spec).info()

    def _start(self, spec: ExecSpec) -> _Exec:
        self.check()
        if not spec.command:
            raise InvalidRequest("A command must not be empty.")
        if (spec.user or "root") not in _HOMES:
            raise CommandNotFound(f"there is no user {spec.user!r}")
        if spec.cwd is not None and not self._is_directory(self._path(spec.cwd)):
            raise CommandNotFound(f"working directory {spec.cwd}: No such file or directory")
        env = {**(self.identity.env if self.identity else {}), **spec.env}
        started = _Exec(spec, env, self.identity.hostname if self.identity else "fake")
        self._execs[started.id] = started
        return started

    @asynccontextmanager
    async def execute(self, spec: ExecSpec) -> AsyncIterator[_Execution]:
        yield _Execution(self, self._start(spec), {"stdout": 0, "stderr": 0})

    @asynccontextmanager
    async def attach(
        self, exec_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0
    ) -> AsyncIterator[_Execution]:
        yield _Execution(self, self._exec(exec_id), {"stdout": stdout_offset, "stderr": stderr_offset})

    def _exec(self, exec_id: str) -> _Exec:
        self.check()
        if exec_id not in self._execs:
            raise ExecNotFound(f"there is no exec {exec_id!r}")
        return self._execs[exec_id]

    async def execs(self) -> list[ExecInfo]:
        self.check()
        return [item.info() for item in self._execs.values()]

    async def exec_info(self, exec_id: str) -> ExecInfo:
        return self._exec(exec_id).info()

    async def write_stdin(self, exec_id: str, data: bytes, *, close: bool = False) -> None:
        target = self._exec(exec_id)
        if target.stdin_closed or target.ended is not None:
            raise Conflict(f"the standard input of exec {exec_id} is closed")
        target.stdin.put_nowait(data)
        if close:
            target.stdin_closed = True
            target.stdin.put_nowait(None)

    async def signal(self, exec_id: str, signal: int, *, tree: bool = True) -> None:  # noqa: ARG002
        target = self._exec(exec_id)
        if target.ended is not None:
            raise Conflict(f"exec {exec_id} has ended")
        if not target.killed.done():
            target.killed.set_result(signal)

    async def resize(self, exec_id: str, rows: int, cols: int) -> None:
        target = self._exec(exec_id)
        if not target.spec.pty:
            raise Conflict(f"exec {exec_id} has no terminal")
        target.size = (rows, cols)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _path(self, path: str, user: str | None = None) -> str:
        self.check()
        if not path or "\0" in path:
            raise InvalidPath(f"{path!r} cannot be a path")
        parts: list[str] = []
        relative = path[2:] if path.startswith("~/") else path
        for part in PurePosixPath(_HOMES.get(user or "root", "/"), relative).parts[1:]:
            if part == "..":
                parts = parts[:-1]
            else:
                parts.append(part)
        return "/" + "/".join(parts)

    def _is_directory(self, path: str) -> bool:
        return path in self._nodes and self._nodes[path].is_directory

    def _node(self, path: str) -> _Node:
        if path not in self._nodes:
            raise FileMissing(f"{path}: No such file or directory")
        return self._nodes[path]

    def _info(self, path: str) -> FileInfo:
        node = self._node(path)
        return FileInfo(
            name=PurePosixPath(path).name or "/",
            path=path,
            type="directory" if node.is_directory else "file",
            size=len(node.data),
            mode=node.mode,
            owner=node.owner,
            group=node.owner,
            modified_at=node.modified_at,
            attributes=node.attributes,
        )

    def _below(self, path: str) -> list[str]:
        prefix = path.rstrip("/") + "/"
        return [other for other in sorted(self._nodes) if other.startswith(prefix) and other != path]

    def _put(self, path: str, node: _Node) -> None:
        event = WatchEvent(type="modified" if path in self._nodes else "created", path=path)
        self._nodes[path] = node
        self._tell(event)

    def _tell(self, event: WatchEvent) -> None:
        for watch in self._watches:
            parent = str(PurePosixPath(event.path).parent)
            inside = event.path.startswith(watch.path.rstrip("/") + "/")
            if event.path == watch.path or parent == watch.path or (watch.recursive and inside):
                watch.events.put_nowait(event)

    def _make_parents(self, path: str, owner: str) -> None:
        for parent in reversed(PurePosixPath(path).parents):
            if str(parent) not in self._nodes:
                self._put(str(parent), _Node(True, mode=0o755, owner=owner))
            elif not self._nodes[str(parent)].is_directory:
                raise FileConflict(f"{parent}: Not a directory")

    @asynccontextmanager
    async def read_file(
        self, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        node = self._node(self._path(path))
        if node.is_directory:
            raise FileConflict(f"{path}: is a directory")
        yield _pieces(node.data[offset : None if length is None else offset + length])

    async def write_file(
        self,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        mode: int | None = None,
        user: str | None = None,
        append: bool = False,
        parents: bool = True,
        attributes: Mapping[str, str] | None = None,
    ) -> FileInfo:
        full = self._path(path, user)
        if self._is_directory(full):
            raise FileConflict(f"{full}: is a directory")
        if not parents and not self._is_directory(str(PurePosixPath(full).parent)):
            raise FileMissing(f"{full}: No such file or directory")
        data = b"".join([bytes(chunk) async for chunk in chunks])
        self._make_parents(full, user or "root")
        old = self._nodes.get(full) or _Node(False, owner="root")
        self._put(
            full,
            _Node(
                False,
                data=old.data + data if append else data,
                mode=old.mode if mode is None else mode,
                owner=user or old.owner,
                attributes=dict(attributes or {}),
            ),
        )
        return self._info(full)

    async def mount(self, slot: int, path: str, *, read_only: bool = False) -> None:
        self.mounts[slot] = (path, read_only)
        await self.mkdir(path)

    async def unmount(self, slot: int) -> None:
        path, _ = self.mounts.pop(slot)
        await self.remove(path)

    async def flush(
        self,
        slots: Collection[int],
        *,
        frozen_s: float | None = None,
        timeout_s: float = 60.0,  # noqa: ARG002
    ) -> None:
        if frozen_s is not None:
            self.frozen |= set(slots)

    async def thaw(self) -> None:
        self.frozen.clear()

    async def stat(self, path: str) -> FileInfo:
        return self._info(self._path(path))

    async def exists(self, path: str) -> bool:
        return self._path(path) in self._nodes

    async def list_dir(self, path: str, *, depth: int = 1) -> list[FileInfo]:
        full = self._path(path)
        if not self._node(full).is_directory:
            raise FileConflict(f"{full}: Not a directory")
        base = len(PurePosixPath(full).parts)
        return [self._info(item) for item in self._below(full) if len(PurePosixPath(item).parts) - base <= depth]

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = True, user: str | None = None) -> None:
        full = self._path(path, user)
        if full in self._nodes:
            if parents and self._nodes[full].is_directory:
                return
            raise FileConflict(f"{full}: File exists")
        if not parents:
            self._node(str(PurePosixPath(full).parent))
        self._make_parents(full, user or "root")
        self._put(full, _Node(True, mode=mode, owner=user or "root"))

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        full = self._path(path)
        self._node(full)
        below = self._below(full)
        if full == "/":
            raise InvalidPath("the root directory cannot be removed")
        if below and not recursive:
            raise FileConflict(f"{full}: Directory not empty")
        for item in [*reversed(below), full]:
            del self._nodes[item]
            self._tell(WatchEvent(type="deleted", path=item))

    async def move(self, source: str, destination: str, *, overwrite: bool = True) -> None:
        old, new = self._path(source), self._path(destination)
        self._node(old)
        self._node(str(PurePosixPath(new).parent))
        if new in self._nodes and (not overwrite or self._is_directory(new) != self._is_directory(old)):
            raise FileConflict(f"{new}: File exists")
        for item in [old, *self._below(old)]:
            self._nodes[new + item[len(old) :]] = self._nodes.pop(item)
        self._tell(WatchEvent(type="moved", path=old, to=new))

    async def chmod(self, path: str, mode: int) -> None:
        full = self._path(path)
        self._node(full).mode = mode
        self._tell(WatchEvent(type="attributes", path=full))

    @asynccontextmanager
    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        full = self._path(path)
        self._node(full)
        watch = _Watch(full, recursive)
        self._watches.append(watch)
        try:
            yield _events(watch)
        finally:
            self._watches.remove(watch)

    @asynccontextmanager
    async def download_tar(self, path: str, *, attributes: bool = False) -> AsyncIterator[AsyncIterator[bytes]]:  # noqa: ARG002
        full = self._path(path)
        self._node(full)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for item in self._below(full) or [full]:
                node = self._nodes[item]
                member = tarfile.TarInfo("./" + item[len(full) :].lstrip("/") if item != full else item[1:])
                member.mode = node.mode
                member.size = len(node.data)
                member.type = tarfile.DIRTYPE if node.is_directory else tarfile.REGTYPE
                archive.addfile(member, io.BytesIO(node.data))
        yield _pieces(buffer.getvalue())

    async def upload_tar(
        self,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        user: str | None = None,
        owners: bool = False,  # noqa: ARG002
    ) -> None:
        full = self._path(path, user)
        data = io.BytesIO(b"".join([bytes(chunk) async for chunk in chunks]))
        try:
            with tarfile.open(fileobj=data) as archive:
                for member in archive:
                    if ".." in member.name.split("/"):
                        raise InvalidRequest(f"{member.name}: member name contains '..'")
                    target = self._path(f"{full}/{member.name.lstrip('/')}")
                    content = archive.extractfile(member)
                    self._make_parents(target, user or "root")
                    body = content.read() if content else b""
                    self._put(target, _Node(member.isdir(), body, member.mode, user or "root"))
        except tarfile.TarError as error:
            raise InvalidRequest(f"This is not a tar archive: {error}.") from error


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), 65_536):
        yield data[at : at + 65_536]


async def _events(watch: _Watch) -> AsyncIterator[WatchEvent]:
    while True:
        yield await watch.events.get()


if TYPE_CHECKING:
    _is_a_guest: type[Guest] = FakeGuest
