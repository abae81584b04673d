"""Every command line that a page shows is one that the command line understands."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import click
import pytest

from forkyard.cli.root import cli

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")), "README.md"]


def words_of(line: str) -> list[str]:
    """Up to another program, or to the explanation."""
    words = shlex.shlex(re.split(r"\s{2,}", line)[0], posix=True, punctuation_chars="|<>&;")
    words.whitespace_split, words.commenters = True, ""
    return list(itertools.takewhile(lambda word: word[0] not in "|<>&;#", words))


def shown(page: str) -> list[str]:
    lines, fence = [], None
    for line in (ROOT / page).read_text().splitlines():
        if line.startswith("```"):
            fence = line[3:] if fence is None else None
        elif fence in ("", "console", "sh", "bash") and (found := re.match(r"(?:\$ )?forkyard (.*)", line)):
            lines.append(found[1])
    return lines


@pytest.mark.parametrize("page", [page for page in PAGES if shown(page)])
def test_the_commands_of_a_page_are_there_with_their_options(page: str) -> None:
    for line in shown(page):
        command: click.Command = cli
        context = click.Context(cli, info_name="forkyard")
        words = words_of(line)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            found = command.get_command(context, words[0])
            if found is None:
                break
            command, context = found, click.Context(found, context, words.pop(0))
        try:
            rest = command.make_parser(context).parse_args(words)[1]
        except click.UsageError as error:
            pytest.fail(f"{page}: `forkyard {line}`: {error.message}")
        # Others than these have a default.
        assert not (type(command) is click.Group and rest), (
            f"{page}: `forkyard {line}`: there is no command {rest[0]!r}"
        )
