"""The command line. `main` is the `forkyard` program; each noun or verb has its file, imported when it is used."""

from __future__ import annotations


def main() -> None:
    from forkyard.cli.root import cli

    cli()
