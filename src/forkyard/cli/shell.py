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

_REATTACH_S = 30.0


@click.command("shell", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.option("--user", "-u", default="root", show_default=True, help="Whose login shell.")
@click.option("--cwd", "-w", help="Where. Default: the user's home.")
@click.option("--attach", "exec_id", metavar="EXEC", help="The terminal of a command that runs already (see ps).")
@pass_app
@click.pass_context
def shell_command(
    ctx: click.Context, app: App, sandbox_id: str, user: str, cwd: str | None, exec_id: str | None
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
    user: str,
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
    return max(1, size.lines), max(1, size.columns)


class _Session:
    """Main thread: what the terminal prints. Second thread: what is typed, and changes of the window's size."""

    def __init__(self, connect: Callable[[str | None, int, int, int], Terminal], exec_id: str | None) -> None:
        self._connect = connect
        self._exec_id = exec_id
        self._terminal: Terminal | None = None
        # Signals arrive in the main thread, which may be anywhere inside the web socket: it only rings this bell.
        self._bell_out, self._bell_in = os.pipe()

    def run(self) -> int:
        from forkyard.cli.execs import exit_status

        typing = threading.Thread(target=self._type, daemon=True, name="forkyard-typing")
        try:
            with _raw_mode(), self._window_changes():
                typing.start()
                self._print_until_end()
        finally:
            os.close(self._bell_in)
            if typing.is_alive():
                typing.join(timeout=1)
        end = self._terminal.end if self._terminal else None
        return exit_status(end.exit_code, end.signal, end.timed_out) if end else 1

    def _print_until_end(self) -> None:
        from forkyard.errors import DaemonUnreachable, ForkyardError

        gives_up_at: float | None = None
        while True:
            try:
                offset = self._terminal.offset if self._terminal else 0
                with self._connect(self._exec_id, offset, *_window()) as terminal:
                    self._terminal, self._exec_id, gives_up_at = terminal, terminal.exec_id, None
                    for data in terminal:
                        _write_all(1, data)
                    return
            except ForkyardError as error:
                lost = isinstance(error, DaemonUnreachable) or error.retryable
                now = time.monotonic()
                if gives_up_at is None and self._exec_id is not None and lost:
                    gives_up_at = now + _REATTACH_S
                    _write_all(2, b"\r\n[connection lost; attaching again]\r\n")
                if gives_up_at is None or now > gives_up_at or not lost:
                    raise
                time.sleep(0.5)

    def _type(self) -> None:
        from forkyard.errors import ForkyardError

        while True:
            ready, _, _ = select.select([0, self._bell_out], [], [])
            # What is typed while the connection is lost has nowhere to go, hence the suppressed errors.
            if self._bell_out in ready:
                if not os.read(self._bell_out, 64):
                    os.close(self._bell_out)
                    return
                with contextlib.suppress(ForkyardError):
                    if self._terminal is not None:
                        self._terminal.resize(*_window())
            if 0 in ready:
                try:
                    typed = os.read(0, 65536)
                except OSError:
                    typed = b""
                if not typed:
                    return
                with contextlib.suppress(ForkyardError):
                    if self._terminal is not None:
                        self._terminal.send(typed)

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
        tty.setraw(0)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, saved)
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
