"""Answers of the agent, checked and turned into our own types. Pure.

A guest may answer anything; what does not have the promised type and bounds is a `Violation`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, cast

from forkyard.guest.base import Exit, Lost, SocketOwner, Stream
from forkyard.guest.frames import Violation
from forkyard.guest.names import from_wire
from forkyard.models import ExecInfo, FileInfo, FileType, WatchEvent

Record = Mapping[str, Any]

_MAX_TEXT = 65_536
_MAX_COUNT = 1 << 63
_LATEST_NS = 253_402_300_799 * 10**9  # the end of the year 9999
_MAX_TEXTS = 64
_FILE_TYPES = ("file", "directory", "symlink", "other")
_WATCH_TYPES = ("created", "modified", "deleted", "moved", "attributes", "overflow")


def parse(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise Violation("an answer that is not JSON") from None
    if not isinstance(value, dict):
        raise Violation("an answer that is not a JSON object")
    return value


def text(record: Record, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise Violation(f"`{key}` is not a string")
    return value.encode("utf-8", "replace").decode()


def optional_text(record: Record, key: str) -> str | None:
    return None if record.get(key) is None else text(record, key)


def path(record: Record, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise Violation(f"`{key}` is not a path")
    try:
        return from_wire(value)
    except UnicodeEncodeError:
        raise Violation(f"`{key}` is not a path") from None


def optional_path(record: Record, key: str) -> str | None:
    return None if record.get(key) is None else path(record, key)


def integer(record: Record, key: str, *, least: int = 0, most: int = _MAX_COUNT) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Violation(f"`{key}` is not an integer from {least} to {most}")
    return value


def optional_integer(record: Record, key: str, *, least: int = 0, most: int = _MAX_COUNT) -> int | None:
    return None if record.get(key) is None else integer(record, key, least=least, most=most)


def flag(record: Record, key: str) -> bool:
    value = record.get(key)
    if not isinstance(value, bool):
        raise Violation(f"`{key}` is not true or false")
    return value


def number(record: Record, key: str) -> float:
    value = record.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise Violation(f"`{key}` is not a positive number")
    return float(value)


def instant(record: Record, key: str) -> datetime:
    nanoseconds = integer(record, key, least=-_MAX_COUNT)
    return datetime.fromtimestamp(max(0, min(nanoseconds, _LATEST_NS)) / 10**9, UTC)


def file_info(record: Record) -> FileInfo:
    file_path = path(record, "path")
    return FileInfo(
        name=file_path.rstrip("/").rpartition("/")[2] or "/",
        path=file_path,
        type=cast(FileType, _one_of(record, "type", _FILE_TYPES)),
        size=integer(record, "size"),
        mode=integer(record, "mode", most=0o7777),
        owner=text(record, "owner"),
        group=text(record, "group"),
        modified_at=instant(record, "mtime_ns"),
        target=optional_path(record, "target"),
        attributes=_texts(record, "attributes"),
    )


def _texts(record: Record, name: str) -> dict[str, str]:
    """None of an agent that is older than this."""
    found = record.get(name, {})
    if not isinstance(found, dict) or len(found) > _MAX_TEXTS:
        raise Violation(f"`{name}` is no object of at most {_MAX_TEXTS} strings")
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in found.items()):
        raise Violation(f"`{name}` holds what is no string")
    return found


def exec_info(record: Record) -> ExecInfo:
    return ExecInfo(
        id=text(record, "id"),
        command=_command(record),
        cwd=optional_path(record, "cwd"),
        user=text(record, "user"),
        pty=flag(record, "pty"),
        label=optional_text(record, "label"),
        trace_id=optional_text(record, "trace_id"),
        running=flag(record, "running"),
        pid=optional_integer(record, "pid", most=1 << 31),
        exit_code=optional_integer(record, "exit_code", most=255),
        signal=optional_integer(record, "signal", most=127),
        timed_out=flag(record, "timed_out"),
        started_at=instant(record, "started_at_ns"),
        duration_ms=None if record.get("duration_ms") is None else number(record, "duration_ms"),
        stdout_bytes=integer(record, "stdout_bytes"),
        stderr_bytes=integer(record, "stderr_bytes"),
    )


def socket_owner(record: Record) -> SocketOwner | None:
    owner = record.get("owner")
    if owner is None:
        return None
    if not isinstance(owner, dict):
        raise Violation("`owner` is not an object")
    name = optional_text(owner, "process")
    return SocketOwner(
        exec_id=_bounded(optional_text(owner, "exec_id"), 64),
        trace_id=_bounded(optional_text(owner, "trace_id"), 256),
        pid=optional_integer(owner, "pid", most=1 << 31),
        process=None if name is None else "".join(c if c.isprintable() else "?" for c in name[:64]),
    )


def connection(record: Record) -> tuple[str, int]:
    """Its name, and its port in the guest."""
    name = text(record, "name")
    try:
        port = int.from_bytes(bytes.fromhex(name)[1:3])
    except ValueError:
        raise Violation("`name` is not the name of a connection") from None
    if len(name) != 98:
        raise Violation("`name` is not the name of a connection")
    return name, port


def _bounded(value: str | None, most: int) -> str | None:
    if value is not None and len(value) > most:
        raise Violation(f"{value[:20]!r}… is longer than {most}")
    return value


def _command(record: Record) -> str | list[str]:
    value = record.get("command")
    if isinstance(value, list):
        return [text({"command": word}, "command") for word in value]
    return text(record, "command")


def exit_of(record: Record) -> Exit:
    return Exit(
        exit_code=optional_integer(record, "exit_code", most=255),
        signal=optional_integer(record, "signal", most=127),
        timed_out=flag(record, "timed_out"),
        duration_ms=number(record, "duration_ms"),
    )


def lost(record: Record) -> Lost:
    stream = cast(Stream, _one_of(record, "lost", ("stdout", "stderr")))
    return Lost(stream=stream, offset=integer(record, "offset"), count=integer(record, "count", least=1))


def watch_event(record: Record) -> WatchEvent:
    kind = _one_of(record, "type", _WATCH_TYPES)
    return WatchEvent(
        type=cast(Literal["created", "modified", "deleted", "moved", "attributes", "overflow"], kind),
        path=path(record, "path"),
        to=optional_path(record, "to"),
    )


def _one_of(record: Record, key: str, known: tuple[str, ...]) -> str:
    value = record.get(key)
    if value not in known:
        raise Violation(f"`{key}` is none of {', '.join(known)}")
    return cast(str, value)
