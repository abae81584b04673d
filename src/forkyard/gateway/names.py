"""Which sandbox and port a request means: host names, and paths for clients without wildcard names.

    3000-<id>.localhost:7070        3000-<id>.preview.example.com        /s/<id>/3000/…

Pure. What is given is whatever a client sent.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from dataclasses import dataclass

LOCAL_DOMAIN = "localhost"
PATH_PREFIX = b"/s/"

_SANDBOX_ID = re.compile(r"[a-z][a-z0-9]{19}", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_SHOWN = 64


@dataclass(frozen=True)
class Target:
    sandbox_id: str
    port: int


@dataclass(frozen=True)
class Malformed:
    """Meant for us, and wrong. `why` is for people."""

    why: str


@dataclass(frozen=True)
class PathTarget:
    target: Target
    prefix: bytes  # `/s/<id>/<port>`
    rest: bytes  # what the server in the sandbox is asked for; empty if the slash after the prefix is missing


@functools.lru_cache(4096)
def host_name(header: str) -> str:
    """The name in a Host header: lower case, without port, brackets and the dot of the root."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


@functools.lru_cache(4096)
def host_port(header: str) -> int | None:
    """The port in a Host header."""
    _, colon, digits = header.strip().rpartition(":")
    if not colon or digits.endswith("]") or _PORT.fullmatch(digits) is None:
        return None
    return int(digits)


def is_local(name: str) -> bool:
    """A name that nobody can point elsewhere: that of this machine, or an address."""
    if name in ("", LOCAL_DOMAIN) or name.endswith(f".{LOCAL_DOMAIN}"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@functools.lru_cache(4096)
def of_host(name: str, domain: str | None = None) -> Target | Malformed | None:
    """None: no preview. Below `domain` every name is one; below `localhost` those that look like one."""
    if domain is not None and name.endswith(f".{domain}"):
        return _of_label(name.removesuffix(f".{domain}"))
    if name.endswith(f".{LOCAL_DOMAIN}"):
        label = name.removesuffix(f".{LOCAL_DOMAIN}")
        before, dash, after = label.partition("-")
        if dash and (before[:1].isdigit() or not before or _SANDBOX_ID.fullmatch(after)):
            return _of_label(label)
    return None


def of_path(path: bytes) -> PathTarget | Malformed | None:
    if not path.startswith(PATH_PREFIX):
        return None
    parts = path.split(b"/", 4)  # "", "s", id, port, rest
    if len(parts) < 4 or not parts[3]:
        return Malformed("a path of a preview looks like /s/<sandbox id>/<port>/")
    found = _checked(parts[2].decode("latin-1"), parts[3].decode("latin-1"))
    if isinstance(found, Malformed):
        return found
    prefix = b"/".join(parts[:4])
    return PathTarget(found, prefix, path[len(prefix) :])


def _of_label(label: str) -> Target | Malformed:
    port, dash, sandbox_id = label.partition("-")
    if not dash:
        return Malformed(f"{_shown(label)} names no preview; such a name begins with <port>-<sandbox id>")
    return _checked(sandbox_id, port)


def _checked(sandbox_id: str, port: str) -> Target | Malformed:
    if _PORT.fullmatch(port) is None or not 1 <= int(port) <= 65535:
        return Malformed(f"{_shown(port)} is no port; ports are numbers from 1 to 65535")
    if _SANDBOX_ID.fullmatch(sandbox_id) is None:
        return Malformed(f"{_shown(sandbox_id)} is no sandbox id; `forkyard ls` shows those there are")
    return Target(sandbox_id, int(port))


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
