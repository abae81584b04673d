"""An SSH gateway of its own for tests, the OpenSSH client, and a server to forward to; sandboxes are agent processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forkyard import Forkyard, Sandbox
from forkyard.gateway import ssh as gateway

from .sdk_daemon import Daemon


class SshDaemon(Daemon):
    port_of_ssh = 0

    async def _start(self) -> None:
        await super()._start()
        self._stack = contextlib.AsyncExitStack()
        key_file = self.root / "state" / "ssh_host_ed25519_key"
        self.gateway = await self._stack.enter_async_context(gateway.serve(self._control, "127.0.0.1", 0, key_file))
        self.port_of_ssh = self.gateway.port

    async def _stop(self) -> None:
        await self._stack.aclose()
        await super()._stop()

    @property
    def control(self):  # type: ignore[no-untyped-def]
        return self._control

    def idle_s(self, sandbox_id: str) -> float:
        return float(self._control.ground.activity.idle_s(sandbox_id))


@pytest.fixture(scope="module")
def daemon() -> Iterator[SshDaemon]:
    root = Path(tempfile.mkdtemp(prefix="fyssh-"))
    made = SshDaemon(root)
    try:
        made.start()
        yield made
        made.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def fy(daemon: SshDaemon) -> Iterator[Forkyard]:
    with Forkyard(socket=daemon.socket, key_file=daemon.key_file) as client:
        yield client


@pytest.fixture(scope="module")
def sbx(fy: Forkyard) -> Iterator[Sandbox]:
    with fy.sandboxes.create(name="ssh") as sandbox:
        yield sandbox


class Client:
    """OpenSSH with a key, a known host, and nothing of this machine's own configuration."""

    def __init__(self, daemon: SshDaemon, directory: Path) -> None:
        self.key = directory / "id"
        self.directory = directory
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True)
        (directory / "known").write_text(f"[127.0.0.1]:{daemon.port_of_ssh} {daemon.gateway.host_keys[0]}\n")
        self.port = daemon.port_of_ssh
        self.options = [
            *("-F", "/dev/null", "-i", str(self.key), "-o", "IdentitiesOnly=yes", "-o", "StrictHostKeyChecking=yes"),
            *("-o", f"UserKnownHostsFile={directory / 'known'}", "-o", "LogLevel=INFO", "-o", "IdentityAgent=none"),
        ]

    @property
    def public_key(self) -> str:
        return self.key.with_suffix(".pub").read_text()

    def command(self, user: str, *words: str, options: tuple[str, ...] = ()) -> list[str]:
        return ["ssh", *self.options, "-p", str(self.port), *options, f"{user}@127.0.0.1", *words]

    def run(
        self, user: str, *words: str, options: tuple[str, ...] = (), input: bytes = b"", timeout: float = 30
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.command(user, *words, options=("-o", "BatchMode=yes", *options)),
            input=input,
            capture_output=True,
            timeout=timeout,
        )

    def with_password(self, user: str, password: str, *words: str) -> subprocess.CompletedProcess[str]:
        process = self.with_password_open(user, password, *words)
        out, complaint = process.communicate(timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, out.decode(), complaint.decode())

    def with_password_open(self, user: str, password: str, *words: str) -> subprocess.Popen[bytes]:
        ask = self.directory / "ask"
        ask.write_text("#!/bin/sh\nprintf '%s\\n' \"$PASSWORD\"\n")
        ask.chmod(0o700)
        return subprocess.Popen(
            self.command(user, *words, options=("-o", "PubkeyAuthentication=no", "-o", "NumberOfPasswordPrompts=1")),
            env={**os.environ, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force", "PASSWORD": password},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


@pytest.fixture(scope="module")
def ssh(daemon: SshDaemon, fy: Forkyard, tmp_path_factory: pytest.TempPathFactory) -> Client:
    client = Client(daemon, tmp_path_factory.mktemp("ssh"))
    fy.ssh.add_key(client.public_key)
    return client


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def until(true: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    """A server "in the guest": says all it is told, and closes after the end."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def exchange(port: int, data: bytes) -> bytes:
    answer = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as one:
        sending = threading.Thread(target=lambda: (one.sendall(data), one.shutdown(socket.SHUT_WR)))
        sending.start()
        while piece := one.recv(65536):
            answer += piece
        sending.join()
    return bytes(answer)


@contextlib.contextmanager
def tunnel(ssh: Client, sandbox: Sandbox, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = ssh.command(sandbox.id, options=("-N", "-o", "ExitOnForwardFailure=yes", *options))
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
