"""What happens on one SSH channel: a shell or a command, `sftp`, a port of the guest, a unix socket of the guest.

Owns: how each is made of execs and tunnels of the control plane, so that sleep and wake are as everywhere: a session
that is only open lets its sandbox fall asleep, and the next key wakes it. Never does: who may come in (`ssh`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, Self

import asyncssh
import structlog

from forkyard.control.plane import ControlPlane
from forkyard.errors import (
    Conflict,
    ForkyardError,
    GuestUnreachable,
    InternalError,
    InvalidRequest,
    OperationTimeout,
    PortClosed,
)
from forkyard.gateway.ssh_flow import ClientGone, Flow, Resized, Signalled
from forkyard.guest.base import ExecSpec, Execution, Exit, Lost, Output
from forkyard.lifecycle import State

log = structlog.get_logger(__name__)

SHELL = ["/bin/bash", "-l"]
#: What `ssh` itself exits with when something is wrong with the connection.
BROKEN = 255
_STDERR = asyncssh.EXTENDED_DATA_STDERR
_ENV = re.compile(r"LANG|LC_[A-Z]{1,32}|COLORTERM")
_MAX_ENV_BYTES = 256
_MAX_COMMAND_CHARS = 100_000
#: Names a signal has in the protocol; others are told as a shell tells them.
_SIGNALS = frozenset(
    ["ABRT", "ALRM", "FPE", "HUP", "ILL", "INT", "KILL", "PIPE", "QUIT", "SEGV", "TERM", "USR1", "USR2"]
)
#: Where the distributions put it.
_SFTP = (
    "for p in /usr/lib/openssh /usr/lib/ssh /usr/libexec/openssh /usr/libexec; do "
    '[ -x "$p/sftp-server" ] && exec "$p/sftp-server"; done; '
    "echo 'this sandbox has no sftp-server; install openssh-sftp-server in it' >&2; exit 127"
)
_SUBSYSTEMS = {"sftp": _SFTP}
#: Runs in the guest: its standard input and output become a connection to a unix socket. `+` says that it is made.
_RELAY = """
import os, socket, sys, threading
s = socket.socket(socket.AF_UNIX)
try:
    s.connect(sys.argv[1])
except OSError as e:
    sys.exit(f"{sys.argv[1]}: {e.strerror}")
os.write(1, b"+")
def up():
    while data := os.read(0, 65536):
        s.sendall(data)
    s.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := s.recv(65536):
    while data:
        data = data[os.write(1, data):]
