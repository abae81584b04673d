"""`git branch …`, `git tag …`, `git cherry-pick`, `git archive`: added to the `git` group by `cli.git`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, pass_app


@click.group("branch")
def branch() -> None:
    """Branches of a repository."""


@click.group("tag")
def tag() -> None:
    """Tags of a repository."""


@branch.command("ls", cls=Verb)
@click.argument("repo")
@pass_app
def ls_branches(app: App, repo: str) -> None:
    """List branches."""
    with app.client() as client:
        found = client.git.repo(repo).branches()
    app.print_json(found) if app.json else show.table(("name", "commit"), ((one.name, one.sha[:12]) for one in found))


@branch.command("create", cls=Verb)
@click.argument("repo")
@click.argument("name")
@click.argument("rev", required=False)
@pass_app
def create_branch(app: App, repo: str, name: str, rev: str | None) -> None:
    """Make a branch at REV, or where the default branch is."""
    with app.client() as client:
        made = client.git.repo(repo).create_branch(name, rev)
    app.print_json(made) if app.json else click.echo(made.sha)


@branch.command("rm", cls=Verb)
@click.argument("repo")
@click.argument("name")
@pass_app
def rm_branch(app: App, repo: str, name: str) -> None:
    """Delete a branch."""
    with app.client() as client:
        client.git.repo(repo).delete_branch(name)
    app.print_json({"deleted": [name]}) if app.json else click.echo(name)


@tag.command("ls", cls=Verb)
@click.argument("repo")
@pass_app
def ls_tags(app: App, repo: str) -> None:
    """List tags."""
    with app.client() as client:
        found = client.git.repo(repo).tags()
    app.print_json(found) if app.json else show.table(("name", "commit"), ((one.name, one.sha[:12]) for one in found))


@tag.command("create", cls=Verb)
@click.argument("repo")
@click.argument("name")
@click.argument("rev", required=False)
@click.option("--message", "-m", help="Make it an annotated one.")
@pass_app
def create_tag(app: App, repo: str, name: str, rev: str | None, message: str | None) -> None:
    """Make a tag at REV, or where the default branch is."""
    with app.client() as client:
        made = client.git.repo(repo).create_tag(name, rev, message=message)
    app.print_json(made) if app.json else click.echo(made.sha)


@tag.command("rm", cls=Verb)
@click.argument("repo")
@click.argument("name")
@pass_app
def rm_tag(app: App, repo: str, name: str) -> None:
    """Delete a tag."""
    with app.client() as client:
        client.git.repo(repo).delete_tag(name)
    app.print_json({"deleted": [name]}) if app.json else click.echo(name)


@click.command("cherry-pick", cls=Verb)
@click.argument("repo")
@click.argument("commits", nargs=-1, required=True)
@click.option("--onto", "branch", help="Default: the default branch.")
@pass_app
def cherry_pick(app: App, repo: str, commits: tuple[str, ...], branch: str | None) -> None:
    """Do on a branch what these commits did. Conflicts are named, and nothing changes then."""
    with app.client() as client:
        made = client.git.repo(repo).cherry_pick(commits, branch=branch)
    app.print_json(made) if app.json else click.echo(made.sha)


@click.command("archive", cls=Verb)
@click.argument("repo")
@click.argument("rev", required=False)
@click.option("--output", "-o", metavar="FILE", default="-", help="Default: standard output.")
@click.option(
    "--format", type=click.Choice(["tar", "tar.gz", "zip"]), help="Default: by the name of FILE, else tar.gz."
)
@click.option("--path", help="Only this directory.")
@pass_app
def archive(
    app: App, repo: str, rev: str | None, output: str, format: Literal["tar", "tar.gz", "zip"] | None, path: str | None
) -> None:
    """The files of a revision, as an archive."""
    kind: Literal["tar", "tar.gz", "zip"] = format or (
        "zip" if output.endswith(".zip") else "tar" if output.endswith(".tar") else "tar.gz"
    )
    with app.client() as client:
        pieces = client.git.repo(repo).archive(rev, format=kind, path=path)
        if output == "-":
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            return
        size = 0
        with Path(output).open("wb") as file:
            for piece in pieces:
                size += file.write(piece)
    app.print_json({"file": output, "bytes": size}) if app.json else click.echo(output)
