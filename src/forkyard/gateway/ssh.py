"""The SSH gateway: `ssh ID@host -p 7022`.

Owns: the listener, its host key, and who may come in: by an API key, a token, a sandbox's own password, or a registered
public key. The user name is the sandbox (`ID+NAME`: as the user NAME in it; else root). What a stranger can make it do
is bounded: connections that have not logged in, attempts, time. Never does: what goes on in a channel
(`ssh_sessions`), what is registered (`control.ssh`). Guests run no SSH server for this.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import asyncssh
import structlog

from forkyard.control.plane import ControlPlane
from forkyard.control.ssh import Listening
from forkyard.errors import ForkyardError, HostFailure, Unauthenticated
from forkyard.gateway.ssh_remote import MAX_PORTS, Opening, RemotePort, RemoteSession
from forkyard.gateway.ssh_sessions import PortSession, ProgramSession, Relay, SocketSession
from forkyard.net.base import GUEST_ADDRESS

log = structlog.get_logger(__name__)

LOGIN_S = 30.0
KEEPALIVE_S = 30.0
KEEPALIVES_MISSED = 4
MAX_CONNECTIONS = 1024
MAX_STRANGERS = 64
MAX_STRANGERS_PER_ADDRESS = 16
MAX_ATTEMPTS = 10
MAX_CHANNELS = 128
#: So many failures of one address are free; after that each answer takes longer, up to `MAX_DELAY_S`.
FREE_FAILURES = 10
MAX_DELAY_S = 5.0
FORGET_S = 60.0
CLOSE_S = 2.0
#: After a change in the database, and at most so often, it is looked whether those who are in may stay.
RECHECK_EVERY_S = 1.0

_USER = re.compile(r"([a-z][a-z0-9]{19})(?:\+([a-z_][a-z0-9_.-]{0,31}))?")
_NOBODY = ("", "")
#: Ports to listen on are opened one after the other: when one is there, the next is begun by this time.
_NEXT_S = 0.05
_INVALID = "what this connection was opened with is not valid any more; log in again"
_NO_SOCKETS = "unix sockets of a sandbox are not forwarded to the client (-R); forward a port"
#: Cheap for us, and every client has one of them.
_KEY_EXCHANGES = ("curve25519-sha256", "curve25519-sha256@libssh.org", "ecdh-sha2-nistp256")
_OWN = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", GUEST_ADDRESS})


class Strangers:
    """Connections that have not logged in, and addresses that failed to."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._there: dict[str, int] = {}
        self._failures: dict[str, tuple[int, float]] = {}

    def enter(self, address: str) -> bool:
        """False if there are too many."""
        if sum(self._there.values()) >= MAX_STRANGERS or self._there.get(address, 0) >= MAX_STRANGERS_PER_ADDRESS:
            return False
        self._there[address] = self._there.get(address, 0) + 1
        return True

    def leave(self, address: str) -> None:
        self._there[address] -= 1
        if not self._there[address]:
            del self._there[address]

    def failed(self, address: str) -> float:
        """How long to wait before this address is told so."""
        now = self._clock()
        count, at = self._failures.get(address, (0, now))
        count = 1 if now - at > FORGET_S else count + 1
        self._failures = {other: seen for other, seen in self._failures.items() if now - seen[1] <= FORGET_S}
        self._failures[address] = (count, now)
        return min(MAX_DELAY_S, 0.25 * max(0, count - FREE_FAILURES))


class Credential(Protocol):
    async def __call__(self, *, inside: bool = False) -> bool:
        """Whether it is good. `inside`: for those who came in by it, to stay."""
        ...


