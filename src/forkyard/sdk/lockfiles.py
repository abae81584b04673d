"""What of this machine an `install` step takes along: a lockfile, and what its installer reads beside it.

All of it goes into the spec, its build and its layer, where others read it: so no credential does.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from forkyard.errors import InvalidRequest

#: What else an installer reads, if it stands beside the lockfile.
_BESIDE = ("package.json", "pyproject.toml", ".npmrc", "pnpm-workspace.yaml", ".yarnrc.yml", ".python-version")
#: `-r more.txt`, `-cmore.txt`, `--constraint=more.txt`
_INCLUDES = re.compile(r"\s*(?:-[rc]\s*=?|--(?:requirement|constraint)(?:\s+|=))\s*(\S.*)")
_CREDENTIALS = (
    # In .npmrc, and in .yarnrc.yml. `${TOKEN}` is the name of one.
    (".npmrc", re.compile(r"""^\s*(?:\S*:)?(_authToken|_password|_auth)\s*=\s*["']?(?!\$\{)[^\s"']""", re.M)),
    (".yarnrc.yml", re.compile(r"""^\s*["']?(npmAuthToken|npmAuthIdent)["']?\s*:\s*["']?(?!\$\{)[^\s"']""", re.M)),
    # `user:password@`, or a token alone. `git@` is none.
    ("", re.compile(r"https?://(?!git@)(?:[^/\s:@\"']*:(?!\$\{)[^/\s@\"']+|(?!\$\{)[^/\s:@\"']+)@")),
)


def taken(lockfile: Path, manager: str | None) -> dict[str, Path]:
    """By their paths in the directory of the lockfile."""
    if manager == "pip":
        found = dict(_requirements(lockfile, lockfile.parent))
    else:
        found = {lockfile.name: lockfile}
        found |= {name: path for name in _BESIDE if (path := lockfile.with_name(name)).is_file()}
    for path in found.values():
        _no_credential(path)
    return found


def _requirements(lockfile: Path, top: Path) -> Iterator[tuple[str, Path]]:
    """With those it includes."""
    waiting, seen = [lockfile], set()
    while waiting:
        path = waiting.pop()
        name = os.path.relpath(path, top)
        if name in seen:
            continue
        if name.startswith(".."):
            raise InvalidRequest(
                f"{lockfile} includes {path}, which is not below its directory; bring both in with `add`, and install the "
                "one that is in the machine",
                field="install",
            )
        seen.add(name)
        yield name, path
        for line in re.sub(r"\\\n", " ", _text(path)).splitlines():
            included = _INCLUDES.match(line)
            if included is not None and (words := shlex.split(included[1], comments=True)) and "://" not in words[0]:
                waiting.append(path.parent / words[0])


def _no_credential(path: Path) -> None:
    text = _text(path)
    for name, pattern in _CREDENTIALS:
        found = pattern.search(text) if name in ("", path.name) else None
        if found is not None:
            what = found[1] if name else "a password or token in an address"
            raise InvalidRequest(
                f"{path} has {what}, which would stay in the layer, for all who start from it; write the name of a variable "
                "instead (${NPM_TOKEN}), and give the build a secret of that name: secrets={'NPM_TOKEN': Secret(hosts=[…])}",
                field="install",
            )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="install") from None
