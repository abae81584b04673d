"""Helper programs (tar, rm, mv, ssh-keygen), run outside any exec, for work that would hold up the loop.

They run in a session of their own beside the agent; what they print on stderr becomes the failure's message.
"""

from __future__ import annotations

import os
import signal

from . import accounts
from .loop import IN, Loop
from .spawn import explain, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_STDERR_BYTES = 4096


class Program:
    """A running helper. `on_exit(status, stderr)` is called once, unless it was stopped."""

    def __init__(
        self,
        loop: Loop,
        argv: list[str],
        on_exit: Callable[[int, str], object],
        *,
        account: accounts.Account | None = None,
        cwd: str = "/",
        stdin: int | None = None,
        stdout: int | None = None,
    ) -> None:
        self._loop = loop
        self._on_exit: Callable[[int, str], object] | None = on_exit
        self._stderr = b""
        account = account or accounts.find("root")
        self._errors, their_errors = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._errors, False)
        try:
            self._process = spawn(
                argv,
                env={**accounts.environment(account), "LC_ALL": "C"},
                cwd=cwd,
                account=account,
                stdin=stdin,
                stdout=their_errors if stdout is None else stdout,
                stderr=their_errors,
            )
        except BaseException:
            os.close(self._errors)
            raise
        finally:
            os.close(their_errors)
        loop.watch(self._errors, IN, self._read_errors)
        loop.watch(self._process.pidfd, IN, self._exited)

    def stop(self) -> None:
        """Kill it; nobody waits for it any more."""
        if self._on_exit is not None:
            self._on_exit = None
            try:
                signal.pidfd_send_signal(self._process.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _read_errors(self, _events: int) -> None:
        if not self._take_errors():
            self._loop.unwatch(self._errors)

    def _take_errors(self) -> bool:
        try:
            data = os.read(self._errors, 65536)
        except BlockingIOError:
            return True
        self._stderr = (self._stderr + data)[:_MAX_STDERR_BYTES]
        return bool(data)

    def _exited(self, _events: int) -> None:
        _, status = os.waitpid(self._process.pid, 0)
        self._loop.unwatch(self._process.pidfd)
        os.close(self._process.pidfd)
        self._take_errors()
        self._loop.unwatch(self._errors)
        os.close(self._errors)
        problem = os.read(self._process.report, 2048)
        os.close(self._process.report)
        on_exit, self._on_exit = self._on_exit, None
        if on_exit is not None:
            stderr = explain(problem).message if problem else self._stderr.decode("utf-8", "replace")
            on_exit(os.waitstatus_to_exitcode(status), stderr)
