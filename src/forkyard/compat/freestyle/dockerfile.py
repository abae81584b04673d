"""The base image of a spec: the text of a Dockerfile, as commands for a Debian machine. Pure.

A machine is not an image. `RUN`, `ENV`, `WORKDIR` and `USER` are done; what only says how a container is started is left
out; what needs files of the client's is refused.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from forkyard.compat.freestyle.errors import Refused

_BASE = re.compile(r"(docker\.io/)?(library/)?debian(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]{64})?")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_][A-Za-z0-9_]*)\1\s*$")
_LEFT_OUT = frozenset({"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "HEALTHCHECK", "MAINTAINER", "STOPSIGNAL", "VOLUME"})


@dataclass(frozen=True)
class Instruction:
    """`run`: a command. `env`, `workdir`, `user`: of those that follow."""

    kind: str
    value: str
    env: tuple[tuple[str, str], ...] = ()


def instructions(text: str) -> list[Instruction]:
    found: list[Instruction] = []
    for word, rest in _statements(text):
        if word == "FROM":
            image = rest.split()[0] if rest.split() else ""
            if _BASE.fullmatch(image) is None:
                raise _wrong(f"FROM {image[:100]}: machines are Debian; the base of an image is debian")
        elif word == "RUN":
            found.append(Instruction("run", _command(rest)))
        elif word == "SHELL" or word in _LEFT_OUT:
            continue
        elif word in ("ENV", "ARG"):
            found.append(Instruction("env", rest, tuple(_pairs(rest, word))))
        elif word in ("WORKDIR", "USER"):
            found.append(Instruction(word.lower(), rest))
        else:
            raise _wrong(f"{word[:40]} cannot be done here; a base image has FROM, RUN, ENV, ARG, WORKDIR and USER")
    return found


def _statements(text: str) -> Iterator[tuple[str, str]]:
    lines = iter(text.splitlines())
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        statement = line.strip()
        while statement.endswith("\\"):
            following = next(lines, None)
            if following is None:
                raise _wrong("the last line ends with a backslash")
            if not following.lstrip().startswith("#"):
                statement = f"{statement[:-1]}\n{following.rstrip()}"
        word, _, rest = statement.partition(" ")
        marker = _HEREDOC.search(rest) if word.upper() == "RUN" else None
        if marker is not None:
            yield "RUN", f"{rest[: marker.start()]}{_heredoc(lines, marker[2])}".strip()
        else:
            yield word.upper(), rest.strip()


def _heredoc(lines: Iterator[str], end: str) -> str:
    body: list[str] = []
    for line in lines:
        if line.strip() == end:
            return "\n".join(body)
        body.append(line)
    raise _wrong(f"a here-document has no end: {end} is missing")


def _command(rest: str) -> str:
    while rest.startswith("--"):  # --mount and the like: there is nothing of the kind here
        rest = rest.partition(" ")[2].strip()
    if rest.startswith("["):
        try:
            words = json.loads(rest)
        except (ValueError, RecursionError):
            return rest
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            return shlex.join(words)
    return rest


def _pairs(rest: str, word: str) -> Iterator[tuple[str, str]]:
    try:
        words = shlex.split(rest)
    except ValueError:
        raise _wrong(f"{word} {rest[:100]}: a quote is not closed") from None
    if words and "=" not in words[0]:
        if word == "ENV" and len(words) > 1:
            yield words[0], rest.split(None, 1)[1]
        return
    for pair in words:
        name, _, value = pair.partition("=")
        yield name, value


def _wrong(message: str) -> Refused:
    return Refused(400, "CREATE_VM_BAD_REQUEST", f"baseImage: {message}")
