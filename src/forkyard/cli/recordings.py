"""`recordings ls | show | rm`."""

from __future__ import annotations

import click

from forkyard.cli import show as showing
from forkyard.cli.app import App, Verb, pass_app


@click.group("recordings")
def recordings_command() -> None:
    """HTTP exchanges that were recorded, to be replayed.

    A sandbox made with --record NAME stores what it asks for and what it is answered. One made with --replay NAME is
    answered from there and reaches nothing else.
    """


@recordings_command.command("ls", cls=Verb)
@pass_app
def ls(app: App) -> None:
    """List recordings."""
    with app.client() as client:
        found = client.recordings.list()
    if app.json:
        app.print_json(found)
        return
    rows = (
        (one.name, str(one.exchanges), showing.size(one.size_bytes), f"{showing.age(one.updated_at)} ago")
        for one in found
    )
    showing.table(("name", "exchanges", "size", "changed"), rows)


@recordings_command.command("show", cls=Verb)
@click.argument("name")
@pass_app
def show(app: App, name: str) -> None:
    """Show what was asked, in order."""
    with app.client() as client:
        found = client.recordings.show(name)
    if app.json:
        app.print_json(found)
        return
    rows = ((one.method, one.url, str(one.status), showing.size(one.size_bytes)) for one in found)
    showing.table(("method", "url", "status", "size"), rows)


@recordings_command.command("rm", cls=Verb)
@click.argument("name")
@pass_app
def rm(app: App, name: str) -> None:
    """Delete a recording."""
    with app.client() as client:
        client.recordings.delete(name)
    app.print_json({"deleted": [name]}) if app.json else click.echo(name)