"""

#: Raises if what the client came in by is not good any more.
Gate = Callable[[], Awaitable[None]]
#: Holds a task until it is done. Whoever stops the gateway cancels it.
Keep = Callable[[Coroutine[Any, Any, None], str], None]


class ProgramSession(Flow, asyncssh.SSHServerSession[bytes]):
    """A shell, a command or a subsystem: one exec."""

    _chan: asyncssh.SSHServerChannel[bytes]

    def __init__(
        self,
        control: ControlPlane,
        sandbox_id: str,
        user: str,
        gate: Gate,
        keep: Keep,
        notices: Callable[[], Sequence[str]],
    ) -> None:
        """`notices`: what the client shall be told first, when the gate has let it in."""
        super().__init__()
        self._notices = notices
        self._control = control
        self._sandbox_id = sandbox_id
        self._user = user
        self._gate = gate
        self._keep = keep

    def pty_requested(self, *_: Any) -> bool:
        return True

    def shell_requested(self) -> bool:
        return True

    def exec_requested(self, command: str) -> bool:  # noqa: ARG002
        return True

    def subsystem_requested(self, subsystem: str) -> bool:
        return subsystem in _SUBSYSTEMS

    def session_started(self) -> None:
        self._keep(self._run(), f"ssh {self._sandbox_id}")

    async def _run(self) -> None:
        try:
            await self._gate()
            for notice in self._notices():
                await self._say(notice)
            async with self._control.following.execute(self._sandbox_id, self._spec()) as execution:
                try:
                    self._exit(await self._attend(execution))
                except ClientGone:
                    await hang_up(self._control, self._sandbox_id, execution.id)
        except ClientGone:
            return
        except Exception as error:
            await self._complain(error)

    def _spec(self) -> ExecSpec:
        term = self._chan.get_terminal_type()
        cols, rows, _, _ = self._chan.get_terminal_size()
        size = Resized(rows or 24, cols or 80)
        subsystem, command = self._chan.get_subsystem(), self._chan.get_command()
        if command is not None and (len(command) > _MAX_COMMAND_CHARS or "\0" in command):
            raise InvalidRequest(f"a command has at most {_MAX_COMMAND_CHARS} characters, and none of them is NUL")
        env = _accepted_env(self._chan.get_environment())
        if term is not None:
            env["TERM"] = term[:64] or "dumb"
        return ExecSpec(
            command=_SUBSYSTEMS[subsystem] if subsystem else command or SHELL,
            user=self._user,
            cwd="~",
            env=env,
            stdin=True,
            pty=term is not None,
            rows=size.rows,
            cols=size.cols,
            label="ssh",
        )

    async def _attend(self, execution: Execution) -> Exit:
        """Until the program ends, or the client goes."""
        showing = asyncio.create_task(self._show(execution))
        typing = asyncio.create_task(self._type(execution.id))
        try:
            await asyncio.wait({showing, typing}, return_when=asyncio.FIRST_COMPLETED)
            if not showing.done() and not isinstance(typing.exception(), ClientGone):
                # What could not be written tells less than how the program ended, if that is known in a moment.
                await asyncio.wait({showing}, timeout=2)
            return showing.result() if showing.done() else _raised(typing)
        finally:
            for task in (showing, typing):
                task.cancel()
            await asyncio.gather(showing, typing, return_exceptions=True)

    async def _show(self, execution: Execution) -> Exit:
        async for item in execution:
            match item:
                case Output(stream, _, data):
                    await self.write(data, _STDERR if stream == "stderr" else None)
                    self._control.ground.ingress.passed(self._sandbox_id, bytes_out=len(data))
                case Lost(_, _, count):
                    await self._say(f"{count} bytes of output were lost while the sandbox could not be reached")
                case Exit():
                    return item
        raise GuestUnreachable(f"the channel to exec {execution.id} broke")

    async def _type(self, exec_id: str) -> None:
        """Every piece is a use of its own: an open session does not keep a sandbox awake, and a key wakes it."""
        reads = True
        while True:
            item = await self.read()
            if not reads and not isinstance(item, Resized | Signalled):
                continue
            async with self._control.sandboxes.use(self._sandbox_id) as guest:
                with contextlib.suppress(Conflict):  # it has just ended
                    match item:
                        case Resized():
                            await guest.resize(exec_id, item.rows, item.cols)
                        case Signalled():
                            if (number := getattr(signal, f"SIG{item.name}", None)) is not None:
                                await guest.signal(exec_id, int(number), tree=False)
                        case _:
                            self._control.ground.ingress.passed(self._sandbox_id, bytes_in=len(item or b""))
                            try:
                                # A program that does not read keeps us waiting; the piece is in its queue all the same.
                                with contextlib.suppress(OperationTimeout):
                                    await guest.write_stdin(exec_id, item or b"", close=item is None)
                            except Conflict:
                                reads = False
                            reads = reads and item is not None

    def _exit(self, end: Exit) -> None:
        if end.signal is None:
            self._chan.exit(BROKEN if end.exit_code is None else end.exit_code)
            return
        name = _signal_name(end.signal)
        if name in _SIGNALS:
            self._chan.exit_with_signal(name)
        else:
            self._chan.exit(128 + end.signal)

    async def _complain(self, raised: Exception) -> None:
        with contextlib.suppress(ClientGone):
            await self._say(_known(raised, self._sandbox_id).message)
            self._chan.exit(BROKEN)

    async def _say(self, message: str) -> None:
        await self.write(_said(message), _STDERR)

    def part(self, why: str) -> None:
        """Last words, before the connection is closed."""
        with contextlib.suppress(OSError):
            self._chan.write(_said(why), _STDERR)


class Far(Protocol):
    """The other end of a forwarded connection."""

    async def read(self) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    async def end(self) -> None: ...
    async def aclose(self) -> None: ...


class Forward(Flow):
    """`_far` is there when it runs."""

    _far: Far

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self._keep = keep

    def session_started(self) -> None:
        self._keep(self._run(), "ssh forward")

    async def _run(self) -> None:
        up, down = asyncio.create_task(self._up()), asyncio.create_task(self._down())
        try:
            await self._over(up, down)
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            self._chan.close()
            await self._far.aclose()

    async def _over(self, up: asyncio.Task[None], down: asyncio.Task[None]) -> None:
        """Until the guest closes (then its client is not left waiting for more) or the client goes."""
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)

    async def _up(self) -> None:
        while True:  # also after the end of its data: a client that is gone ends this
            match await self.read():
                case bytes(data):
                    await self._far.write(data)
                case None:
                    await self._far.end()

    async def _down(self) -> None:
        while data := await self._far.read():
            await self.write(data)
        self._chan.write_eof()


class PortSession(Forward, asyncssh.SSHTCPSession[bytes]):
    """A connection to a port of the guest (`ssh -L`, `-D`, `-W`)."""

    def __init__(self, far: Far, keep: Keep) -> None:
        super().__init__(keep)
        self._far = far


class SocketSession(Forward, asyncssh.SSHUNIXSession[bytes]):
    """A connection to a unix socket in the guest."""

    def __init__(self, far: Far, keep: Keep) -> None:
        super().__init__(keep)
        self._far = far


class Relay:
    """A unix socket in the guest, by a small program there."""

    def __init__(self, control: ControlPlane, sandbox_id: str) -> None:
        self._control = control
        self._sandbox_id = sandbox_id
        self._stack = contextlib.AsyncExitStack()

    @classmethod
    async def open(cls, control: ControlPlane, sandbox_id: str, user: str, path: str) -> Self:
        if "\0" in path or len(path) > 107:
            raise InvalidRequest("the path of a unix socket has at most 107 characters, and none of them is NUL")
        return await cls.started(control, sandbox_id, user, ["python3", "-c", _RELAY, path])

    @classmethod
    async def started(cls, control: ControlPlane, sandbox_id: str, user: str, command: list[str]) -> Self:
        """Returns when the program has said by its first byte that it is connected."""
        relay = cls(control, sandbox_id)
        spec = ExecSpec(command, user=user, stdin=True, label="ssh")
        async with contextlib.AsyncExitStack() as stack:
            execution = await stack.enter_async_context(control.following.execute(sandbox_id, spec))
            relay._exec_id = execution.id
            relay._output = relay._read(execution)
            await anext(relay._output)
            relay._stack = stack.pop_all()
        return relay

    _exec_id: str
    _output: AsyncIterator[bytes]

    async def _read(self, execution: Execution) -> AsyncIterator[bytes]:
        """First nothing, when it is connected."""
        begun, complaint = False, b""
        async for item in execution:
            if isinstance(item, Output) and item.stream == "stdout":
                data = item.data
                if not begun:
                    begun, data = True, data[1:]
                    yield b""
                if data:  # a server that speaks first may have done so already
                    yield data
            elif isinstance(item, Output):
                complaint = (complaint + item.data)[-1000:]
        if not begun:
            raise PortClosed(complaint.decode("utf-8", "replace").strip() or "the socket cannot be reached")

    async def read(self) -> bytes:
        data = await anext(self._output, b"")
        self._control.ground.ingress.passed(self._sandbox_id, bytes_out=len(data))
        return data

    async def write(self, data: bytes) -> None:
        async with self._control.sandboxes.use(self._sandbox_id) as guest:
            await guest.write_stdin(self._exec_id, data)
        self._control.ground.ingress.passed(self._sandbox_id, bytes_in=len(data))

    async def end(self) -> None:
        async with self._control.sandboxes.use(self._sandbox_id) as guest:
            await guest.write_stdin(self._exec_id, b"", close=True)

    async def aclose(self) -> None:
        await hang_up(self._control, self._sandbox_id, self._exec_id)
        await self._stack.aclose()


async def hang_up(control: ControlPlane, sandbox_id: str, exec_id: str) -> None:
    """As when a line is cut. A sandbox that sleeps is not woken for it."""
    with contextlib.suppress(ForkyardError):
        if (await control.sandboxes.get(sandbox_id)).state is State.RUNNING:
            async with control.sandboxes.use(sandbox_id) as guest:
                await guest.signal(exec_id, signal.SIGHUP, tree=False)


def _accepted_env(given: Any) -> dict[str, str]:
    return {
        name: value
        for name, value in list(given.items())[:64]
        if _ENV.fullmatch(name) and len(value) <= _MAX_ENV_BYTES and "\0" not in value
    }


def _said(message: str) -> bytes:
    return f"forkyard: {message}\r\n".encode("utf-8", "replace")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return ""


def _raised(task: asyncio.Task[None]) -> Exit:
    task.result()
    raise ClientGone


def _known(raised: Exception, sandbox_id: str) -> ForkyardError:
    if isinstance(raised, ForkyardError):
        return raised
    log.error("ssh session failed", sandbox=sandbox_id, exc_info=raised)
    return InternalError()
