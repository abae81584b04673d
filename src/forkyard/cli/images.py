"""`images ls | import | rm`."""

from __future__ import annotations

import sys

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, pass_app


@click.group("images")
def images_command() -> None:
    """Images that machines are made of."""


@images_command.command("ls", cls=Verb)
@pass_app
def ls(app: App) -> None:
    """List images that were imported."""
    with app.client() as client:
        found = client.images.list()
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("id", "size", "init", "user", "age", "used", "from"),
        (
            (
                info.id,
                show.size(info.size_bytes),
                "systemd" if info.systemd else "",
                info.config.user,
                show.age(info.created_at),
                show.age(info.used_at),
                ", ".join(info.names),
            )
            for info in found
        ),
    )


@images_command.command("import", cls=Verb)
@click.argument("image", metavar="IMAGE")
@click.option("--username", "-u", help="For a private registry.")
@click.option("--password-stdin", is_flag=True, help="Read its password from standard input.")
@pass_app
def import_(app: App, image: str, username: str | None, password_stdin: bool) -> None:
    """Import an image and print its id: a `docker save` archive, an OCI layout, or registry/name:tag."""
    password = sys.stdin.read().rstrip("\n") if password_stdin else None
    if username is not None and password is None:
        password = click.prompt("Password", hide_input=True, err=True)
    with app.client() as client:
        info = client.images.import_(image, username=username, password=password)
    app.print_json(info) if app.json else click.echo(info.id)


@images_command.command("rm", cls=Verb)
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True)
@pass_app
def rm(app: App, images: tuple[str, ...]) -> None:
    """Remove images that no sandbox, snapshot or layer rests on, by id or name."""
    with app.client() as client:
        for image in images:
            client.images.delete(image)
            if not app.json:
                click.echo(image)
    if app.json:
        app.print_json({"deleted": list(images)})
