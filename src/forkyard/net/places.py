"""How far each sandbox has come in the recordings it replays.

Owns: a file for each, one short line for each answer that was given before the last, so that a restart of the daemon does
not begin a recording anew in the middle of an evaluation. Never more lines than the recording has answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from pathlib import Path

#: Sandboxes whose place in a recording is remembered; of those that are known at once, and of those on disk.
_SANDBOXES = 1024
_DIRECTORY = "places"


class Places:
    def __init__(self, recordings: Path) -> None:
        self._recordings = recordings
        self._known: OrderedDict[tuple[str, str], Counter[str]] = OrderedDict()

    async def next(self, name: str, sandbox_id: str, question: str, answers: int) -> int:
        """Which of so many answers to this question comes now."""
        places, path = self._known.get((name, sandbox_id)), self._recordings / name / _DIRECTORY / sandbox_id
        if places is None:
            found = await asyncio.to_thread(_read, path)
            places = self._known.setdefault((name, sandbox_id), found)
        self._known.move_to_end((name, sandbox_id))
        while len(self._known) > _SANDBOXES:
            self._known.popitem(last=False)
        place = places[question]
        if place >= answers - 1:
            return answers - 1
        places[question] += 1
        await asyncio.to_thread(_append, path, question)
        return place

    def forget(self, name: str) -> None:
        for key in [key for key in self._known if key[0] == name]:
            del self._known[key]


def _read(path: Path) -> Counter[str]:
    """Whole lines only: the last may be half of one."""
    try:
        text = path.read_text()
    except OSError:
        return Counter()
    return Counter(text[: text.rfind("\n") + 1].splitlines())


def _append(path: Path, question: str) -> None:
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _make_room(path.parent)
    with path.open("a") as file:
        file.write(question + "\n")


def _make_room(directory: Path) -> None:
    with contextlib.suppress(OSError):
        files = sorted(directory.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in files[: max(0, len(files) - _SANDBOXES + 1)]:
            file.unlink(missing_ok=True)
