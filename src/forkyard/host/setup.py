"""`python -m forkyard.host.setup`: builds what the first sandbox would otherwise wait for, and shows how far it is.

Builds the base image and the template of the default shape into the cache, then exits. When both exist it only checks.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time

from forkyard.daemon import local_host, prepare_directories
from forkyard.errors import ForkyardError
from forkyard.models import Shape
from forkyard.settings import Settings
from forkyard.telemetry.log import configure

REPEAT_S = 10.0


class TerminalProgress:
    """One line that changes on a terminal; elsewhere a line for each new step, and one now and then within it."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._tty = sys.stdout.isatty()
        self._step = ""
        self._fraction: float | None = None
        self._printed = ("", 0.0)

    def __call__(self, step: str, fraction: float | None = None) -> None:
        self._step, self._fraction = step, fraction
        self.refresh()

    def refresh(self) -> None:
        now = time.monotonic()
        headline = self._step.partition(":")[0]
        if not self._step or (not self._tty and self._printed[0] == headline and now - self._printed[1] < REPEAT_S):
            return
        self._printed = (headline, now)
        percent = "" if self._fraction is None else f" {self._fraction:.0%}"
        text = f"  … {self._step}{percent} ({now - self._started:.0f} s)"
        print(
            f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}" if self._tty else f"{text}\n",
            end="",
            flush=True,
        )

    def done(self, text: str) -> None:
        print(("\r\033[K" if self._tty else "") + f"  ✓ {text} ({time.monotonic() - self._started:.0f} s)", flush=True)

    async def tick(self) -> None:
        """Keeps the elapsed time going while a step has nothing to say."""
        while True:
            await asyncio.sleep(1)
            self.refresh()


async def main() -> None:
    settings = Settings()
    configure("warning")
    prepare_directories(settings)
    progress = TerminalProgress()
    ticking = asyncio.create_task(progress.tick())
    try:
        host = await local_host(settings, progress)
        key = await host.templates.build(Shape(), progress)
    finally:
        ticking.cancel()
    progress.done(f"template {key} is ready ({host.accel})")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ForkyardError as error:
        sys.exit(f"\n  ✗ {error.message}")
    except KeyboardInterrupt:
        sys.exit("\n  interrupted; nothing is left behind")
