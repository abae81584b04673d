"""A Dockerfile as instructions: lines joined, comments dropped, flags and heredocs taken apart. No I/O.

Owns: the syntax. What an instruction means is `stages`' affair. Whatever is wrong names its line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from forkyard.builds.dockerfile.words import split, words
from forkyard.errors import InvalidDockerfile

INSTRUCTIONS = frozenset(
    [
        "FROM",
        "RUN",
        "COPY",
        "ADD",
        "ENV",
        "WORKDIR",
        "USER",
        "ARG",
        "ENTRYPOINT",
        "CMD",
        "EXPOSE",
        "LABEL",
        "SHELL",
        "VOLUME",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "MAINTAINER",
    ]
)
MAX_INSTRUCTIONS = 500
MAX_FLAGS = 100
_WITH_HEREDOCS = frozenset({"RUN", "COPY", "ADD"})
_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(\S*)$")
_HEREDOC = re.compile(r"([0-9]*)<<(-?)(['\"]?)([A-Za-z_][A-Za-z0-9_.-]*)\3$")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(.*))?$", re.DOTALL)


@dataclass(frozen=True)
class Heredoc:
    word: str  # as it stands in the instruction: `<<-"EOF"`
    name: str
    expands: bool
    content: str
    raw: str  # the lines as they stand, the last included


@dataclass(frozen=True)
class Instruction:
    line: int
    name: str
    rest: str  # what follows the flags
    escape: str
    flags: tuple[tuple[str, str], ...] = ()
    heredocs: tuple[Heredoc, ...] = field(default=())

    def json(self) -> list[str] | None:
        """The exec form, if it is one."""
        if not self.rest.startswith("["):
            return None
        try:
            found = json.loads(self.rest)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, list) and all(isinstance(item, str) for item in found) else None

    def words(self) -> list[str]:
        return split(self.rest, self.escape)

    def wrong(self, why: str) -> InvalidDockerfile:
        return wrong(self.line, f"{self.name}: {why}")


def wrong(line: int, why: str) -> InvalidDockerfile:
    return InvalidDockerfile(f"Dockerfile line {line}: {why}", line=line, field="spec.dockerfile")


def parse(text: str) -> list[Instruction]:
    """All instructions, in their order. `InvalidDockerfile` names the line."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    escape, begin = _directives(lines)
    found = list(_instructions(lines, begin, escape))
    if not found:
        raise wrong(1, "there is no instruction in it; begin with FROM")
    if len(found) > MAX_INSTRUCTIONS:
        raise wrong(found[MAX_INSTRUCTIONS].line, f"more than {MAX_INSTRUCTIONS} instructions are too many")
    return found


def _directives(lines: list[str]) -> tuple[str, int]:
    """The escape character, and where instructions may begin."""
    escape = "\\"
    for number, line in enumerate(lines):
        found = _DIRECTIVE.match(line.strip())
        if found is None or found[1].lower() not in ("syntax", "escape", "check"):
            return escape, number
        if found[1].lower() == "escape":
            if found[2] not in ("\\", "`"):
                raise wrong(number + 1, f"the escape character is \\ or `, not {found[2]!r}")
            escape = found[2]
    return escape, len(lines)


def _instructions(lines: list[str], at: int, escape: str) -> Iterator[Instruction]:
    while at < len(lines):
        if not lines[at].strip() or lines[at].lstrip().startswith("#"):
            at += 1
            continue
        begin = at
        joined, at = _joined(lines, at, escape)
        name, _, rest = joined.strip().partition(" ") if " " in joined.strip() else (joined.strip(), "", "")
        if "\t" in name:
            name, _, more = name.partition("\t")
            rest = f"{more} {rest}".strip()
        upper = name.upper()
        if upper not in INSTRUCTIONS:
            raise wrong(begin + 1, f"unknown instruction {name[:40]!r}; there is {', '.join(sorted(INSTRUCTIONS))}")
        flags, rest = _flags(begin + 1, upper, rest.strip(), escape)
        heredocs: list[Heredoc] = []
        if upper in _WITH_HEREDOCS:
            for word in split(rest, escape):
                if opening := _HEREDOC.match(word):
                    one, at = _heredoc(lines, at, begin, word, opening)
                    heredocs.append(one)
        if not rest:
            raise wrong(begin + 1, f"{upper} needs something after it")
        yield Instruction(begin + 1, upper, rest, escape, tuple(flags), tuple(heredocs))


def _joined(lines: list[str], at: int, escape: str) -> tuple[str, int]:
    """One instruction from its lines, and where the next begins. Comments and empty lines in between do not count."""
    joined = ""
    while at < len(lines):
        line = lines[at]
        at += 1
        if joined and (line.lstrip().startswith("#") or not line.strip()):
            continue
        stripped = line.rstrip()
        if not stripped.endswith(escape):
            return joined + line, at
        joined += stripped[:-1]
        joined = joined or " "
    return joined, at


def _flags(line: int, name: str, rest: str, escape: str) -> tuple[list[tuple[str, str]], str]:
    flags: list[tuple[str, str]] = []
    if name in ("RUN", "COPY", "ADD", "FROM", "HEALTHCHECK"):
        while rest.startswith("--"):
            word = next(words(rest, escape))
            found = _FLAG.match(word)
            if found is None:
                break
            if len(flags) == MAX_FLAGS:
                raise wrong(line, f"{name}: more than {MAX_FLAGS} flags are too many")
            flags.append((found[1], found[2] or ""))
            rest = rest[len(word) :].lstrip()
    return flags, rest


def _heredoc(lines: list[str], at: int, begin: int, word: str, opening: re.Match[str]) -> tuple[Heredoc, int]:
    strips, name = opening[2] == "-", opening[4]
    body: list[str] = []
    for number in range(at, len(lines)):
        line = lines[number].lstrip("\t") if strips else lines[number]
        if line == name:
            content = "".join(f"{one}\n" for one in body)
            raw = "".join(f"{one}\n" for one in lines[at : number + 1])
            return Heredoc(word, name, not opening[3], content, raw), number + 1
        body.append(line)
    raise wrong(begin + 1, f"the heredoc {word} is not closed by a line {name!r}")
