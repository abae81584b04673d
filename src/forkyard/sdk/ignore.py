"""`.dockerignore`: which files of a context stay behind. No I/O.

The last pattern that matches decides; `!` takes a file back in; `**` stands for any number of directories.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from functools import cache


class Ignore:
    def __init__(self, text: str) -> None:
        self._patterns: list[tuple[bool, re.Pattern[str]]] = []
        for line in text.splitlines():
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            takes_in = line.startswith("!")
            pattern = posixpath.normpath(line.removeprefix("!").strip().lstrip("/"))
            if pattern != ".":
                self._patterns.append((takes_in, _compiled(pattern)))

    @property
    def takes_in(self) -> bool:
        """Whether files of a directory that is left out may be taken in again."""
        return any(takes_in for takes_in, _ in self._patterns)

    def leaves_out(self, path: str) -> bool:
        """A path relative to the context. What lies below something left out is left out too."""
        left_out = False
        for takes_in, pattern in self._patterns:
            if left_out == takes_in and pattern.match(path):
                left_out = not takes_in
        return left_out


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("/".join(_parts(pattern.split("/"))).replace("(?:.*/)?/", "(?:.*/)?") + r"(?:/.*)?\Z", re.DOTALL)


def _parts(parts: Sequence[str]) -> list[str]:
    found = []
    for at, part in enumerate(parts):
        if part == "**":
            found.append("(?:.*/)?" if at + 1 < len(parts) else ".*")
        else:
            found.append(_glob(part))
    return found


def _glob(part: str) -> str:
    out, at = "", 0
    while at < len(part):
        char = part[at]
        at += 1
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "\\" and at < len(part):
            out += re.escape(part[at])
            at += 1
        elif char == "[" and "]" in part[at + 1 :]:
            end = part.index("]", at + 1)
            inside = part[at:end].replace("\\", "\\\\")
            out += "[" + ("^" + inside[1:] if inside[0] in "^!" else inside) + "]"
            at = end + 1
        else:
            out += re.escape(char)
    return out
