"""What the host can ask of a running guest. The wire form is in `guest_agent/PROTOCOL.md`.

Everything that comes back is untrusted: the implementation bounds sizes, validates types, and puts a deadline on every
wait. Failures inside the guest arrive as `forkyard.errors` classes; a guest that does not answer is `GuestUnreachable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from forkyard.models import ExecInfo, FileInfo, WatchEvent

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class Identity:
    """What a guest must change after every restore, before the user's next instruction counts."""

    sandbox_id: str
    hostname: str
    entropy: bytes  # fresh randomness from the host, at least 32 bytes
    env: Mapping[str, str] = field(default_factory=dict)  # added to every exec
    new: bool = False  # of a template: what ran while it was made is not this sandbox's history


@dataclass(frozen=True)
class ExecSpec:
    command: str | list[str]  # str: bash -c, or sh; list: argv
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = "root"  # None: the default of the sandbox, or of its image, else root
    timeout_s: float | None = None
    stdin: bool = False  # keep stdin open for write_stdin
    pty: bool = False
    rows: int = 24
    cols: int = 80
    label: str | None = None
    trace_id: str | None = None
    id: str | None = None  # chosen by the caller, so that a start whose answer was lost can be found again


@dataclass(frozen=True)
class SocketOwner:
    """Who in the guest made a connection."""

    exec_id: str | None  # None: a process that no exec started
    trace_id: str | None = None
    pid: int | None = None
    process: str | None = None


@dataclass(frozen=True)
class Output:
    stream: Stream
    offset: int
    data: bytes


@dataclass(frozen=True)
class Lost:
    stream: Stream
    offset: int
    count: int


@dataclass(frozen=True)
class Exit:
    exit_code: int | None
    signal: int | None
    timed_out: bool
    duration_ms: float


class Execution(Protocol):
    """One attachment to an exec. Iterate it for output; the last item is `Exit`. While attached and read slowly, the
    process is held back (nothing is lost); detached, it goes on and only recent output is kept."""

    @property
    def id(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    def __aiter__(self) -> AsyncIterator[Output | Lost | Exit]: ...


class Guest(Protocol):
    @property
    def agent_version(self) -> str: ...
    @property
    def closed(self) -> asyncio.Event:
        """Set when this channel is of no use any more: the socket broke, or the agent was restarted."""
        ...

    async def ping(self) -> None: ...
    async def adopt_identity(self, identity: Identity) -> None:
        """Step the clock, stir the random pool, set hostname, machine id and environment."""
        ...

    def execute(self, spec: ExecSpec) -> AbstractAsyncContextManager[Execution]:
        """Start a process and attach to it, in one round trip. Leaving the block detaches; it does not kill."""
        ...

    def attach(
        self, exec_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0
    ) -> AbstractAsyncContextManager[Execution]:
        """Attach to an exec that runs or has ended recently; output from these offsets on is replayed."""
        ...

    async def start(self, spec: ExecSpec) -> ExecInfo:
        """Start a process in the background."""
        ...

    async def execs(self) -> list[ExecInfo]: ...
    async def exec_info(self, exec_id: str) -> ExecInfo: ...
    async def write_stdin(self, exec_id: str, data: bytes, *, close: bool = False) -> None: ...
    async def signal(self, exec_id: str, signal: int, *, tree: bool = True) -> None: ...
    async def resize(self, exec_id: str, rows: int, cols: int) -> None: ...

    def read_file(
        self, path: str, *, offset: int = 0, length: int | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Entering the block fails if the file cannot be opened."""
        ...

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
        """Atomic (a temporary file, renamed when the last chunk arrived) unless `append`. If `chunks` raises, nothing
        changes. `attributes`: extended ones, all it has then."""
        ...

    async def mount(self, slot: int, path: str, *, read_only: bool = False) -> None:
        """The volume that the host has put into this slot."""
        ...

    async def unmount(self, slot: int) -> None:
        """Undoes `mount`."""
        ...

    async def flush(self, slots: Collection[int], *, frozen_s: float | None = None, timeout_s: float = 60.0) -> None:
        """What was written to these volumes is on their disks. With `frozen_s`, their file systems are whole there, and
        stay as they are: until `thaw`, for that long at most."""
        ...

    async def thaw(self) -> None:
        """Whatever is frozen goes on."""
        ...

    async def stat(self, path: str) -> FileInfo: ...
    async def exists(self, path: str) -> bool: ...
    async def list_dir(self, path: str, *, depth: int = 1) -> list[FileInfo]: ...
    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = True, user: str | None = None) -> None: ...
    async def remove(self, path: str, *, recursive: bool = False) -> None: ...
    async def move(self, source: str, destination: str, *, overwrite: bool = True) -> None: ...
    async def chmod(self, path: str, mode: int) -> None: ...
    def watch(self, path: str, *, recursive: bool = False) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        """Entering the block returns when the watch is armed."""
        ...

    def download_tar(self, path: str, *, attributes: bool = False) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """`attributes`: extended ones too, as `upload_tar` takes them with `owners`."""
        ...

    async def upload_tar(
        self, path: str, chunks: AsyncIterable[bytes], *, user: str | None = None, owners: bool = False
    ) -> None:
        """Files belong to `user`. With `owners`, to the ids in the archive; and directories that are there stay as they
        are."""
        ...

    async def connections(self) -> dict[str, int]:
        """TCP connections that lead outside: a name for `disconnect`, and the port here."""
        ...

    async def disconnect(self, names: Collection[str]) -> None:
        """End these connections, as if the other end had."""
        ...

    async def socket_owner(
        self, protocol: Literal["tcp", "udp"], source_port: int, address: str, port: int
    ) -> SocketOwner | None:
        """Whose socket this is, now. None if there is none."""
        ...

    async def aclose(self) -> None: ...


class Connector(Protocol):
    """Opens the channel of a VM. `qemu` VMs get the real one, fake VMs a fake."""

    async def __call__(
        self, socket: str, *, timeout_s: float, fresh: bool = False, identity: Identity | None = None
    ) -> Guest:
        """`fresh`: the machine was just restored, most likely not in the middle of a frame. An `identity` is adopted
        before this returns, in the same trip as the greeting."""
        ...
