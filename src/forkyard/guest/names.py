"""File names as text. Linux names are bytes; JSON, URLs and people want text.

A name in UTF-8 is itself. Each byte that is not UTF-8 is shown as one character, U+F780 to U+F7FF (private use), and
becomes that byte again on the way in; so every name makes the round trip, through JSON and URLs. On the wire to the
agent it is Python's surrogateescape, which is also accepted here.
"""

from __future__ import annotations

import re

_SHIFT = 0xF700 - 0xDC00
_SHOWN = re.compile("[\uf780-\uf7ff]")
_TO_WIRE = {code + _SHIFT: code for code in range(0xDC80, 0xDD00)}


def to_wire(name: str) -> str:
    raw = name.translate(_TO_WIRE).encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "surrogateescape")


def from_wire(name: str) -> str:
    """Raises UnicodeEncodeError for text that no name can have become."""
    # A name that really has such a character is shown byte by byte, else it would come back as another.
    name = _SHOWN.sub(lambda found: "".join(chr(0xDC00 + byte) for byte in found.group().encode()), name)
    shown = "".join(chr(ord(char) + _SHIFT) if "\udc80" <= char <= "\udcff" else char for char in name)
    shown.encode("utf-8")
    return shown
