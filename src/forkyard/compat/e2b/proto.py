"""Binary protobuf of envd's two services, to and from the JSON mapping. Pure.

Owns: the schema, and as much of the encoding as it needs. Everything that comes in is a client's: bounded and checked.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Literal

Kind = Literal["string", "bytes", "bool", "uint", "sint", "enum", "message", "map", "time"]


class Malformed(Exception):
    """These bytes, or this value, are no such message."""


class Field:
    def __init__(self, name: str, kind: Kind, *, of: Any = None, repeated: bool = False) -> None:
        self.name = name
        self.kind = kind
        self.of = of  # the schema of a message, or the names of an enum
        self.repeated = repeated


Schema = dict[int, Field]


def _text(*names: str) -> Schema:
    return {number: Field(name, "string") for number, name in enumerate(names, 1)}


_SIGNAL = {0: "SIGNAL_UNSPECIFIED", 9: "SIGNAL_SIGKILL", 15: "SIGNAL_SIGTERM"}
_FILE_TYPE = dict(enumerate(("FILE_TYPE_UNSPECIFIED", "FILE_TYPE_FILE", "FILE_TYPE_DIRECTORY", "FILE_TYPE_SYMLINK")))
_EVENT_TYPE = dict(
    enumerate(f"EVENT_TYPE_{it}" for it in ("UNSPECIFIED", "CREATE", "WRITE", "REMOVE", "RENAME", "CHMOD"))
)
_EMPTY: Schema = {}
_SELECTOR: Schema = {1: Field("pid", "uint"), 2: Field("tag", "string")}
_SIZE: Schema = {1: Field("cols", "uint"), 2: Field("rows", "uint")}
_PTY: Schema = {1: Field("size", "message", of=_SIZE)}
_CONFIG: Schema = {
    1: Field("cmd", "string"),
    2: Field("args", "string", repeated=True),
    3: Field("envs", "map"),
    4: Field("cwd", "string"),
}
_INPUT: Schema = {1: Field("stdin", "bytes"), 2: Field("pty", "bytes")}
_PROCESS: Schema = {1: Field("process", "message", of=_SELECTOR)}
_DATA: Schema = {1: Field("stdout", "bytes"), 2: Field("stderr", "bytes"), 3: Field("pty", "bytes")}
_END: Schema = {
    1: Field("exitCode", "sint"),
    2: Field("exited", "bool"),
    3: Field("status", "string"),
    4: Field("error", "string"),
}
_PROCESS_EVENT: Schema = {
    1: Field("start", "message", of={1: Field("pid", "uint")}),
    2: Field("data", "message", of=_DATA),
    3: Field("end", "message", of=_END),
    4: Field("keepalive", "message", of=_EMPTY),
}
_EVENT: Schema = {1: Field("event", "message", of=_PROCESS_EVENT)}
_INFO: Schema = {1: Field("config", "message", of=_CONFIG), 2: Field("pid", "uint"), 3: Field("tag", "string")}
_ENTRY: Schema = {
    1: Field("name", "string"),
    2: Field("type", "enum", of=_FILE_TYPE),
    3: Field("path", "string"),
    4: Field("size", "uint"),
    5: Field("mode", "uint"),
    6: Field("permissions", "string"),
    7: Field("owner", "string"),
    8: Field("group", "string"),
    9: Field("modifiedTime", "time"),
    10: Field("symlinkTarget", "string"),
    11: Field("metadata", "map"),
    12: Field("isSymlink", "bool"),
}
_ONE_ENTRY: Schema = {1: Field("entry", "message", of=_ENTRY)}
_CHANGE: Schema = {
    1: Field("name", "string"),
    2: Field("type", "enum", of=_EVENT_TYPE),
    3: Field("entry", "message", of=_ENTRY),
}
_WATCH: Schema = {
    1: Field("path", "string"),
    2: Field("recursive", "bool"),
    3: Field("includeEntry", "bool"),
    4: Field("allowNetworkMounts", "bool"),
}
_STREAM_INPUT: Schema = {
    1: Field("start", "message", of=_PROCESS),
    2: Field("data", "message", of={2: Field("input", "message", of=_INPUT)}),
    3: Field("keepalive", "message", of=_EMPTY),
}

REQUESTS: dict[str, Schema] = {
    "process.Process/List": _EMPTY,
    "process.Process/Connect": _PROCESS,
    "process.Process/Start": {
        1: Field("process", "message", of=_CONFIG),
        2: Field("pty", "message", of=_PTY),
        3: Field("tag", "string"),
        4: Field("stdin", "bool"),
    },
    "process.Process/Update": {**_PROCESS, 2: Field("pty", "message", of=_PTY)},
    "process.Process/StreamInput": _STREAM_INPUT,
    "process.Process/SendInput": {**_PROCESS, 2: Field("input", "message", of=_INPUT)},
    "process.Process/SendSignal": {**_PROCESS, 2: Field("signal", "enum", of=_SIGNAL)},
    "process.Process/CloseStdin": _PROCESS,
    "filesystem.Filesystem/Stat": _text("path"),
    "filesystem.Filesystem/MakeDir": _text("path"),
    "filesystem.Filesystem/Move": _text("source", "destination"),
    "filesystem.Filesystem/ListDir": {1: Field("path", "string"), 2: Field("depth", "uint")},
    "filesystem.Filesystem/Remove": _text("path"),
    "filesystem.Filesystem/WatchDir": _WATCH,
    "filesystem.Filesystem/CreateWatcher": _WATCH,
    "filesystem.Filesystem/GetWatcherEvents": _text("watcherId"),
    "filesystem.Filesystem/RemoveWatcher": _text("watcherId"),
}
ANSWERS: dict[str, Schema] = {
    **dict.fromkeys(REQUESTS, _EMPTY),
    "process.Process/List": {1: Field("processes", "message", of=_INFO, repeated=True)},
    "process.Process/Connect": _EVENT,
    "process.Process/Start": _EVENT,
    "filesystem.Filesystem/Stat": _ONE_ENTRY,
    "filesystem.Filesystem/MakeDir": _ONE_ENTRY,
    "filesystem.Filesystem/Move": _ONE_ENTRY,
    "filesystem.Filesystem/ListDir": {1: Field("entries", "message", of=_ENTRY, repeated=True)},
    "filesystem.Filesystem/WatchDir": {
        1: Field("start", "message", of=_EMPTY),
        2: Field("filesystem", "message", of=_CHANGE),
        3: Field("keepalive", "message", of=_EMPTY),
    },
    "filesystem.Filesystem/CreateWatcher": _text("watcherId"),
    "filesystem.Filesystem/GetWatcherEvents": {1: Field("events", "message", of=_CHANGE, repeated=True)},
}

# ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_ENTRY_OF_MAP = _text("key", "value")


def decode(schema: Schema, data: bytes) -> dict[str, Any]:
    message: dict[str, Any] = {}
    for number, value in _pieces(data):
        field = schema.get(number)
        if field is None:
            continue
        varint = field.kind in ("bool", "uint", "sint", "enum")
        if isinstance(value, int) != varint:
            raise Malformed(f"field {field.name} has the wrong type on the wire")
        found = _IN[field.kind](field, value)
        if field.kind == "map":
            message.setdefault(field.name, {})[found.get("key", "")] = found.get("value", "")
        elif field.repeated:
            message.setdefault(field.name, []).append(found)
        else:
            message[field.name] = found
    return message


def _utf8(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Malformed("a string is not UTF-8") from None


_IN: dict[Kind, Callable[[Field, Any], Any]] = {
    "string": lambda _, value: _utf8(value),
    "bytes": lambda _, value: base64.b64encode(value).decode("ascii"),
    "bool": lambda _, value: value != 0,
    "uint": lambda _, value: value,
    "sint": lambda _, value: (value >> 1) ^ -(value & 1),
    "enum": lambda field, value: field.of.get(value, str(value)),
    "message": lambda field, value: decode(field.of, value),
    "map": lambda _, value: decode(_ENTRY_OF_MAP, value),
    "time": lambda _, _value: None,  # no request has one
}


def _pieces(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                value, at = _varint(data, at)
                yield tag >> 3, value
                continue
            case 1:
                length = 8
            case 2:
                length, at = _varint(data, at)
            case 5:
                length = 4
            case _:
                raise Malformed("the message has a wire type that is not served")
        if at + length > len(data):
            raise Malformed("the message ends in the middle of a field")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise Malformed("the message ends in the middle of a number")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return value & (2**64 - 1), at
    raise Malformed("a number has more than ten bytes")


# ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode(schema: Schema, message: dict[str, Any]) -> bytes:
    out = bytearray()
    for number, field in schema.items():
        value = message.get(field.name)
        if value is None:
            continue
        if field.kind == "map":
            pairs = ({"key": name, "value": content} for name, content in value.items())
            for pair in pairs:
                _put(out, number, encode(_ENTRY_OF_MAP, pair))
            continue
        for one in value if field.repeated else [value]:
            _put(out, number, _OUT[field.kind](field, one))
    return bytes(out)


def _put(out: bytearray, number: int, value: int | bytes) -> None:
    if isinstance(value, int):
        out += _number(number << 3) + _number(value)
    else:
        out += _number(number << 3 | 2) + _number(len(value)) + value


def _number(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _from_base64(value: str) -> bytes:
    try:
        return base64.b64decode(value)
    except (ValueError, binascii.Error):
        raise Malformed("not base64") from None


def _time(value: str) -> bytes:
    at = datetime.fromisoformat(value).astimezone(UTC)
    schema: Schema = {1: Field("seconds", "uint"), 2: Field("nanos", "uint")}
    return encode(schema, {"seconds": int(at.timestamp()), "nanos": at.microsecond * 1000})


_OUT: dict[Kind, Callable[[Field, Any], int | bytes]] = {
    "string": lambda _, value: value.encode("utf-8", "replace"),
    "bytes": lambda _, value: _from_base64(value),
    "bool": lambda _, value: int(value),
    "uint": lambda _, value: int(value),
    "sint": lambda _, value: (value << 1) ^ (value >> 63),
    "enum": lambda field, value: next(number for number, name in field.of.items() if name == value),
    "message": lambda field, value: encode(field.of, value),
    "map": lambda _, _value: b"",
    "time": lambda _, value: _time(value),
}
