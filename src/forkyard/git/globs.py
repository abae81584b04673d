"""Globs of branches, tags and paths. Pure.

`*` and `?` stay within one part (between slashes), `**` spans any number of parts, `[a-z]` is one of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(pattern: str, name: str) -> bool:
    """Takes time in proportion to both lengths at most, whatever they hold."""
    parts = name.split("/")
    #: How many of the parts the pattern so far can have taken.
    taken = {0}
    for piece in pattern.split("/"):
        if piece == "**":
            taken = set(range(min(taken), len(parts) + 1))
        else:
            taken = {at + 1 for at in taken if at < len(parts) and fnmatchcase(parts[at], piece)}
        if not taken:
            return False
    return len(parts) in taken


def any_matches(patterns: Iterable[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)
