"""`cp`: files and directories between this machine and a sandbox."""

from __future__ import annotations

import contextlib
import os
import posixpath
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forkyard.cli.app import App, Verb, find_sandbox, interactive, pass_app

if TYPE_CHECKING:
    from forkyard import FileInfo, Sandbox

_LARGE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Remote:
    sandbox: str
    path: str


def parse_place(typed: str) -> Remote | Path:
    """`ID:/path` is in a sandbox. A colon after a slash is part of a local name: `./a:b`."""
    before, colon, path = typed.partition(":")
    if colon and before and "/" not in before:
        return Remote(before, path or ".")
    return Path(typed)


@click.command("cp", cls=Verb, short_help="Copy files and directories to or from a sandbox.")
@click.argument("source", metavar="SOURCE")
@click.argument("destination", metavar="DESTINATION")
@click.option("--user", "-u", help="Who owns what is copied into a sandbox. Default: root.")
@pass_app
def cp_command(app: App, source: str, destination: str, user: str | None) -> None:
    """Copy a file or a directory to a sandbox (cp LOCAL ID:/path) or from it (cp ID:/path LOCAL).

    As with cp -r: a destination that is a directory gets the copy inside it; a directory that does not exist is made.
    """
    from forkyard.errors import InvalidRequest

    origin, target = parse_place(source), parse_place(destination)
    with app.client() as client:
        if isinstance(origin, Path) and isinstance(target, Remote):
            sandbox = find_sandbox(client, target.sandbox)
            where, count = _upload(app, sandbox, origin, target.path, user)
            where = f"{sandbox.id}:{where}"
        elif isinstance(origin, Remote) and isinstance(target, Path):
            where, count = _download(app, find_sandbox(client, origin.sandbox), origin.path, target, destination)
        else:
            raise InvalidRequest(
                "One of SOURCE and DESTINATION must be in a sandbox (ID:/path), and the other on this machine."
            )
    if app.json:
        app.print_json({"destination": where, "bytes": count})


def _upload(app: App, sandbox: Sandbox, source: Path, path: str, user: str | None) -> tuple[str, int]:
    from forkyard.errors import FileConflict, FileMissing

    if not source.exists():
        raise FileMissing(f"There is no {source} on this machine.", path=str(source))
    there = _stat(sandbox, path)
    if (there is not None and there.type == "directory") or path.endswith("/"):
        path = posixpath.join(path, source.absolute().name)
        there = _stat(sandbox, path)
    if source.is_dir() and there is not None and there.type != "directory":
        raise FileConflict(f"{path} in the sandbox is no directory; {source} cannot be copied over it.", path=path)
    total = _local_size(source)
    with _progress(app, f"{source} → {sandbox.id}:{path}", total) as moved:
        count = 0

        def tell(piece: int) -> None:
            nonlocal count
            count += piece
            moved(piece)

        sandbox.files.upload(source, path, user=user, progress=tell)
    return path, count


def _download(app: App, sandbox: Sandbox, path: str, target: Path, typed: str) -> tuple[str, int]:
    from forkyard.errors import FileConflict

    info = sandbox.files.stat(path, follow_symlinks=True)
    if target.is_dir() or typed.endswith("/"):
        target = target / (posixpath.basename(posixpath.normpath(path)) or sandbox.id)
    if info.type == "directory" and target.exists() and not target.is_dir():
        raise FileConflict(f"{target} is no directory; {path} cannot be copied over it.", path=str(target))
    if info.type == "file" and target.is_dir():
        raise FileConflict(f"{target} is a directory; {path} cannot be copied over it.", path=str(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    with _progress(app, f"{sandbox.id}:{path} → {target}", info.size if info.type == "file" else None) as moved:
        count = 0

        def tell(piece: int) -> None:
            nonlocal count
            count += piece
            moved(piece)

        sandbox.files.download(path, target, progress=tell)
    return str(target), count


def _stat(sandbox: Sandbox, path: str) -> FileInfo | None:
    from forkyard.errors import FileMissing

    try:
        return sandbox.files.stat(path, follow_symlinks=True)
    except FileMissing:
        return None


def _local_size(source: Path) -> int:
    if source.is_file():
        return source.stat().st_size
    total = 0
    for directory, _, names in os.walk(source):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(directory) / name).lstat().st_size
    return total


@contextlib.contextmanager
def _progress(app: App, title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar, when somebody looks and it may take a while."""
    if app.json or not interactive() or (total is not None and total < _LARGE_BYTES):
        yield lambda _piece: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda piece: bar.advance(task, piece)
