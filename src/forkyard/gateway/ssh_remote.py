"""`ssh -R`: a port on the loopback of a guest that leads to the client's side.

Owns: what listens in the guest, a small program there, and another for each connection that it accepted: that one is
handed the socket, and its standard input and output become the connection. Guests need Python for it. While the sandbox
sleeps nobody there connects; what the client sends wakes it. Never does: who may (`ssh`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import asyncssh
import structlog

from forkyard.control.plane import ControlPlane
from forkyard.errors import ForkyardError, GuestFailure, GuestUnreachable, PortClosed
from forkyard.gateway.ssh_flow import ClientGone
from forkyard.gateway.ssh_sessions import Forward, Keep, Relay, hang_up
from forkyard.guest.base import ExecSpec, Execution, Output

log = structlog.get_logger(__name__)

#: By it those of clients that went while the sandbox slept, and of forks, are told apart from a user's own.
_LABEL = "ssh -R"
#: Of one client.
MAX_PORTS = 8
OPEN_S = 30.0
_MAX_LINE_BYTES = 4096
_REACHED_AT_ONCE = 16
#: For what a guest has not taken yet of a client that closed.
_REST_S = 60.0
#: First says where connections are handed out, and the port; then a number for each. A number that comes back is refused.
_LISTEN = """
import os, select, shutil, signal, socket, sys, tempfile
signal.signal(signal.SIGHUP, lambda *_: sys.exit())
try:
    server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
except OSError as e:
    sys.exit(e.strerror)
home = tempfile.mkdtemp(prefix="forkyard-")
try:
    door = socket.socket(socket.AF_UNIX)
    door.bind(home + "/door")
    door.listen()
    print(home + "/door", server.getsockname()[1], flush=True)
    waiting, number, rest = {}, 0, b""
    while True:
        # Who has not been fetched waits; who comes when many do waits in the kernel.
        for one in select.select([0, door, server] if len(waiting) < 16 else [0, door], [], [])[0]:
            if one is server:
                number += 1
                waiting[number], peer = server.accept()
                print(number, *peer, flush=True)
            elif one is door:
                with door.accept()[0] as near:
                    near.settimeout(5)
                    try:
                        with waiting.pop(int(near.recv(20))) as taken:
                            socket.send_fds(near, [b"+"], [taken.fileno()])
                    except (OSError, ValueError, KeyError):
                        pass
            else:
                read = os.read(0, 4096)
                if not read:
                    sys.exit()
                *lines, rest = (rest + read).split(b"\\n")
                for line in lines:
                    if int(line) in waiting:
                        waiting.pop(int(line)).close()
finally:
    shutil.rmtree(home, ignore_errors=True)
"""
#: `+` says that it has the connection. When its other end will say no more, standard error has how much it said.
_TAKE = """
import os, socket, sys, threading
with socket.socket(socket.AF_UNIX) as door:
    door.connect(sys.argv[1])
    door.sendall(sys.argv[2].encode())
    found = socket.recv_fds(door, 1, 1)[1]
if not found:
    sys.exit("it has gone")
s = socket.socket(fileno=found[0])
os.write(1, b"+")
def up():
    try:
        while data := os.read(0, 65536):
            s.sendall(data)
        s.shutdown(socket.SHUT_WR)
    except OSError:
        os._exit(0)
sending = threading.Thread(target=up, daemon=True)
sending.start()
said = 0
try:
    while data := s.recv(65536):
        said += len(data)
        while data:
            data = data[os.write(1, data):]
except OSError:
    os._exit(0)
