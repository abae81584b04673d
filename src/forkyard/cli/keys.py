"""`keys create | ls | rm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, pass_app

if TYPE_CHECKING:
    from forkyard.models import KeyFormat


@click.group("keys")
def keys_command() -> None:
    """API keys: who may use this daemon."""


@keys_command.command("create", cls=Verb)
@click.argument("name")
@click.option(
    "--format",
    "form",
    type=click.Choice(["forkyard", "e2b", "freestyle"]),
    default="forkyard",
    help="The shape that a client of that service expects.",
)
@pass_app
def create(app: App, name: str, form: KeyFormat) -> None:
    """Make a key and print it. It is shown this once."""
    with app.client() as client:
        made = client.keys.create(name, format=form)
    app.print_json(made) if app.json else click.echo(made.key)


@keys_command.command("ls", cls=Verb)
@pass_app
def ls(app: App) -> None:
    """List keys, without their secrets."""
    with app.client() as client:
        found = client.keys.list()
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("id", "name", "age", "last used"),
        (
            (
                key.id,
                key.name,
                show.age(key.created_at),
                f"{show.age(key.last_used_at)} ago" if key.last_used_at else "never",
            )
            for key in found
        ),
    )


@keys_command.command("rm", cls=Verb)
@click.argument("key_id", metavar="ID")
@pass_app
def rm(app: App, key_id: str) -> None:
    """Delete a key: from now on it opens nothing."""
    with app.client() as client:
        client.keys.delete(key_id)
    app.print_json({"deleted": [key_id]}) if app.json else click.echo(key_id)
