"""Texts that go to a guest, bounded and without what no program can be given; and the base of all parts of a spec."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, StringConstraints

from forkyard.models.base import Request


def _clean(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL, which no program can be given")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair") from None
    return text


def _on_one_line(path: str) -> str:
    if any(ord(char) < 32 or ord(char) == 127 for char in path):
        raise ValueError("holds a control character")
    return _clean(path)


Text = Annotated[str, StringConstraints(min_length=1, max_length=65536), AfterValidator(_clean)]
Path = Annotated[str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_on_one_line)]
Value = Annotated[str, StringConstraints(max_length=65536), AfterValidator(_clean)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
User = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_.-]{0,31}$")]
ServiceName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
#: A service of the spec, or a unit of systemd such as `network-online.target`.
UnitName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9@:_.-]{0,127}$")]
Package = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.+-]*(:[a-z0-9]+)?(=[A-Za-z0-9.+~:-]+)?$", max_length=128)
]
Salt = Annotated[str, StringConstraints(max_length=256), AfterValidator(_clean)]
#: A user and perhaps a group, by name or number, as images name them.
Owner = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\$?(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?$", max_length=80)
]
#: What was uploaded, by its content.
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class Part(Request):
    model_config = ConfigDict(extra="forbid", frozen=True)