os.write(2, b"%d." % said)
sending.join()
"""

#: Opens the far end, in the guest.
Opening = Callable[[], Awaitable["Taken"]]
#: Opens a channel to the client: for this far end, of the port that listens, from this address and port.
Reach = Callable[[Opening, int, str, int], Awaitable[None]]


class RemotePort(asyncssh.SSHListener):
    """One port, from `open` until `close`."""

    def __init__(
        self, control: ControlPlane, sandbox_id: str, user: str, *, reach: Reach, keep: Keep, live: set[str]
    ) -> None:
        """`live`: ids of the execs that listen for somebody, of all clients."""
        super().__init__()
        self._control = control
        self._sandbox_id = sandbox_id
        self._user = user
        self._reach = reach
        self._keep = keep
        self._live = live
        self._opened: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
        self._closed = asyncio.Event()
        self._turns = asyncio.Semaphore(_REACHED_AT_ONCE)

    async def open(self, port: int) -> None:
        """`port` 0: a free one. Wakes the sandbox."""
        self._keep(self._run(port), f"ssh -R {self._sandbox_id}")
        try:
            async with asyncio.timeout(OPEN_S):
                await asyncio.shield(self._opened)
        except TimeoutError:
            raise GuestUnreachable(f"nothing listened in the sandbox within {OPEN_S:.0f} s") from None

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def get_port(self) -> int:
        return self._opened.result()[1]

    def close(self) -> None:
        """Connections go on."""
        self._closed.set()

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def _run(self, port: int) -> None:
        spec = ExecSpec(["python3", "-c", _LISTEN, str(port)], user=self._user, cwd="/", stdin=True, label=_LABEL)
        closed = asyncio.create_task(self._closed.wait())
        try:
            await self._hang_up_orphans()
            async with self._control.following.execute(self._sandbox_id, spec) as execution:
                self._live.add(execution.id)
                listening = asyncio.create_task(self._listen(execution))
                try:
                    await asyncio.wait({listening, closed}, return_when=asyncio.FIRST_COMPLETED)
                    if listening.done():
                        listening.result()
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
                    self._live.discard(execution.id)
                    await hang_up(self._control, self._sandbox_id, execution.id)
        except ForkyardError as error:
            log.info("a port forwarded to a client ended", sandbox=self._sandbox_id, error=error.message)
            self._fail(error)
        finally:
            self._fail(GuestUnreachable("the client has gone"))
            self._closed.set()
            closed.cancel()

    def _fail(self, error: ForkyardError) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # whoever waited may not any more

    async def _hang_up_orphans(self) -> None:
        """Nobody hears them any more, and they have their ports."""
        async with self._control.sandboxes.use(self._sandbox_id) as guest:
            for one in await guest.execs():
                if one.running and one.label == _LABEL and one.id not in self._live:
                    with contextlib.suppress(ForkyardError):
                        await guest.signal(one.id, signal.SIGHUP, tree=False)

    async def _listen(self, execution: Execution) -> None:
        complaint, rest = b"", b""
        async for item in execution:
            if not isinstance(item, Output):
                continue
            if item.stream == "stderr":
                complaint = (complaint + item.data)[-1000:]
                continue
            *lines, rest = (rest + item.data).split(b"\n")
            try:
                for line in lines:
                    await self._heard(execution.id, *line.decode("ascii").split())
            except (ValueError, TypeError):  # it comes from a guest
                break
            if len(rest) > _MAX_LINE_BYTES:
                break
        raise GuestFailure(complaint.decode("utf-8", "replace").strip() or "what listens in the sandbox has ended")

    async def _heard(self, exec_id: str, first: str, second: str, port: str = "0") -> None:
        if not self._opened.done():
            self._opened.set_result((first, int(second)))
            return
        await self._turns.acquire()
        self._keep(self._connected(exec_id, int(first), second, int(port)), f"ssh -R {self._sandbox_id}")

    async def _connected(self, exec_id: str, number: int, host: str, port: int) -> None:
        try:
            await self._reach(partial(self._taken, exec_id, number), self.get_port(), host, port)
        except (asyncssh.Error, OSError):
            await self._refuse(exec_id, number)
        finally:
            self._turns.release()

    async def _taken(self, exec_id: str, number: int) -> Taken:
        command = ["python3", "-c", _TAKE, self._opened.result()[0], str(number)]
        try:
            return await Taken.started(self._control, self._sandbox_id, self._user, command)
        except ForkyardError:
            await self._refuse(exec_id, number)
            raise

    async def _refuse(self, exec_id: str, number: int) -> None:
        with contextlib.suppress(ForkyardError):
            async with self._control.sandboxes.use(self._sandbox_id) as guest:
                await guest.write_stdin(exec_id, b"%d\n" % number)


class Taken(Relay):
    """A connection that was accepted in the guest."""

    async def ended(self) -> None:
        """When its program has ended: what came last has arrived, too."""
        async for _ in self._output:
            pass

    async def _read(self, execution: Execution) -> AsyncIterator[bytes]:
        """Empty at the end of what it says; it may listen still."""
        received, said = -1, b""
        async for item in execution:
            if isinstance(item, Output) and item.stream == "stdout":
                data = item.data
                if received < 0:
                    received, data = 0, data[1:]
                    yield b""
                if data:
                    received += len(data)
                    yield data
            elif isinstance(item, Output):
                said = (said + item.data)[-1000:]
            if received >= 0 and said[:-1].isdigit() and said.endswith(b".") and received >= int(said[:-1]):
                yield b""
        if received < 0:
            raise PortClosed(said.decode("utf-8", "replace").strip() or "the connection has gone")


class RemoteSession(Forward, asyncssh.SSHTCPSession[bytes]):
    """A connection to the client. It ends when both ends have said all, or the client goes."""

    _far: Taken

    def __init__(self, opening: Opening, keep: Keep) -> None:
        super().__init__(keep)
        self._opening = opening
        self._broken = False

    async def _run(self) -> None:
        try:
            self._far = await self._opening()
        except ForkyardError as error:
            log.info("a connection to an ssh client could not be fetched", error=error.message)
            self._chan.close()
        else:
            await super()._run()

    def connection_lost(self, exc: Exception | None) -> None:
        self._broken = exc is not None
        super().connection_lost(exc)

    async def _up(self) -> None:
        try:
            while (item := await self.read()) is not None:
                if isinstance(item, bytes):
                    await self._far.write(item)
        except ClientGone:
            if self._broken:  # else it has only closed; the end of its data was not told apart
                raise
        await self._far.end()

    async def _down(self) -> None:
        while data := await self._far.read():
            with contextlib.suppress(ClientGone):
                await self.write(data)
        if not self.gone.is_set():
            self._chan.write_eof()
        await self._far.ended()

    async def _over(self, up: asyncio.Task[None], down: asyncio.Task[None]) -> None:
        gone = asyncio.create_task(self.gone.wait())
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            if up.done() and up.exception() is None:
                await asyncio.wait({down, gone}, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait({down}, timeout=_REST_S)  # it may not have taken all yet
        finally:
            gone.cancel()
