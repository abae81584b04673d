"""The base image of a spec: a Dockerfile as steps for a Debian machine. Pure.

A machine is not an image. `RUN`, `ENV`, `WORKDIR` and `USER` are done; what only says how a container is started is left
out; what needs files of the client's is refused. How a Dockerfile is read is `builds.dockerfile`'s, and what begins with
other images than Debian's is built by it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from forkyard.builds.dockerfile.instructions import Room, arguments, pairs, put_in, script
from forkyard.builds.dockerfile.parser import parse
from forkyard.compat.freestyle.errors import Refused
from forkyard.errors import InvalidDockerfile

_BASE = re.compile(r"(docker\.io/)?(library/)?debian(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]{64})?")
#: Debian with one of these, which a Debian machine gets by a step.
_RUNTIME = re.compile(
    r"(?:docker\.io/)?(?:(?:library/)?(node|python)|oven/(bun))(?::(?!.*alpine)([A-Za-z0-9._-]+))?(@sha256:[0-9a-f]{64})?"
)
_VERSION = re.compile(r"v?([0-9]+(?:\.[0-9]+){0,2})(?:-|$)")
_REFUSED = frozenset({"COPY", "ADD"})


@dataclass(frozen=True)
class Instruction:
    """`run`: a command. `env`, `workdir`, `user`: of those that follow. `node`, `python`, `bun`: in which version."""

    kind: str
    value: str
    env: tuple[tuple[str, str], ...] = ()


def is_foreign(text: str) -> bool:
    """It begins with another image than Debian's, or has several stages: it is built as images are."""
    try:
        bases = [one.words()[0] for one in parse(text) if one.name == "FROM" and one.words()]
    except InvalidDockerfile as error:
        raise _wrong(error.message) from None
    return len(bases) > 1 or any(_BASE.fullmatch(image) is _RUNTIME.fullmatch(image) is None for image in bases)


def instructions(text: str) -> list[Instruction]:
    try:
        return _understood(text)
    except InvalidDockerfile as error:
        raise _wrong(error.message) from None


def _understood(text: str) -> list[Instruction]:
    if text.rstrip().endswith("\\"):
        raise _wrong("the last line ends with a backslash")
    found: list[Instruction] = []
    variables: dict[str, str] = {}
    room = Room()
    for one in parse(text):
        if one.name == "FROM":
            image = one.words()[0]
            runtime = _RUNTIME.fullmatch(image)
            if runtime is not None:
                version = _VERSION.match(runtime[3] or "")
                found.append(Instruction(runtime[1] or runtime[2], "latest" if version is None else version[1]))
            elif _BASE.fullmatch(image) is None:
                raise _wrong(f"FROM {image[:100]} is not Debian")
        elif one.name == "RUN":  # its flags, --mount and the like, mean nothing here
            words = one.json()
            found.append(Instruction("run", script(one).strip() if words is None else shlex.join(words)))
        elif one.name in ("ENV", "ARG"):
            if one.name == "ARG":
                env = tuple((name, value) for name, value in arguments(one, variables, room) if value is not None)
            else:
                env = tuple((name, put_in(one, value, variables, room)) for name, value in pairs(one))
            variables.update(env)
            found.append(Instruction("env", one.rest, env))
        elif one.name in ("WORKDIR", "USER"):
            found.append(Instruction(one.name.lower(), put_in(one, one.rest, variables, room)))
        elif one.name in _REFUSED:
            raise _wrong(f"{one.name} cannot be done here; a base image has FROM, RUN, ENV, ARG, WORKDIR and USER")
    return found


def _wrong(message: str) -> Refused:
    return Refused(400, "CREATE_VM_BAD_REQUEST", f"baseImage: {message}")
