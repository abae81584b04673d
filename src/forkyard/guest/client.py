"""The real guest: every operation of `base.Guest` as requests to the agent over one channel.

Owns: which request an operation is, its deadline, and the bounds of what comes back.
Never does: reconnecting. When the channel is lost every pending call raises `GuestUnreachable`, and `closed` is set.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import structlog

from forkyard.errors import ForkyardError, GuestFailure, GuestUnreachable, InvalidPath, InvalidRequest
from forkyard.guest import frames, records
from forkyard.guest.base import ExecSpec, Exit, Guest, Identity, Lost, Output, SocketOwner
from forkyard.guest.channel import Channel, Stream
from forkyard.guest.frames import Violation
from forkyard.guest.names import to_wire
from forkyard.models import ExecInfo, FileInfo, WatchEvent

log = structlog.get_logger(__name__)

Given = TypeVar("Given")
Made = TypeVar("Made")

_ANSWER_S = 30.0
_OWNER_S = 5.0  # a connection waits for this
_LONG_ANSWER_S = 600.0  # removing or moving a big tree, ending a big archive
_IDLE_S = 60.0  # longest silence inside a transfer
_MAX_LISTED = 100_000
_MAX_REQUEST_CHARS = 1 << 20


async def connect(socket: str, *, timeout_s: float, fresh: bool = False, identity: Identity | None = None) -> Guest:
    """Open the channel of a VM. `fresh`: it was just restored, most likely not in the middle of a frame. An `identity`
    goes with the first greeting: one trip into the machine instead of two."""
    channel: Channel | None = None
    try:
        async with asyncio.timeout(timeout_s):
            channel = await _open(socket)
            guest = AgentGuest(channel)
            if identity is None:
                await channel.handshake(fresh=fresh)
            else:
                await guest.introduce(identity, fresh=fresh)
    except BaseException as error:
        if channel is not None:
            await channel.close()
        if isinstance(error, TimeoutError):
            raise GuestUnreachable(
                f"The agent inside the sandbox did not answer within {timeout_s:g} s. `forkyard logs` has its console."
            ) from None
        raise
    return guest


async def _open(socket: str) -> Channel:
    """The socket may appear a moment after the machine was started."""
    while True:
        try:
            _, channel = await asyncio.get_running_loop().create_unix_connection(Channel, socket)
            return channel
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            await asyncio.sleep(0.01)
        except OSError as error:
            raise GuestUnreachable(f"Cannot open the agent's channel {socket}: {error.strerror or error}.") from error


class AgentExecution:
    """An attachment: `async for` gives its output, and last its `Exit`."""

    def __init__(self, stream: Stream, info: ExecInfo, stdout_offset: int, stderr_offset: int) -> None:
        self._stream = stream
        self._info = info
        self._offsets = {"stdout": stdout_offset, "stderr": stderr_offset}

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def pid(self) -> int | None:
        return self._info.pid

    async def __aiter__(self) -> AsyncIterator[Output | Lost | Exit]:
        while (piece := await self._stream.read(None)) is not None:
            kind, data = piece
            if kind == frames.LINES:
                lost = _checked(records.lost, _checked(records.parse, data))
                self._offsets[lost.stream] = lost.offset + lost.count
                yield lost
            else:
                name = "stderr" if kind == frames.STDERR else "stdout"
                offset = self._offsets[name]
                self._offsets[name] += len(data)
                yield Output("stderr" if kind == frames.STDERR else "stdout", offset, data)
        yield _checked(records.exit_of, self._stream.result)


class AgentGuest:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._adoption: asyncio.Task[None] | None = None

    @property
    def agent_version(self) -> str:
        return self._channel.agent_version

    @property
    def closed(self) -> asyncio.Event:
        return self._channel.closed

    async def aclose(self) -> None:
        await self._channel.close()

    async def ping(self) -> None:
        await self._ask("ping")

    async def adopt_identity(self, identity: Identity) -> None:
        await self._ask("identity", **_identity_arguments(identity))

    async def introduce(self, identity: Identity, *, fresh: bool) -> None:
        """Greeting and identity in one trip. The agent does one thing after the other, so once it has answered the
        greeting nothing can overtake the identity, and nobody needs to wait for it."""
        stream = self._channel.open()
        understood = await self._channel.handshake(
            fresh=fresh, along=lambda: stream.request("identity", **_identity_arguments(identity))
        )
        if understood:
            self._adoption = asyncio.create_task(self._adopted(stream))
        else:
            stream.close()
            await self.adopt_identity(identity)

    async def _adopted(self, stream: Stream) -> None:
        try:
            await stream.answer(_ANSWER_S)
        except ForkyardError as error:
            log.error("a machine did not take its identity", error=error.message)
            await self._channel.close()  # whoever it takes itself for, it is not talked to
        finally:
            stream.close()

    async def _ask(self, op: str, *, timeout_s: float = _ANSWER_S, **arguments: Any) -> dict[str, Any]:
        stream = self._channel.open()
        try:
            stream.request(op, **arguments)
            return await stream.answer(timeout_s)
        finally:
            stream.close()

    @asynccontextmanager
    async def _stream(self, op: str, **arguments: Any) -> AsyncIterator[tuple[Stream, dict[str, Any]]]:
        stream = self._channel.open(streaming=True)
        try:
            stream.request(op, **arguments)
            yield stream, await stream.answer(_ANSWER_S)
        finally:
            stream.close()

    async def _upload(self, op: str, chunks: AsyncIterable[bytes], **arguments: Any) -> dict[str, Any]:
        stream = self._channel.open()
        try:
            stream.request(op, **arguments)
            async for chunk in chunks:
                if not await stream.send(chunk, _IDLE_S):
                    break
            stream.end()
            return await stream.answer(_LONG_ANSWER_S)
        finally:
            stream.close()

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def execute(self, spec: ExecSpec) -> AsyncIterator[AgentExecution]:
        async with self._stream("exec", **_exec_arguments(spec), attach=True) as (stream, record):
            info = _checked(records.exec_info, record)
            yield AgentExecution(stream, info, 0, 0)

    @asynccontextmanager
    async def attach(
        self, exec_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0
    ) -> AsyncIterator[AgentExecution]:
        offsets = {"stdout_offset": stdout_offset, "stderr_offset": stderr_offset}
        async with self._stream("attach", id=exec_id, **offsets) as (stream, record):
            info = _checked(records.exec_info, record)
            yield AgentExecution(stream, info, stdout_offset, stderr_offset)

    async def start(self, spec: ExecSpec) -> ExecInfo:
        record = await self._ask("exec", **_exec_arguments(spec), attach=False)
        return _checked(records.exec_info, record)

    async def execs(self) -> list[ExecInfo]:
        async with self._stream("execs") as (stream, _):
            return [_checked(records.exec_info, record) async for record in _lines(stream, "execs")]

    async def exec_info(self, exec_id: str) -> ExecInfo:
        record = await self._ask("exec_info", id=exec_id)
        return _checked(records.exec_info, record)

    async def write_stdin(self, exec_id: str, data: bytes, *, close: bool = False) -> None:
        async def once() -> AsyncIterator[bytes]:
            yield data

        await self._upload("stdin", once(), id=exec_id, close=close)

    async def signal(self, exec_id: str, signal: int, *, tree: bool = True) -> None:
        await self._ask("signal", id=exec_id, signal=signal, tree=tree)

    async def resize(self, exec_id: str, rows: int, cols: int) -> None:
        await self._ask("resize", id=exec_id, rows=rows, cols=cols)

    # ── sockets ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def socket_owner(
        self, protocol: Literal["tcp", "udp"], source_port: int, address: str, port: int
    ) -> SocketOwner | None:
        where = {"protocol": protocol, "source_port": source_port, "address": address, "port": port}
        return _checked(records.socket_owner, await self._ask("socket_owner", timeout_s=_OWNER_S, **where))

    async def connections(self) -> dict[str, int]:
        async with self._stream("connections") as (stream, _):
            named = [_checked(records.connection, record) async for record in _lines(stream, "connections")]
            return dict(named)

    async def disconnect(self, names: Collection[str]) -> None:
        await self._ask("disconnect", names=list(names))

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def read_file(
        self, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._stream("read", path=_path(path), offset=offset, length=length) as (stream, _):
            yield _bytes(stream)

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
        noted = dict(attributes or {})
        record = await self._upload(
            "write", chunks, path=_path(path), mode=mode, user=user, append=append, parents=parents, attributes=noted
        )
        return _checked(records.file_info, record)

    async def stat(self, path: str) -> FileInfo:
        record = await self._ask("stat", path=_path(path))
        return _checked(records.file_info, record)

    async def exists(self, path: str) -> bool:
        record = await self._ask("exists", path=_path(path))
        return _checked(lambda answer: records.flag(answer, "exists"), record)

    async def list_dir(self, path: str, *, depth: int = 1) -> list[FileInfo]:
        async with self._stream("list", path=_path(path), depth=depth) as (stream, _):
            return [_checked(records.file_info, record) async for record in _lines(stream, path)]

    async def mount(self, slot: int, path: str, *, read_only: bool = False) -> None:
        await self._ask("mount", slot=slot, path=_path(path), read_only=read_only)

    async def unmount(self, slot: int) -> None:
        await self._ask("unmount", slot=slot)

    async def flush(self, slots: Collection[int], *, frozen_s: float | None = None, timeout_s: float = 60.0) -> None:
        await self._ask("flush", timeout_s=timeout_s, slots=list(slots), frozen_s=frozen_s)

    async def thaw(self) -> None:
        await self._ask("thaw")

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = True, user: str | None = None) -> None:
        await self._ask("mkdir", path=_path(path), mode=mode, parents=parents, user=user)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        await self._ask("remove", path=_path(path), recursive=recursive, timeout_s=_LONG_ANSWER_S)

    async def move(self, source: str, destination: str, *, overwrite: bool = True) -> None:
        paths = {"source": _path(source), "destination": _path(destination)}
        await self._ask("move", **paths, overwrite=overwrite, timeout_s=_LONG_ANSWER_S)

    async def chmod(self, path: str, mode: int) -> None:
        await self._ask("chmod", path=_path(path), mode=mode)

    @asynccontextmanager
    async def watch(self, path: str, *, recursive: bool = False) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        async with self._stream("watch", path=_path(path), recursive=recursive) as (stream, _):
            yield _events(stream)

    @asynccontextmanager
    async def download_tar(self, path: str, *, attributes: bool = False) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._stream("tar_read", path=_path(path), attributes=attributes) as (stream, _):
            yield _bytes(stream)

    async def upload_tar(
        self, path: str, chunks: AsyncIterable[bytes], *, user: str | None = None, owners: bool = False
    ) -> None:
        await self._upload("tar_write", chunks, path=_path(path), user=user, owners=owners)


def _checked(parse: Callable[[Given], Made], given: Given) -> Made:
    try:
        return parse(given)
    except Violation as violation:
        raise GuestFailure(f"The agent's answer makes no sense: {violation}.") from None


def _path(path: str) -> str:
    try:
        if path and "\0" not in path:
            return to_wire(path)
    except UnicodeEncodeError:
        pass
    raise InvalidPath(f"{path!r:.80} cannot be a path: it is empty, or has NUL or unpaired surrogates.")


def _identity_arguments(identity: Identity) -> dict[str, Any]:
    return {
        "sandbox_id": identity.sandbox_id,
        "hostname": identity.hostname,
        "entropy": identity.entropy.hex(),
        "time_ns": time.time_ns(),
        "env": dict(identity.env),
        "new": identity.new,
    }


def _exec_arguments(spec: ExecSpec) -> dict[str, Any]:
    words = [spec.command] if isinstance(spec.command, str) else spec.command
    if sum(map(len, [*words, *spec.env, *spec.env.values()])) > _MAX_REQUEST_CHARS // 8:
        raise InvalidRequest("Command and environment together must be shorter than 128 KiB. Write a file instead.")
    return {
        "id": spec.id or secrets.token_hex(8),
        "command": spec.command,
        "cwd": None if spec.cwd is None else _path(spec.cwd),
        "env": dict(spec.env),
        "user": spec.user,
        "timeout_s": spec.timeout_s,
        "stdin": spec.stdin,
        "pty": spec.pty,
        "rows": spec.rows,
        "cols": spec.cols,
        "label": spec.label,
        "trace_id": spec.trace_id,
    }


async def _bytes(stream: Stream) -> AsyncIterator[bytes]:
    while (piece := await stream.read(_IDLE_S)) is not None:
        yield piece[1]


async def _lines(stream: Stream, subject: str) -> AsyncIterator[dict[str, Any]]:
    count = 0
    while (piece := await stream.read(_IDLE_S)) is not None:
        for line in piece[1].splitlines():
            count += 1
            if count > _MAX_LISTED:
                raise GuestFailure(f"{subject} has more than {_MAX_LISTED} entries. List a smaller part of it.")
            yield _checked(records.parse, line)


async def _events(stream: Stream) -> AsyncIterator[WatchEvent]:
    while (piece := await stream.read(None)) is not None:
        for line in piece[1].splitlines():
            yield _checked(records.watch_event, _checked(records.parse, line))
