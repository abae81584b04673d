"""The SSH gateway on real machines, with the real OpenSSH client: shell, commands, files, ports, sleep."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forkyard import Forkyard, PortClosed, Sandbox

pytestmark = pytest.mark.timeout(300)

_SERVER = """
import socket
s = socket.create_server(("127.0.0.1", 4000))
print("listening", flush=True)
while True:
    c, _ = s.accept()
    with c:
        while data := c.recv(65536):
            c.sendall(data)
"""


class Client:
    def __init__(self, fy: Forkyard, directory: Path) -> None:
        self._key = directory / "id"
        self._ask = directory / "ask"
        self._ask.write_text("#!/bin/sh\nprintf '%s\\n' \"$PASSWORD\"\n")
        self._ask.chmod(0o700)
        self.door = fy.ssh.door()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._key)], check=True)
        self.public_key = self._key.with_suffix(".pub").read_text()
        known = directory / "known"
        known.write_text(f"[127.0.0.1]:{self.door.port} {self.door.host_keys[0]}\n")
        self.options = [
            *("-F", "/dev/null", "-i", str(self._key), "-o", "IdentitiesOnly=yes", "-o", "IdentityAgent=none"),
            *("-o", f"UserKnownHostsFile={known}", "-o", "LogLevel=ERROR", "-o", f"Port={self.door.port}"),
        ]

    def run(self, *words: str, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = ["ssh", *self.options, "-o", "BatchMode=yes", *words]
        return subprocess.run(command, input=input, capture_output=True, timeout=120)

    def with_password(self, password: str, *words: str) -> subprocess.CompletedProcess[bytes]:
        options = ["-o", "PubkeyAuthentication=no", "-o", "NumberOfPasswordPrompts=1"]
        env = {**os.environ, "SSH_ASKPASS": str(self._ask), "SSH_ASKPASS_REQUIRE": "force", "PASSWORD": password}
        return subprocess.run(
            ["ssh", *self.options, *options, *words],
            env=env,
            capture_output=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def ssh(fy: Forkyard, tmp_path: Path) -> Iterator[Client]:
    client = Client(fy, tmp_path)
    added = fy.ssh.add_key(client.public_key)
    yield client
    fy.ssh.delete_key(added.id)


def test_commands_shells_users_and_wrong_credentials(fy: Forkyard, sbx: Sandbox, ssh: Client, tmp_path: Path) -> None:
    there = f"{sbx.id}@127.0.0.1"
    done = ssh.run(there, "echo out; echo err >&2; hostname; exit 3")
    assert (done.returncode, done.stderr) == (3, b"err\n")
    assert done.stdout.splitlines()[0] == b"out"
    assert ssh.run(f"{sbx.id}+user@127.0.0.1", "whoami; pwd").stdout == b"user\n/home/user\n"
    shell = ssh.run("-tt", there, input=b"stty -echo; tty; echo $TERM$((1+1))\nexit 4\n")
    assert shell.returncode == 4
    assert b"/dev/pts/" in shell.stdout
    script = ssh.run("-T", there, input=b"set -e\ncd /tmp\npwd\n")
    assert script.stdout == b"/tmp\n"
    access = sbx.ssh()
    assert ssh.with_password(access.password, there, "echo in").stdout == b"in\n"
    assert b"Permission denied" in ssh.with_password(access.password[:-1], there, "echo in").stderr
    (tmp_path / "other").mkdir()
    assert b"Permission denied" in Client(fy, tmp_path / "other").run(there, "echo in").stderr


def test_two_sessions_and_20_mb_both_ways_by_scp_and_sftp(sbx: Sandbox, ssh: Client, tmp_path: Path) -> None:
    data = os.urandom(20_000_000)
    (tmp_path / "a").write_bytes(data)
    there = f"{sbx.id}@127.0.0.1"
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ssh.run, there, "while ! [ -e /root/b ]; do sleep 0.2; done; echo seen")
        copied = subprocess.run(["scp", "-q", *ssh.options, str(tmp_path / "a"), f"{there}:b"], timeout=200)
        assert copied.returncode == 0
        assert waiting.result(60).stdout == b"seen\n"
    assert ssh.run(there, "sha256sum < b").stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
    batch = f"get b {tmp_path}/c\nrm b\n"
    back = subprocess.run(
        ["sftp", "-q", "-b", "-", *ssh.options, there], input=batch, text=True, capture_output=True, timeout=200
    )
    assert back.returncode == 0, back.stderr
    assert (tmp_path / "c").read_bytes() == data
    assert not sbx.files.exists("/root/b")


def test_ports_of_the_guest_by_ssh_and_by_the_sdk(sbx: Sandbox, ssh: Client) -> None:
    server = sbx.spawn(["python3", "-c", _SERVER])
    next(iter(server.output()))
    data = os.urandom(2_000_000)
    with socket.create_server(("127.0.0.1", 0)) as free:
        local = free.getsockname()[1]
    tunnel = subprocess.Popen(
        ["ssh", *ssh.options, "-N", "-L", f"{local}:localhost:4000", f"{sbx.id}@127.0.0.1"], stdin=subprocess.DEVNULL
    )
    try:
        assert _exchange(local, data) == data
    finally:
        tunnel.terminate()
        tunnel.wait()
    with sbx.forward(4000) as forward:
        assert _exchange(forward.port, data) == data
    with sbx.forward(4001) as closed:
        assert _exchange(closed.port, b"x") == b""
        _until(lambda: isinstance(closed.error, PortClosed))
    with socket.create_server(("127.0.0.1", 0)) as here, ThreadPoolExecutor() as pool:
        taken = pool.submit(_echo_once, here)
        ask = (
            "import socket; c = socket.create_connection(('127.0.0.1', 4100)); c.sendall(b'x' * 300000); "
            "c.shutdown(1); print(sum(map(len, iter(lambda: c.recv(65536), b''))))"
        )
        back = ("-R", f"4100:127.0.0.1:{here.getsockname()[1]}")
        assert ssh.run(*back, f"{sbx.id}@127.0.0.1", f'python3 -c "{ask}"').stdout == b"300000\n"
        taken.result(10)
    outside = ssh.run("-W", "192.0.2.1:80", f"{sbx.id}@127.0.0.1")
    assert outside.returncode == 255


def test_a_session_outlives_sleep_on_disk_and_its_next_line_wakes_the_machine(sbx: Sandbox, ssh: Client) -> None:
    there = f"{sbx.id}@127.0.0.1"
    shell = subprocess.Popen(["ssh", *ssh.options, "-T", there], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write(b"x=5; echo begun\n")
    shell.stdin.flush()
    assert shell.stdout.readline() == b"begun\n"
    for durable in (False, True):
        sbx.pause(durable=durable)
        shell.stdin.write(b"x=$((x + 1)); echo x is $x\n")
        shell.stdin.flush()
        assert shell.stdout.readline() == f"x is {6 + durable}\n".encode()
        assert sbx.refresh().state == "running"
    sbx.pause()
    assert ssh.run(there, "echo awake").stdout == b"awake\n"
    sbx.delete()
    assert shell.wait(60) == 255
    shell.stdin.close()
    shell.stdout.close()


def _echo_once(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)


def _exchange(port: int, data: bytes) -> bytes:
    """With one who says what it is told. The client may be there a moment later."""
    deadline = time.monotonic() + 30
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=60)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    answer = bytearray()
    with connection, ThreadPoolExecutor() as pool:
        pool.submit(lambda: (connection.sendall(data), connection.shutdown(socket.SHUT_WR)))
        while piece := connection.recv(65536):
            answer += piece
    return bytes(answer)


def _until(true: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
