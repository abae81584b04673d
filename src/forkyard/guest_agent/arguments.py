"""Arguments of a request, checked: each function returns a value of the type it names or raises `invalid_request`."""

from __future__ import annotations

from .failures import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Arguments = dict[str, Any]


def _wrong(name: str, value: object, wanted: str) -> Failure:
    return Failure("invalid_request", f"`{name}` must be {wanted}, not {value!r:.80}")


def text(args: Arguments, name: str) -> str:
    value = args.get(name)
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def optional_text(args: Arguments, name: str) -> str | None:
    return None if args.get(name) is None else text(args, name)


def integer(args: Arguments, name: str, default: int | None = None, *, least: int = 0, most: int = 1 << 63) -> int:
    value = args.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(name, value, f"an integer from {least} to {most}")
    return value


def integers(args: Arguments, name: str, *, most: int) -> list[int]:
    value = args.get(name)
    if not isinstance(value, list):
        raise _wrong(name, value, "a list")
    return [integer({name: one}, name, most=most) for one in value]


def optional_integer(args: Arguments, name: str, *, least: int = 0, most: int = 1 << 63) -> int | None:
    return None if args.get(name) is None else integer(args, name, least=least, most=most)


def optional_seconds(args: Arguments, name: str) -> float | None:
    value = args.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e9:
        raise _wrong(name, value, "a positive number of seconds")
    return float(value)


def flag(args: Arguments, name: str, *, default: bool = False) -> bool:
    value = args.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def texts(args: Arguments, name: str) -> dict[str, str]:
    """An object whose values are strings: an environment."""
    value = args.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise _wrong(name, value, "an object of strings")
    for key, item in value.items():
        if not key or "=" in key or "\0" in key or "\0" in item:
            raise _wrong(name, key, "names without `=`, and no NUL")
    return value


def command(args: Arguments) -> str | list[str]:
    value = args.get("command")
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise _wrong("command", value, "a string or a list of strings that is not empty")
    if any("\0" in word for word in words):
        raise _wrong("command", value, "without NUL")
    return value if isinstance(value, str) else words
