"""The SSH gateway with the real OpenSSH client; sandboxes are agent processes of this machine, as in `sdk_daemon`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forkyard import Conflict, Forkyard, InvalidRequest, NotFound, PortClosed, Sandbox
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


# ── login ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_registered_key_opens_a_sandbox_and_is_noted(ssh: Client, fy: Forkyard, sbx: Sandbox) -> None:
    done = ssh.run(sbx.id, "echo in; whoami")
    assert (done.returncode, done.stdout) == (0, b"in\nroot\n"), done.stderr
    (key,) = [key for key in fy.ssh.list_keys() if key.last_used_at]
    assert key.fingerprint.startswith("SHA256:")


def test_a_key_that_is_not_registered_opens_nothing(daemon: SshDaemon, sbx: Sandbox, tmp_path: Path) -> None:
    done = Client(daemon, tmp_path).run(sbx.id, "echo in")
    assert done.returncode == 255
    assert b"Permission denied" in done.stderr
    assert done.stdout == b""


def _ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, complaint = process.communicate(timeout=30)
    return process.returncode, complaint.decode()


def _session(client: Client, sandbox: Sandbox, *options: str) -> subprocess.Popen[bytes]:
    """A command that is under way."""
    command = client.command(sandbox.id, "echo in; sleep 100", options=options)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1)
    assert process.stdout is not None
    assert process.stdout.readline() == b"in\n"
    return process


def test_a_deleted_key_ends_what_was_opened_with_it_and_opens_nothing_more(
    daemon: SshDaemon, ssh: Client, fy: Forkyard, sbx: Sandbox, tmp_path: Path
) -> None:
    client = Client(daemon, tmp_path)
    added = fy.ssh.add_key(client.public_key, name="short")
    assert fy.ssh.add_key(client.public_key).id == added.id
    session, other = _session(client, sbx), _session(ssh, sbx)
    fy.ssh.delete_key(added.id)
    code, complaint = _ended(session)
    assert code == 255 and "not valid any more" in complaint
    assert b"Permission denied" in client.run(sbx.id, "true").stderr
    with pytest.raises(NotFound):
        fy.ssh.delete_key(added.id)
    assert other.poll() is None
    other.terminate()
    other.communicate()


def test_a_token_that_is_revoked_and_an_api_key_that_is_deleted_end_their_sessions(
    ssh: Client, daemon: SshDaemon, fy: Forkyard, sbx: Sandbox
) -> None:
    made = fy.keys.create("passing")
    with Forkyard(daemon.url, made.key) as other:
        password = other.sandboxes.get(sbx.id).ssh().password
    identity = fy.identities.create("leaving")
    token = fy.identities.create_token(identity.id)
    fy.identities.grant_sandbox(identity.id, sbx.id)
    sessions = []
    for word in (password, token.token):
        process = ssh.with_password_open(sbx.id, word, "echo in; sleep 100")
        assert process.stdout is not None and process.stdout.readline() == b"in\n"
        sessions.append(process)
    fy.keys.delete(made.id)
    fy.identities.revoke_token(identity.id, token.id)
    for process in sessions:
        code, complaint = _ended(process)
        assert code == 255 and "not valid any more" in complaint


def test_an_ssh_key_goes_with_the_api_key_that_added_it(daemon: SshDaemon, fy: Forkyard, tmp_path: Path) -> None:
    client = Client(daemon, tmp_path)
    made = fy.keys.create("passing")
    with Forkyard(daemon.url, made.key) as other:
        added = other.ssh.add_key(client.public_key)
    assert added.id in {key.id for key in fy.ssh.list_keys()}
    fy.keys.delete(made.id)
    assert added.id not in {key.id for key in fy.ssh.list_keys()}


def test_a_password_opens_its_own_sandbox_for_its_time(
    ssh: Client, daemon: SshDaemon, fy: Forkyard, sbx: Sandbox
) -> None:
    access = sbx.ssh()
    assert access.command == f"ssh -p {daemon.port_of_ssh} {sbx.id}@127.0.0.1"
    assert access.password not in repr(access)
    done = ssh.with_password(access.user, access.password, "echo in")
    assert (done.returncode, done.stdout) == (0, "in\n"), done.stderr
    with fy.sandboxes.create() as other:
        assert "Permission denied" in ssh.with_password(other.id, access.password, "true").stderr
    brief = sbx.ssh(ttl_s=0.001)
    assert "Permission denied" in ssh.with_password(sbx.id, brief.password, "true").stderr
    with pytest.raises(InvalidRequest, match="ttl_s"):
        sbx.ssh(ttl_s=0)


def test_an_api_key_is_a_password_too(ssh: Client, daemon: SshDaemon, sbx: Sandbox) -> None:
    assert ssh.with_password(sbx.id, daemon.key, "echo in").stdout == "in\n"
    assert "Permission denied" in ssh.with_password(sbx.id, daemon.key + "x", "true").stderr


def test_a_token_of_an_identity_opens_what_it_was_granted_as_whom_it_may_be(
    ssh: Client, fy: Forkyard, sbx: Sandbox
) -> None:
    identity = fy.identities.create("guest")
    token = fy.identities.create_token(identity.id).token
    assert "Permission denied" in ssh.with_password(f"{sbx.id}+daemon", token, "true").stderr
    fy.identities.grant_sandbox(identity.id, sbx.id, allowed_users=["daemon"])
    assert ssh.with_password(f"{sbx.id}+daemon", token, "whoami").stdout == "daemon\n"
    assert "Permission denied" in ssh.with_password(sbx.id, token, "true").stderr
    fy.identities.delete(identity.id)
    assert "Permission denied" in ssh.with_password(f"{sbx.id}+daemon", token, "true").stderr


@pytest.mark.parametrize("user", ["root", "a", "../../etc", "x" * 20 + "+" + "y" * 40, "X" * 20])
def test_a_user_name_that_is_no_sandbox_is_refused(ssh: Client, daemon: SshDaemon, user: str) -> None:
    assert "Permission denied" in ssh.with_password(user, daemon.key, "true").stderr


def test_a_sandbox_that_is_not_there_is_told_to_those_who_may_know(ssh: Client, fy: Forkyard) -> None:
    done = ssh.run("a" * 20, "true")
    assert done.returncode == 255
    assert b"forkyard: there is no sandbox" in done.stderr
    ended = fy.sandboxes.create()
    ended.delete()
    done = ssh.run(ended.id, "true")
    assert done.returncode == 255
    assert b"has ended" in done.stderr


@pytest.mark.parametrize(
    "text", ["", "ssh-ed25519", "ssh-ed25519 AAAA x", "-----BEGIN OPENSSH PRIVATE KEY-----", "a\nb"]
)
def test_what_is_no_public_key_is_refused_with_an_example(fy: Forkyard, text: str) -> None:
    with pytest.raises(InvalidRequest, match="public_key"):
        fy.ssh.add_key(text)


def test_a_weak_key_is_refused(fy: Forkyard, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "1024", "-N", "", "-f", str(tmp_path / "k")], check=True)
    with pytest.raises(InvalidRequest, match="too weak"):
        fy.ssh.add_key((tmp_path / "k.pub").read_text())


def test_failures_slow_an_address_down_and_are_forgotten() -> None:
    now = [0.0]
    strangers = gateway.Strangers(lambda: now[0])
    waits = [strangers.failed("192.0.2.1") for _ in range(40)]
    assert waits[: gateway.FREE_FAILURES] == [0.0] * gateway.FREE_FAILURES
    assert waits[-1] == gateway.MAX_DELAY_S
    assert strangers.failed("192.0.2.2") == 0.0
    now[0] = gateway.FORGET_S + 1
    assert strangers.failed("192.0.2.1") == 0.0


def test_strangers_are_few_per_address_and_make_room_when_they_leave() -> None:
    strangers = gateway.Strangers()
    assert [strangers.enter("192.0.2.1") for _ in range(gateway.MAX_STRANGERS_PER_ADDRESS + 1)][-2:] == [True, False]
    assert strangers.enter("192.0.2.2")
    strangers.leave("192.0.2.1")
    assert strangers.enter("192.0.2.1")


def test_connections_that_do_not_log_in_are_bounded_and_others_go_on(
    ssh: Client, daemon: SshDaemon, sbx: Sandbox
) -> None:
    with contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port_of_ssh)))
            for _ in range(gateway.MAX_STRANGERS_PER_ADDRESS)
        ]
        for one in held:
            assert one.recv(64).startswith(b"SSH-2.0-Forkyard")
        with socket.create_connection(("127.0.0.1", daemon.port_of_ssh)) as extra:
            extra.settimeout(10)
            rest = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := extra.recv(4096):
                    rest += piece
    for _ in range(100):
        if ssh.run(sbx.id, "true").returncode == 0:
            return
        time.sleep(0.05)
    raise AssertionError("nobody is let in any more")


def test_garbage_ends_only_its_own_connection(ssh: Client, daemon: SshDaemon, sbx: Sandbox) -> None:
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n" + os.urandom(5000), b"\0" * 70000, b"SSH-1.5-old\r\n"):
        with socket.create_connection(("127.0.0.1", daemon.port_of_ssh)) as one, contextlib.suppress(OSError):
            one.settimeout(10)
            one.sendall(junk)
            one.shutdown(socket.SHUT_WR)
            while one.recv(4096):
                pass
    assert ssh.run(sbx.id, "true").returncode == 0


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_streams_are_apart_and_the_exit_code_is_the_programs(ssh: Client, sbx: Sandbox) -> None:
    done = ssh.run(sbx.id, "printf '\\377\\000'; echo err >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"\xff\x00", b"err\n")


def test_a_program_ended_by_a_signal_is_told_as_such(ssh: Client, sbx: Sandbox) -> None:
    done = ssh.run(sbx.id, "kill -TERM $$", options=("-v",))
    assert done.returncode == 255
    assert b"exit-signal" in done.stderr


def test_a_command_may_be_long(ssh: Client, sbx: Sandbox) -> None:
    assert ssh.run(sbx.id, f"echo {'x' * 90_000} | wc -c").stdout == b"90001\n"
    assert b"at most 100000 characters" in ssh.run(sbx.id, f"true {'x' * 100_000}").stderr


def test_standard_input_has_an_end(ssh: Client, sbx: Sandbox) -> None:
    data = os.urandom(3_000_000)
    done = ssh.run(sbx.id, "sha256sum; echo after", input=data)
    assert done.stdout.decode().split() == [hashlib.sha256(data).hexdigest(), "-", "after"]


def test_a_program_that_does_not_read_its_input_ends_all_the_same(ssh: Client, sbx: Sandbox) -> None:
    done = ssh.run(sbx.id, "exec 0<&-; echo gone", input=os.urandom(2_000_000))
    assert (done.returncode, done.stdout) == (0, b"gone\n")


def test_a_script_comes_by_standard_input_without_a_command(ssh: Client, sbx: Sandbox) -> None:
    done = ssh.run(sbx.id, options=("-T",), input=b"x=4\necho $((x + 1))\nexit 7\n")
    assert (done.returncode, done.stdout) == (7, b"5\n"), done.stderr


def test_locale_is_taken_over_and_other_variables_are_not(ssh: Client, sbx: Sandbox) -> None:
    options = ("-o", "SetEnv=LC_TEST=here LD_PRELOAD=/evil")
    done = ssh.run(sbx.id, 'echo "$LC_TEST" "${LD_PRELOAD-none}"', options=options)
    assert done.stdout == b"here none\n"


def test_another_user_is_named_after_a_plus(ssh: Client, sbx: Sandbox) -> None:
    assert ssh.run(f"{sbx.id}+daemon", "whoami").stdout == b"daemon\n"
    done = ssh.run(f"{sbx.id}+nosuchuser", "true")
    assert done.returncode == 255
    assert b"nosuchuser" in done.stderr


def test_many_channels_share_one_connection(ssh: Client, sbx: Sandbox, tmp_path: Path) -> None:
    master = (*("-o", f"ControlPath={tmp_path / 'c'}"), *("-o", "ControlMaster=auto"), *("-o", "ControlPersist=60"))
    subprocess.run(ssh.command(sbx.id, "true", options=master), stdin=subprocess.DEVNULL, check=True, timeout=30)
    try:
        running = [
            subprocess.Popen(ssh.command(sbx.id, f"read x; echo {n}$x", options=master), stdin=-1, stdout=-1)
            for n in range(8)
        ]
        for n, one in enumerate(running):
            assert one.communicate(b"!\n", timeout=30)[0] == f"{n}!\n".encode()
    finally:
        subprocess.run(ssh.command(sbx.id, options=(*master, "-O", "exit")), capture_output=True)


def test_a_client_that_goes_away_hangs_up(ssh: Client, sbx: Sandbox) -> None:
    process = subprocess.Popen(ssh.command(sbx.id, "echo $$; sleep 300"), stdout=-1)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    _until(lambda: not Path(f"/proc/{pid}").exists() or "sleep" not in Path(f"/proc/{pid}/cmdline").read_text())


class Screen:
    def __init__(self, command: list[str]) -> None:
        self.ours, theirs = pty.openpty()
        self._seen = b""
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color"},
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )
        os.close(theirs)

    def resize(self, rows: int, cols: int) -> None:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, text: bytes) -> None:
        os.write(self.ours, text)

    def see(self, text: bytes, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while text not in self._seen:
            ready, _, _ = select.select([self.ours], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{text!r} was not printed: {self._seen!r}"
            self._seen += os.read(self.ours, 65536)
        self._seen = self._seen.partition(text)[2]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)


@pytest.fixture
def screen() -> Iterator[Callable[[list[str]], Screen]]:
    with contextlib.ExitStack() as stack:

        def opened(command: list[str]) -> Screen:
            made = Screen(command)
            stack.callback(made.close)
            return made

        yield opened


def test_a_shell_has_a_terminal_with_size_signals_and_exit_code(
    ssh: Client, sbx: Sandbox, screen: Callable[[list[str]], Screen]
) -> None:
    shell = screen(ssh.command(sbx.id))
    shell.type(b"tty; echo $TERM\n")
    shell.see(b"/dev/pts/")
    shell.see(b"xterm-256color")
    shell.resize(20, 60)
    os.kill(shell.process.pid, signal.SIGWINCH)
    shell.type(b"while [ \"$(stty size)\" != '20 60' ]; do sleep 0.05; done; echo re''sized\n")
    shell.see(b"resized")
    shell.type(b"PS1='>> '; sh -c 'echo u\"\"p; exec cat'\n")
    shell.see(b"up\r\n")
    shell.type(b"\x03")
    shell.see(b">> ")
    shell.type(b"echo status $?; exit 5\n")
    shell.see(b"status 130")
    assert shell.process.wait(20) == 5


def test_a_session_ends_with_a_message_when_its_sandbox_is_deleted(
    ssh: Client, fy: Forkyard, screen: Callable[[list[str]], Screen]
) -> None:
    sandbox = fy.sandboxes.create()
    shell = screen(ssh.command(sandbox.id))
    shell.type(b"echo he''re\n")
    shell.see(b"here")
    sandbox.delete()
    shell.see(b"has ended (deleted_by_user)")
    assert shell.process.wait(20) == 255


def test_a_session_outlives_a_sleep_and_a_key_wakes_the_sandbox(
    ssh: Client, daemon: SshDaemon, fy: Forkyard, screen: Callable[[list[str]], Screen]
) -> None:
    with fy.sandboxes.create() as sandbox:
        shell = screen(ssh.command(sandbox.id))
        shell.type(b"x=5; echo he''re\n")
        shell.see(b"here")
        _until(lambda: daemon.idle_s(sandbox.id) > 0.2)  # open, and yet idle
        sandbox.pause()
        shell.type(b"echo x is $x\n")
        shell.see(b"x is 5")
        assert sandbox.refresh().state == "running"


def test_login_wakes_a_paused_sandbox(ssh: Client, fy: Forkyard) -> None:
    with fy.sandboxes.create() as sandbox:
        sandbox.pause()
        assert ssh.run(sandbox.id, "echo up").stdout == b"up\n"
        assert sandbox.refresh().state == "running"


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("protocol", ["-s", "-O"])
def test_scp_copies_both_ways(ssh: Client, sbx: Sandbox, tmp_path: Path, protocol: str) -> None:
    data = os.urandom(5_000_000)
    (tmp_path / "a").write_bytes(data)
    scp = ["scp", "-q", protocol, *ssh.options, "-P", str(ssh.port)]
    there = f"{sbx.id}@127.0.0.1:{tmp_path}"
    subprocess.run([*scp, str(tmp_path / "a"), f"{there}/b"], check=True, timeout=60)
    subprocess.run([*scp, f"{there}/b", str(tmp_path / "c")], check=True, timeout=60)
    assert (tmp_path / "c").read_bytes() == data
    missing = subprocess.run([*scp, f"{there}/none", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert missing.returncode != 0
    assert "No such file" in missing.stderr


def test_sftp_lists_renames_and_removes(ssh: Client, sbx: Sandbox, tmp_path: Path) -> None:
    batch = f"cd {tmp_path}\nmkdir d\nput {ssh.key} d/k\nrename d/k d/l\nchmod 600 d/l\nls -l d\n"
    done = subprocess.run(
        ["sftp", "-b", "-", *ssh.options, "-P", str(ssh.port), f"{sbx.id}@127.0.0.1"],
        input=batch,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "-rw-------" in done.stdout
    assert (tmp_path / "d" / "l").read_bytes() == ssh.key.read_bytes()


# ── ports ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def _until(true: Callable[[], bool], seconds: float = 10) -> None:
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


def _exchange(port: int, data: bytes) -> bytes:
    answer = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as one:
        sending = threading.Thread(target=lambda: (one.sendall(data), one.shutdown(socket.SHUT_WR)))
        sending.start()
        while piece := one.recv(65536):
            answer += piece
        sending.join()
    return bytes(answer)


@contextlib.contextmanager
def _tunnel(ssh: Client, sandbox: Sandbox, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = ssh.command(sandbox.id, options=("-N", "-o", "ExitOnForwardFailure=yes", *options))
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_local_forwarding_carries_bytes_both_ways_at_once(ssh: Client, sbx: Sandbox, echo: int) -> None:
    local, data = _free_port(), os.urandom(4_000_000)
    with _tunnel(ssh, sbx, "-L", f"{local}:localhost:{echo}"):
        _until(lambda: _listens(local))
        assert _exchange(local, data) == data
        assert _exchange(local, b"again") == b"again"


def test_an_editor_s_way_a_script_by_standard_input_and_a_socks_proxy_beside_it(
    ssh: Client, sbx: Sandbox, echo: int
) -> None:
    local = _free_port()
    process = subprocess.Popen(ssh.command(sbx.id, "bash", options=("-T", "-D", str(local))), stdin=-1, stdout=-1)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"echo started on $(uname -s)\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"started on Linux\n"
    with socket.create_connection(("127.0.0.1", local), timeout=20) as one:
        one.sendall(b"\5\1\0")
        assert one.recv(2) == b"\5\0"
        one.sendall(b"\5\1\0\1\x7f\0\0\1" + echo.to_bytes(2, "big"))
        assert one.recv(10)[:2] == b"\5\0"
        one.sendall(b"through")
        assert one.recv(7) == b"through"
    assert process.communicate(b"exit 6\n", timeout=20) == (b"", None)
    assert process.returncode == 6


def test_what_comes_in_by_ssh_is_counted(ssh: Client, fy: Forkyard, echo: int) -> None:
    with fy.sandboxes.create() as sandbox:
        assert ssh.run(sandbox.id, "cat", input=bytes(30_000)).stdout == bytes(30_000)
        used = sandbox.usage()
        assert (used.ingress_bytes_in, used.ingress_bytes_out) == (30_000, 30_000)
        local = _free_port()
        with _tunnel(ssh, sandbox, "-L", f"{local}:localhost:{echo}"):
            _until(lambda: _listens(local))
            assert _exchange(local, bytes(20_000)) == bytes(20_000)
        used = sandbox.usage()
        assert (used.ingress_bytes_in, used.ingress_bytes_out) == (50_000, 50_000)


def test_only_ports_of_the_sandbox_itself_are_forwarded(ssh: Client, sbx: Sandbox, echo: int) -> None:
    done = ssh.run(sbx.id, options=("-W", f"192.0.2.1:{echo}"))
    assert b"only ports of the sandbox itself" in done.stderr
    done = ssh.run(sbx.id, options=("-W", f"localhost:{_free_port()}"))
    assert b"nothing listens" in done.stderr


def test_remote_forwarding_and_agents_are_refused(ssh: Client, sbx: Sandbox) -> None:
    done = ssh.run(sbx.id, "echo ${SSH_AUTH_SOCK-none}", options=("-v", "-A", "-R", f"{_free_port()}:localhost:1"))
    assert b"remote port forwarding failed" in done.stderr
    assert done.stdout == b"none\n"
    assert done.stderr.count(b"ports of a sandbox are not forwarded to the client (-R)") == 2  # one only for `-v`


def test_a_unix_socket_of_the_guest_is_forwarded(ssh: Client, sbx: Sandbox, tmp_path: Path) -> None:
    path, local = tmp_path / "s", _free_port()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with _tunnel(ssh, sbx, "-L", f"{local}:{path}"):
            _until(lambda: _listens(local))
            server.settimeout(10)
            server.accept()[0].close()  # the knock of `_listens`
            with socket.create_connection(("127.0.0.1", local), timeout=20) as near:
                far = server.accept()[0]
                with far:
                    near.sendall(b"hello")
                    assert far.recv(5) == b"hello"
                    far.sendall(b"bye")
                assert near.recv(3) == b"bye"
                assert near.recv(1) == b""


# ── `forkyard ssh`, `forkyard port`, SDK ─────────────────────────────────────────────────────────────────────────


def test_forkyard_ssh_needs_nothing_set_up(daemon: SshDaemon, sbx: Sandbox, tmp_path: Path) -> None:
    env = {**daemon.env, "XDG_CONFIG_HOME": str(tmp_path)}

    def cli(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "forkyard.cli", *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)

    done = cli("ssh", "ssh", "--", "echo", "a | b", "$HOME")
    assert (done.returncode, done.stdout) == (0, "a | b $HOME\n"), done.stderr
    assert cli("ssh", sbx.id[:8], "exit 4").returncode == 4
    (tmp_path / "config").write_text(cli("ssh", sbx.id, "--config").stdout)
    words = ["ssh", "-F", str(tmp_path / "config"), "ssh", "echo via config"]
    assert subprocess.run(words, capture_output=True, text=True, timeout=30).stdout == "via config\n"
    shown = json.loads(cli("ssh", sbx.id, "--json").stdout)
    assert (shown["user"], shown["port"]) == (sbx.id, daemon.port_of_ssh)
    (key,) = [
        key for key in json.loads(cli("ssh-keys", "ls", "--json").stdout) if key["name"].startswith("forkyard ssh")
    ]
    assert cli("ssh-keys", "rm", key["id"]).returncode == 0
    assert key["id"] not in cli("ssh-keys", "ls").stdout
    added = cli("ssh-keys", "add", str(tmp_path / "forkyard" / "ssh" / "id_ed25519.pub"))
    assert added.stdout.strip() in cli("ssh-keys", "ls").stdout


def test_forkyard_port_forwards_until_it_is_ended(daemon: SshDaemon, sbx: Sandbox, echo: int) -> None:
    command = [sys.executable, "-m", "forkyard.cli", "--url", daemon.url, "--api-key", daemon.key, "port", sbx.id]
    process = subprocess.Popen([*command, str(echo), "--json"], stdout=-1, text=True)
    assert process.stdout is not None
    shown = json.loads(process.stdout.readline())
    assert shown["guest_port"] == echo
    data = os.urandom(3_000_000)
    assert _exchange(shown["port"], data) == data
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    process.stdout.close()
    refused = subprocess.run([*command, "70000"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "PORT:LOCAL" in refused.stderr


def test_forward_of_the_sdk(fy: Forkyard, sbx: Sandbox, echo: int) -> None:
    with sbx.forward(echo) as forward:
        assert _exchange(forward.port, b"hello") == b"hello"
        with pytest.raises(Conflict, match="another local port"):
            sbx.forward(echo, local_port=forward.port).open()
    assert not _listens(forward.port if forward._listener else 1)
    with sbx.forward(_free_port()) as closed:
        assert _exchange(closed.port, b"hello") == b""
        _until(lambda: isinstance(closed.error, PortClosed))


def test_forward_of_the_async_sdk_wakes_and_outlives_a_hot_pause(daemon: SshDaemon, echo: int) -> None:
    from forkyard import AsyncForkyard

    async def session() -> None:
        async with (
            AsyncForkyard(socket=daemon.socket, key_file=daemon.key_file) as fy,
            await fy.sandboxes.create() as sandbox,
            sandbox.forward(echo) as forward,
        ):
            await sandbox.pause()
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.port)
            writer.write(b"one")
            assert await reader.readexactly(3) == b"one"
            await sandbox.pause()
            writer.write(b"two")
            assert await reader.readexactly(3) == b"two"
            assert (await sandbox.refresh()).state == "running"
            writer.close()
            await writer.wait_closed()

    asyncio.run(asyncio.wait_for(session(), 60))


@pytest.mark.parametrize("port", ["0", "70000", "x", "-1", "١"])
def test_a_port_that_is_none_is_refused_by_name(daemon: SshDaemon, sbx: Sandbox, port: str) -> None:
    from urllib.parse import quote

    from websockets.sync.client import connect

    url = f"ws://127.0.0.1:{daemon.port}/api/v1/sandboxes/{sbx.id}/ports/{quote(port)}?key={daemon.key}"
    with connect(url) as one:
        problem = json.loads(one.recv())["problem"]
    assert problem["code"] == "invalid_request"
    assert "1 to 65535" in problem["detail"]
