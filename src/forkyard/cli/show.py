"""Tables and times for people. Never decides what is shown, only how."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forkyard import SandboxInfo


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Piped output is never cut or coloured, so that `grep` and `awk` see whole values."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    wide = None if sys.stdout.isatty() else 4096
    grid = Table(box=None, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        grid.add_column(column.upper(), no_wrap=index == 0 or wide is not None)
    for row in rows:
        grid.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    Console(file=sys.stdout, width=wide, highlight=False, soft_wrap=False).print(grid)


STYLES = {
    "running": "green",
    "ok": "green",
    "creating": "cyan",
    "pausing": "cyan",
    "resuming": "cyan",
    "starting": "cyan",
    "stopping": "cyan",
    "paused": "blue",
    "stopped": "yellow",
    "failed": "red",
    "denied": "red",
    "allowed": "green",
    "warning": "yellow",
    "deleted": "dim",
    "deleting": "dim",
}


def cause(info: SandboxInfo) -> str:
    return info.cause.value.replace("_", " ")


def age(since: datetime, now: datetime | None = None) -> str:
    """`12s`, `5m`, `3h`, `2d`: the largest unit that is not zero."""
    seconds = max(0, int(((now or datetime.now(UTC)) - since).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def duration(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def size(count: int) -> str:
    """`812 B`, `3.4 KiB`, `1.2 GiB`."""
    if count < 1024:
        return f"{count} B"
    number = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:.1f} TiB"


#: Of what is there whole elsewhere.
MOST_OF_A_COMMAND = 1000


def command(words: str | list[str]) -> str:
    import shlex

    text = words if isinstance(words, str) else shlex.join(words)
    text = text.replace("\n", "⏎")
    return text if len(text) <= MOST_OF_A_COMMAND else f"{text[: MOST_OF_A_COMMAND - 1]}…"


def fresh_text(before: str, now: str) -> str:
    """What `now` has that `before` had not, both being the end of one growing text."""
    if now.startswith(before):
        return now[len(before) :]
    for start in range(1, len(before)):
        if now.startswith(before[start:]):
            return now[len(before) - start :]
    return now