class Visitor(asyncssh.SSHServer):
    """One connection."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._control = gateway.control
        self._connection: asyncssh.SSHServerConnection
        self._address = ""
        self._stranger = False
        self._attempts = 0
        self._sandbox_id, self._user = _NOBODY
        self._credential: Credential | None = None
        self._fingerprint: str | None = None
        self._channels = 0
        self._notices: list[str] = []
        self._remote: list[RemotePort] = []
        self._listening = asyncio.Event()
        self._listening.set()
        self._still_opening = 0
        self._sessions: weakref.WeakSet[ProgramSession] = weakref.WeakSet()

    # ── coming and going ─────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._address = str((conn.get_extra_info("peername") or ("?",))[0])
        self._stranger = self._gateway.enter(self, self._address)
        if not self._stranger:
            log.warning("too many ssh connections", address=self._address)
            conn.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._known_now()
        for remote in self._remote:
            remote.close()
        self._gateway.leave(self)

    def close(self, why: str = "the daemon stops; connect again in a moment") -> None:
        for session in list(self._sessions):  # a client whose channels are closed does not look for a reason
            session.part(why)
        self._connection.disconnect(asyncssh.DISC_BY_APPLICATION, why)

    def abort(self) -> None:
        self._connection.abort()

    def _known_now(self) -> None:
        if self._stranger:
            self._stranger = False
            self._gateway.strangers.leave(self._address)

    # ── login ────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin_auth(self, username: str) -> bool:
        found = _USER.fullmatch(username)
        self._sandbox_id, self._user = (found[1], found[2] or "root") if found else _NOBODY
        return True

    def password_auth_supported(self) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    async def validate_password(self, username: str, password: str) -> bool:  # noqa: ARG002
        return await self._judge(partial(self._control.ssh.password_opens, self._sandbox_id, self._user, password))

    async def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:  # noqa: ARG002
        self._fingerprint = key.get_fingerprint()
        return await self._judge(partial(self._control.ssh.key_opens, self._fingerprint))

    async def _judge(self, credential: Credential) -> bool:
        self._attempts += 1
        if self._attempts > MAX_ATTEMPTS:
            self._connection.disconnect(asyncssh.DISC_NO_MORE_AUTH_METHODS_AVAILABLE, "too many attempts to log in")
            return False
        try:
            good = bool(self._sandbox_id) and await credential()
        except ForkyardError as error:
            log.error("ssh login could not be checked", error=error.message)
            good = False
        if good:
            self._credential = credential
            return True
        await asyncio.sleep(self._gateway.strangers.failed(self._address))
        return False

    async def auth_completed(self) -> None:
        self._known_now()
        log.info("ssh login", sandbox=self._sandbox_id, user=self._user, address=self._address)
        if self._fingerprint is not None:
            with contextlib.suppress(ForkyardError):
                await self._control.ssh.key_used(self._fingerprint)

    async def _gate(self) -> None:
        """A key that was deleted opens nothing more, also to those who are in."""
        if self._credential is None or not await self._credential():
            raise Unauthenticated(_INVALID)

    async def recheck(self) -> None:
        """Ends all that goes on if what it was opened with is gone."""
        with contextlib.suppress(ForkyardError):
            if self._credential is not None and not await self._credential(inside=True):
                log.info("ssh session ended: its credential is gone", sandbox=self._sandbox_id, address=self._address)
                self.close(_INVALID)

    # ── what they ask for ────────────────────────────────────────────────────────────────────────────────────────

    def session_requested(self) -> Any:
        self._count_channel()
        session = ProgramSession(
            self._control, self._sandbox_id, self._user, self._ready, self._keep, self._take_notices
        )
        self._sessions.add(session)
        return session

    async def _ready(self) -> None:
        """A command finds the ports that were asked for before it."""
        await self._gate()
        while not self._listening.is_set():
            await self._listening.wait()
            await asyncio.sleep(_NEXT_S)

    def _take_notices(self) -> list[str]:
        notices, self._notices = self._notices[:1], []
        return notices

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> Any:  # noqa: ARG002
        self._count_channel()
        return self._port(dest_host, dest_port)

    def unix_connection_requested(self, dest_path: str) -> Any:
        self._count_channel()
        return self._socket(dest_path)

    def server_requested(self, listen_host: str, listen_port: int) -> Any:
        """Whatever address is asked for, it is the loopback of the sandbox: there is no other that leads to it."""
        self._remote = [remote for remote in self._remote if not remote.closed]
        if len(self._remote) >= MAX_PORTS:
            return self._no_listening(f"a connection forwards at most {MAX_PORTS} ports to its client (-R)")
        if listen_port > 65535:
            return self._no_listening(f"{listen_port} is no port; ports are numbers from 1 to 65535")
        remote = RemotePort(
            self._control,
            self._sandbox_id,
            self._user,
            reach=partial(self._reach, listen_host),
            keep=self._gateway.keep,
            live=self._gateway.listening,
        )
        self._remote.append(remote)
        self._still_opening += 1
        self._listening.clear()
        return self._listen(remote, listen_port)

    def unix_server_requested(self, listen_path: str) -> bool:  # noqa: ARG002
        return self._no_listening(_NO_SOCKETS)

    def _no_listening(self, why: str) -> bool:
        # Clients show a debug message only if asked to; whoever opens a session is told there.
        self._connection.send_debug(f"forkyard: {why}", "en", True)
        self._notices.append(why)
        return False

    async def _listen(self, remote: RemotePort, port: int) -> RemotePort | bool:
        try:
            await self._gate()
            await remote.open(port)
        except ForkyardError as error:
            remote.close()
            return self._no_listening(f"port {port} is not forwarded to the client (-R): {error.message}")
        finally:
            self._still_opening -= 1
            if not self._still_opening:
                self._listening.set()
        return remote

    async def _reach(self, listen_host: str, opening: Opening, listen_port: int, host: str, port: int) -> None:
        self._count_channel()
        try:
            await self._connection.create_connection(
                partial(RemoteSession, opening, self._keep), listen_host, listen_port, host, port
            )
        except BaseException:
            self._channels -= 1
            raise

    async def _port(self, host: str, port: int) -> PortSession:
        with self._refusals():
            await self._gate()
            if host.lower() not in _OWN and host.lower() != self._sandbox_id:
                raise asyncssh.ChannelOpenError(
                    asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED,
                    f"only ports of the sandbox itself can be reached (localhost), not those of {host[:100]}",
                )
            return PortSession(await self._control.tunnels.open(self._sandbox_id, port), self._keep)

    async def _socket(self, path: str) -> SocketSession:
        with self._refusals():
            await self._gate()
            return SocketSession(await Relay.open(self._control, self._sandbox_id, self._user, path), self._keep)

    @contextlib.contextmanager
    def _refusals(self) -> Any:
        try:
            yield
        except ForkyardError as error:
            self._channels -= 1
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_CONNECT_FAILED, error.message) from None
        except asyncssh.ChannelOpenError:
            self._channels -= 1
            raise

    def _count_channel(self) -> None:
        if self._channels >= MAX_CHANNELS:
            raise asyncssh.ChannelOpenError(
                asyncssh.OPEN_RESOURCE_SHORTAGE, f"a connection has at most {MAX_CHANNELS} channels; open another"
            )
        self._channels += 1

    def _keep(self, work: Coroutine[Any, Any, None], name: str) -> None:
        async def counted() -> None:
            try:
                await work
            finally:
                self._channels -= 1

        self._gateway.keep(counted(), name)


class Gateway:
    def __init__(self, control: ControlPlane) -> None:
        self.control = control
        self.strangers = Strangers()
        self.listening: set[str] = set()
        self._visitors: set[Visitor] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def enter(self, visitor: Visitor, address: str) -> bool:
        if len(self._visitors) >= MAX_CONNECTIONS or not self.strangers.enter(address):
            return False
        self._visitors.add(visitor)
        return True

    def leave(self, visitor: Visitor) -> None:
        self._visitors.discard(visitor)

    def keep(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("ssh channel failed", exc_info=error)

    async def watch(self) -> None:
        """Runs as long as the gateway does. Nothing is revoked without a commit."""
        while True:
            news = self.control.ground.store.news
            for visitor in list(self._visitors):
                await visitor.recheck()
            await asyncio.sleep(RECHECK_EVERY_S)
            await news.wait()

    async def aclose(self) -> None:
        """Programs in guests go on; their clients connect again."""
        visitors = list(self._visitors)
        for visitor in visitors:
            visitor.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for visitor in visitors:
            visitor.abort()


@contextlib.asynccontextmanager
async def serve(control: ControlPlane, host: str, port: int, key_file: Path) -> AsyncIterator[Listening]:
    """`port` 0: a free one."""
    key = await asyncio.to_thread(_host_key, key_file)
    gateway = Gateway(control)
    asyncssh.set_log_level("WARNING")  # it tells every command and packet
    listener = _bound(host, port)
    server = await asyncssh.listen(
        sock=listener,
        server_factory=partial(Visitor, gateway),
        server_host_keys=[key],
        server_version="Forkyard",
        kex_algs=_KEY_EXCHANGES,
        compression_algs=["none"],
        encoding=None,
        line_editor=False,
        agent_forwarding=False,
        x11_forwarding=False,
        kbdint_auth=False,
        gss_auth=False,
        gss_kex=False,
        login_timeout=LOGIN_S,
        keepalive_interval=KEEPALIVE_S,
        keepalive_count_max=KEEPALIVES_MISSED,
    )
    public = key.export_public_key("openssh").decode().strip()
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    control.ssh.listening = Listening(shown, listener.getsockname()[1], (public,))
    gateway.keep(gateway.watch(), "ssh credentials")
    try:
        yield control.ssh.listening
    finally:
        control.ssh.listening = None
        server.close()
        await gateway.aclose()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await server.wait_closed()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise HostFailure(
            f"cannot listen for SSH on {host}:{port}: {error.strerror}; set FORKYARD_SSH_PORT to another port, or "
            "FORKYARD_SSH=false"
        ) from error
    listener.setblocking(False)
    return listener


def _host_key(path: Path) -> asyncssh.SSHKey:
    """Made once: clients remember it."""
    try:
        if not path.exists():
            key = asyncssh.generate_private_key("ssh-ed25519", comment="forkyard")
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(key.export_private_key("openssh"))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        return asyncssh.read_private_key(path)
    except (OSError, asyncssh.KeyImportError) as error:
        raise HostFailure(f"the SSH host key {path} cannot be used: {error}; move it away to get a new one") from error
