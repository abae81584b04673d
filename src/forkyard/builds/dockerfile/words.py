"""Words of a Dockerfile: split at blanks, freed of quotes, variables put in. No I/O.

The rules are those of a shell, without commands: `$NAME`, `${NAME}`, `${NAME:-else}`, `${NAME:+instead}` and
`${NAME:?message}`; nothing is put in between single quotes, or behind the escape character.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

#: Of a value, as all values of a spec are bounded.
MAX_CHARS = 65536
MAX_DEPTH = 16
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]")


class Unbounded(ValueError):
    """More than will ever be taken, whatever variables are known later."""


def split(text: str, escape: str = "\\") -> list[str]:
    """At blanks outside of quotes and braces. Quotes and escapes stay in the words."""
    return list(words(text, escape))


def words(text: str, escape: str = "\\") -> Iterator[str]:
    """Those of `split`, one at a time."""
    word, quote, depth, at = "", "", 0, 0
    while at < len(text):
        char = text[at]
        if char == escape and quote != "'" and at + 1 < len(text):
            word += text[at : at + 2]
            at += 2
            continue
        if text.startswith("${", at):
            depth += 1
        elif char == "}" and depth:
            depth -= 1
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in " \t\n" and not depth:
            if word:
                yield word
            word, at = "", at + 1
            continue
        word += char
        at += 1
    if word:
        yield word


def expand(
    word: str,
    variables: Mapping[str, str],
    escape: str = "\\",
    most_chars: int = MAX_CHARS,
    *,
    quotes: bool = True,
) -> str:
    """Without its quotes, with its variables put in. Where there are no `quotes`, they are text. ValueError if it cannot
    be understood."""
    return _Reading(word, variables, escape, most_chars, quotes).read()


class _Reading:
    def __init__(
        self, text: str, variables: Mapping[str, str], escape: str, most_chars: int, quotes: bool, depth: int = 0
    ) -> None:
        self._text, self._variables, self._escape = text, variables, escape
        self._most_chars, self._quotes, self._depth = most_chars, quotes, depth
        self._at = 0
        if depth > MAX_DEPTH:
            raise Unbounded(f"`${{` stands in more than {MAX_DEPTH} others")

    def read(self) -> str:
        out, quote = "", ""
        text, size = self._text, len(self._text)
        while self._at < size:
            char = text[self._at]
            if char == self._escape and quote != "'" and self._at + 1 < size:
                following = text[self._at + 1]
                # In double quotes only what would mean something is freed of its escape.
                keeps = quote == '"' and following not in ('"', "$", self._escape)
                out += (char if keeps else "") + following
                self._at += 2
            elif char == "$" and quote != "'":
                out += self._variable()
            else:
                if char == quote:
                    quote = ""
                elif self._quotes and not quote and char in "'\"":
                    quote = char
                else:
                    out += char
                self._at += 1
            if len(out) > self._most_chars:
                raise Unbounded(f"with its variables put in it has more than {self._most_chars} characters")
        if quote:
            raise ValueError(f"a quote ({quote}) is not closed")
        return out

    def _variable(self) -> str:
        self._at += 1
        if self._text[self._at : self._at + 1] != "{":
            found = _NAME.match(self._text, self._at)
            if found is None:
                return "$"
            self._at = found.end()
            return self._variables.get(found[0], "")
        found = _NAME.match(self._text, self._at + 1)
        if found is None:
            raise ValueError("`${` is not followed by a name")
        self._at = found.end()
        rest = self._until_brace()
        return self._chosen(found[0], rest)

    def _until_brace(self) -> str:
        depth, begin = 1, self._at
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == self._escape:
                self._at += 1
            elif self._text.startswith("${", self._at):
                depth += 1
            elif char == "}":
                depth -= 1
                if depth == 0:
                    self._at += 1
                    return self._text[begin : self._at - 1]
            self._at += 1
        raise ValueError("`${` is not closed")

    def _chosen(self, name: str, rest: str) -> str:
        value = self._variables.get(name)
        if not rest:
            return value or ""
        empty_counts = rest.startswith(":")
        operator, word = rest[empty_counts : empty_counts + 1], rest[empty_counts + 1 :]
        there = bool(value) if empty_counts else value is not None
        if operator not in ("-", "+", "?") or not operator:
            raise ValueError(f"`${{{name}{rest}}}` is no form I know; there is ${{{name}:-…}}, :+ and :?")
        if operator == "?" and not there:
            raise ValueError(word or f"{name} is not set")
        if operator == "+":
            return self._inner(word) if there else ""
        return (value or "") if there else self._inner(word)

    def _inner(self, word: str) -> str:
        inner = _Reading(word, self._variables, self._escape, self._most_chars, self._quotes, self._depth + 1)
        return inner.read()
