"""What the runner asks of a language: a process that remembers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time

from .events import Run

#: How long an interrupted kernel may take to come back. Emulated machines are slow.
GRACE_S = 30.0
TICK_S = 0.05


class Missing(Exception):
    """The machine has not what this language needs."""


class Died(Exception):
    """The kernel is gone in the middle of a run."""


class Kernel:
    """A child process in a session of its own, so that an interrupt reaches what the code has started too."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._interrupted_at: float | None = None

    def start(self) -> None:
        """Returns when it can run code."""
        raise NotImplementedError

    def run(self, run: Run) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    def signal(self, number: int) -> None:
        if self.process is not None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                pass

    def mind(self, run: Run) -> None:
        """Called every now and then while `run` goes on: ends it when it must not."""
        if self.process is None or self.process.poll() is not None:
            raise Died(f"the {run.language} kernel ended with status {self.process and self.process.returncode}")
        if run.stopped() is None:
            self._interrupted_at = None
        elif self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
            self.interrupt()
        elif time.monotonic() - self._interrupted_at > GRACE_S:
            self._interrupted_at = None
            raise Died(f"the code did not let itself be interrupted within {GRACE_S:.0f} s; its kernel was ended")


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise Missing(f"the machine has no {name}")
    return found
