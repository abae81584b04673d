"""Texts that go to a guest, bounded and without what no program can be given; and the base of all parts of a spec."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StringConstraints

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


def _setting(given: Any) -> Any:
    if isinstance(given, bool):
        return "true" if given else "false"
    return str(given) if isinstance(given, int | float) else given


#: Permission bits that nobody wants, and that are what somebody wants if they are read as octal digits.
_MISREAD = frozenset({400, 440, 444, 500})
_OCTAL = "^(0o?)?[0-7]{3,4}$"
_Bits = Annotated[int, Field(ge=0, le=0o7777)]


def _mode(given: Any) -> Any:
    if isinstance(given, str):
        if re.fullmatch(_OCTAL, given) is None:
            raise ValueError(f"{given!r} is no mode such as '0755'")
        return int(given.removeprefix("0o"), 8)
    digits = str(given)
    if isinstance(given, int) and re.fullmatch("[0-7]{3}", digits) and (given in _MISREAD or given > 0o777):
        raise ValueError(f"the number {given} is {oct(given)} as permission bits; write '0{given}', in quotes")
    return given


#: How the names of systemd's units end.
_KINDS = ("service", "socket", "target", "timer", "path", "mount", "automount", "swap", "slice", "scope", "device")
UNIT_KINDS = tuple(f".{kind}" for kind in _KINDS)


def _without_kind(name: str) -> str:
    if name.endswith(UNIT_KINDS):
        raise ValueError(f"ends with {name[name.rindex('.') :]}, as a unit of systemd; leave that out")
    return name


Text = Annotated[str, StringConstraints(min_length=1, max_length=65536), AfterValidator(_clean)]
Path = Annotated[str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_on_one_line)]
Value = Annotated[str, StringConstraints(max_length=65536), AfterValidator(_clean)]
#: Of an environment variable; numbers and truths are written out.
Setting = Annotated[Value, BeforeValidator(_setting, json_schema_input_type=str | bool | int | float)]
#: Permission bits: text is octal.
Mode = Annotated[_Bits, BeforeValidator(_mode, json_schema_input_type=_Bits | Annotated[str, Field(pattern=_OCTAL)])]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
User = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_.-]{0,31}$")]
ServiceName = Annotated[
    # One that ends with `@` is a pattern for units, and none itself.
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9@:_.-]{0,126}[A-Za-z0-9:_.-])?$"),
    AfterValidator(_without_kind),
]
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
