"""`shell` and `exec -t` in a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

from forkyard import Forkyard, Sandbox

from .sdk_daemon import Daemon


@pytest.fixture(scope="module")
def sbx(daemon: Daemon) -> Iterator[Sandbox]:
    with Forkyard(socket=daemon.socket, key_file=daemon.key_file) as fy, fy.sandboxes.create(name="sh") as sandbox:
        yield sandbox


class Screen:
    """A terminal window with the program in it."""

    def __init__(self, daemon: Daemon, *args: str) -> None:
        self.ours, self._theirs = pty.openpty()
        self.resize(33, 111)
        self.modes = termios.tcgetattr(self._theirs)
        self._seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forkyard.cli", *args],
            env={**daemon.env, "TERM": "xterm-256color"},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def resize(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, text: bytes) -> None:
        os.write(self.ours, text)

    def see(self, text: bytes, seconds: float = 20) -> None:
        """Wait until it was printed after what was seen before."""
        deadline = time.monotonic() + seconds
        while text not in self._seen:
            ready, _, _ = select.select([self.ours], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{text!r} was not printed: {self._seen!r}"
            self._seen += os.read(self.ours, 65536)
        self._seen = self._seen.partition(text)[2]

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self._theirs) == self.modes

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self._theirs)


@pytest.fixture
def open_screen(daemon: Daemon) -> Iterator[Callable[..., Screen]]:
    with contextlib.ExitStack() as stack:

        def open_one(*args: str) -> Screen:
            screen = Screen(daemon, *args)
            stack.callback(screen.close)
            return screen

        yield open_one


def test_shell_has_a_size_takes_control_c_and_gives_its_exit_code(
    open_screen: Callable[..., Screen], sbx: Sandbox
) -> None:
    screen = open_screen("shell", sbx.id)
    screen.type(b"stty size; tty\n")
    screen.see(b"33 111\r\n")
    screen.resize(20, 60)
    screen.type(b"while [ \"$(stty size)\" != '20 60' ]; do sleep 0.05; done; echo re''sized\n")
    screen.see(b"resized\r\n")
    screen.type(b"PS1='>> '; sh -c 'echo u\"\"p; exec cat'\n")
    screen.see(b"up\r\n")
    assert not screen.is_as_before()
    screen.type(b"\x03")
    screen.see(b"^C")
    screen.see(b">> ")
    screen.type(b"echo status $?; exit 5\n")
    screen.see(b"status 130\r\n")
    assert screen.process.wait(20) == 5
    assert screen.is_as_before()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_terminal_is_restored_when_the_program_is_ended(
    open_screen: Callable[..., Screen], sbx: Sandbox, number: signal.Signals
) -> None:
    screen = open_screen("shell", sbx.id)
    screen.type(b"echo he''re\n")
    screen.see(b"here\r\n")
    screen.process.send_signal(number)
    assert screen.process.wait(20) == 128 + number
    assert screen.is_as_before()


def test_an_error_is_shown_and_the_terminal_restored(open_screen: Callable[..., Screen], sbx: Sandbox) -> None:
    screen = open_screen("shell", sbx.id, "--cwd", "/no/such/place")
    screen.see(b"error:")
    assert screen.process.wait(20) == 1
    assert screen.is_as_before()


def test_shell_goes_on_over_a_restart_of_the_daemon(
    open_screen: Callable[..., Screen], daemon: Daemon, sbx: Sandbox
) -> None:
    screen = open_screen("shell", sbx.id)
    screen.type(b"kept=va''lue; echo bef''ore\n")
    screen.see(b"before\r\n")
    daemon.restart()
    screen.see(b"attaching again")
    screen.type(b"echo $kept\n")
    screen.see(b"value\r\n")
    screen.type(b"exit 3\n")
    assert screen.process.wait(20) == 3


def test_exec_with_a_terminal(open_screen: Callable[..., Screen], sbx: Sandbox) -> None:
    screen = open_screen("exec", "-t", "-e", "A=1", sbx.id, "--", "test -t 0 && echo $A $TERM; stty size; exit 6")
    screen.see(b"1 xterm-256color\r\n")
    screen.see(b"33 111\r\n")
    assert screen.process.wait(20) == 6
    assert screen.is_as_before()


def test_shell_without_a_terminal_says_what_to_use_instead(daemon: Daemon, sbx: Sandbox) -> None:
    done = daemon.cli("shell", sbx.id, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "forkyard exec" in done.stderr
