"""`secrets set | ls | rm`."""

from __future__ import annotations

import sys

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, pass_app


@click.group("secrets")
def secrets_command() -> None:
    """Values that sandboxes use without holding them.

    A sandbox made with --secret NAME=HOST has a placeholder in the variable NAME. On its way to HOST, and nowhere else,
    the stored value is put in its place.
    """


@secrets_command.command("set", cls=Verb)
@click.argument("name")
@pass_app
def set_(app: App, name: str) -> None:
    """Store a value: asked for, or read from standard input. Never from the command line, where others could see it."""
    if sys.stdin.isatty():
        value = click.prompt(f"Value of {name}", hide_input=True, err=True)
    else:
        value = sys.stdin.read().removesuffix("\n")
    with app.client() as client:
        info = client.secrets.set(name, value)
    app.print_json(info) if app.json else click.echo(info.name)


@secrets_command.command("ls", cls=Verb)
@pass_app
def ls(app: App) -> None:
    """List stored secrets, without their values."""
    with app.client() as client:
        found = client.secrets.list()
    if app.json:
        app.print_json(found)
        return
    rows = ((info.name, show.age(info.created_at), f"{show.age(info.updated_at)} ago") for info in found)
    show.table(("name", "age", "changed"), rows)


@secrets_command.command("rm", cls=Verb)
@click.argument("name")
@pass_app
def rm(app: App, name: str) -> None:
    """Delete a stored secret. Sandboxes that use it send their placeholder from now on."""
    with app.client() as client:
        client.secrets.delete(name)
    app.print_json({"deleted": [name]}) if app.json else click.echo(name)
