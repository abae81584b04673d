"""Commands, shells and files by SSH, with the real OpenSSH client."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forkyard import Forkyard, Sandbox

from . import ssh_yard
from .ssh_yard import Client, SshDaemon, until

daemon, fy, sbx, ssh = ssh_yard.daemon, ssh_yard.fy, ssh_yard.sbx, ssh_yard.ssh


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
    until(lambda: not Path(f"/proc/{pid}").exists() or "sleep" not in Path(f"/proc/{pid}/cmdline").read_text())


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
        until(lambda: daemon.idle_s(sandbox.id) > 0.2)  # open, and yet idle
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
