"""`shell`, and `exec -t`: a terminal in a sandbox on the terminal we run in."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import click

from forkyard.cli.app import App, Verb, find_sandbox, pass_app

if TYPE_CHECKING:
    from forkyard import Sandbox, Terminal
    from forkyard.models import ExecExit

_REATTACH_S = 30.0


@click.command("shell", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.option("--user", "-u", help="Whose login shell. Default: that of the spec, else root.")
@click.option("--cwd", "-w", help="Where. Default: that of the spec, else the user's home.")
@click.option("--attach", "exec_id", metavar="EXEC", help="The terminal of a command that runs already (see ps).")
@pass_app
@click.pass_context
def shell_command(
    ctx: click.Context, app: App, sandbox_id: str, user: str | None, cwd: str | None, exec_id: str | None
) -> None:
    """Open a terminal in a sandbox: a login shell. Its exit code becomes ours."""
    _need_terminal()
    with app.client() as client:
        sandbox = find_sandbox(client, sandbox_id)

        def connect(attached: str | None, offset: int, rows: int, cols: int) -> Terminal:
            if attached:
                return sandbox.terminal(exec_id=attached, offset=offset, rows=rows, cols=cols)
            return sandbox.terminal(user=user, cwd=cwd, rows=rows, cols=cols)

        ctx.exit(_Session(connect, exec_id).run())


def run_in_terminal(
    sandbox: Sandbox,
    command: str | list[str],
    *,
    cwd: str | None,
    env: dict[str, str],
    user: str | None,
    timeout_s: float | None,
) -> int:
    _need_terminal()
    rows, cols = _window()
    env = {"TERM": os.environ.get("TERM", "xterm-256color"), **env}
    process = sandbox.spawn(
        command, cwd=cwd, env=env, user=user, timeout_s=timeout_s, stdin=True, pty=True, rows=rows, cols=cols
    )

    def connect(attached: str | None, offset: int, rows: int, cols: int) -> Terminal:
        return sandbox.terminal(exec_id=attached, offset=offset, rows=rows, cols=cols)

    return _Session(connect, process.id).run()


def _need_terminal() -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("This needs a terminal. Without one: forkyard exec ID -- COMMAND.")


def _window() -> tuple[int, int]:
    try:
        size = os.get_terminal_size(0)
    except OSError:
        return 24, 80
    # A terminal that does not know its size says 0.
    return size.lines or 24, size.columns or 80


class _Session:
    """Main thread: what the terminal prints. Second thread: what is typed, and changes of the window's size."""

    def __init__(self, connect: Callable[[str | None, int, int, int], Terminal], exec_id: str | None) -> None:
        self._connect = connect
        self._exec_id = exec_id
        self._offset = 0
        self._connected: Terminal | None = None
        # Signals arrive in the main thread, which may be anywhere inside the web socket: it only rings this bell.
        self._bell_out, self._bell_in = os.pipe()

    def run(self) -> int:
        from forkyard.cli.execs import exit_status

        typing = threading.Thread(target=self._type, daemon=True, name="forkyard-typing")
        try:
            with _raw_mode(), self._window_changes():
                typing.start()
                end = self._print_until_end()
        finally:
            os.close(self._bell_in)
            if typing.is_alive():
                typing.join(timeout=1)
        return exit_status(end.exit_code, end.signal, end.timed_out) if end else 1

    def _print_until_end(self) -> ExecExit | None:
        from forkyard.errors import ForkyardError

        gives_up_at: float | None = None
        while True:
            try:
                with self._connect(self._exec_id, self._offset, *_window()) as terminal:
                    self._exec_id, gives_up_at = terminal.exec_id, None
                    self._set_connected(terminal)
                    for data in terminal:
                        self._offset = terminal.offset
                        _write_all(1, data)
                    return terminal.end
            except ForkyardError as error:
                self._set_connected(None)
                now = time.monotonic()
                if self._exec_id is None or not error.retryable or (gives_up_at is not None and now > gives_up_at):
                    raise
                if gives_up_at is None:
                    gives_up_at = now + _REATTACH_S
                    _write_all(2, b"\r\n[connection lost; attaching again]\r\n")
                time.sleep(0.2)

    def _set_connected(self, terminal: Terminal | None) -> None:
        self._connected = terminal
        os.write(self._bell_in, b"c")

    def _type(self) -> None:
        """While there is no connection keys stay where they are, in the queue of our own terminal."""
        from forkyard.errors import ForkyardError

        typing = True
        while True:
            terminal = self._connected
            wanted = [self._bell_out, 0] if terminal is not None and typing else [self._bell_out]
            ready, _, _ = select.select(wanted, [], [])
            # A connection that breaks right now is the main thread's to notice, hence the suppressed errors.
            if self._bell_out in ready:
                if not os.read(self._bell_out, 64):
                    os.close(self._bell_out)
                    return
                if self._connected is not None:
                    with contextlib.suppress(ForkyardError):
                        self._connected.resize(*_window())
            elif terminal is not None:
                typed = _read_some(0)
                typing = bool(typed)
                with contextlib.suppress(ForkyardError):
                    terminal.send(typed)

    @contextlib.contextmanager
    def _window_changes(self) -> Iterator[None]:
        def ring(_number: int, _frame: FrameType | None) -> None:
            os.write(self._bell_in, b"w")

        before = signal.signal(signal.SIGWINCH, ring)
        try:
            yield
        finally:
            signal.signal(signal.SIGWINCH, before)


@contextlib.contextmanager
def _raw_mode() -> Iterator[None]:
    """Every key goes to the sandbox, Ctrl-C too. However we end, short of SIGKILL, the terminal is as it was."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    saved = termios.tcgetattr(0)
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        # Not TCSAFLUSH, which would throw away what was typed ahead.
        tty.setraw(0, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, saved)
        for number, handler in before.items():
            signal.signal(number, handler)


def _read_some(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # the window was closed
        return b""


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
