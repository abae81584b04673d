"""`volumes create | ls | show | files | upload | download | versions | snapshot | commit | rm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, find_sandbox, pass_app

if TYPE_CHECKING:
    from forkyard.models.volumes import VolumeInfo


@click.group("volumes")
def volumes_command() -> None:
    """Disks that outlive sandboxes. `create --volume NAME:/path` mounts one."""


@volumes_command.command("create", cls=Verb)
@click.argument("name")
@click.option("--size", "size_mib", type=int, default=1024, show_default=True, metavar="MIB", help="What fits into it.")
@pass_app
def create(app: App, name: str, size_mib: int) -> None:
    """Make an empty volume."""
    with app.client() as client:
        made = client.volumes.create(name, size_mib=size_mib)
    app.print_json(made) if app.json else click.echo(made.name)


@volumes_command.command("ls", cls=Verb)
@pass_app
def ls(app: App) -> None:
    """List volumes."""
    with app.client() as client:
        found = client.volumes.list()
    app.print_json(found) if app.json else _table(found)


@volumes_command.command("show", cls=Verb)
@click.argument("name")
@pass_app
def show_(app: App, name: str) -> None:
    """Show one volume, and who has it."""
    with app.client() as client:
        info = client.volumes.get(name)
    if app.json:
        app.print_json(info)
        return
    _table([info])
    for sandbox_id in info.used_by:
        click.echo(f"{'written' if sandbox_id == info.writer else 'used'} by {sandbox_id}")


def _table(found: list[VolumeInfo]) -> None:
    show.table(
        ("name", "size", "on disk", "version", "writer", "users", "age"),
        (
            (
                info.name,
                f"{info.size_mib} MiB",
                f"{info.stored_bytes / 2**20:.0f} MiB",
                str(info.version),
                info.writer or "",
                str(len(info.used_by)),
                show.age(info.created_at),
            )
            for info in found
        ),
    )


@volumes_command.command("files", cls=Verb)
@click.argument("name")
@click.argument("path", default="/")
@click.option("--depth", type=int, default=1, show_default=True)
@click.option("--version", type=int, help="Default: the newest.")
@pass_app
def files(app: App, name: str, path: str, depth: int, version: int | None) -> None:
    """List what is in a volume."""
    with app.client() as client:
        found = client.volumes.files(name, path, depth=depth, version=version)
    if app.json:
        app.print_json(found)
        return
    for info in found:
        click.echo(info.path + ("/" if info.type == "directory" else ""))


@volumes_command.command("upload", cls=Verb)
@click.argument("name")
@click.argument("local", type=click.Path(exists=True))
@click.argument("path", default="/")
@pass_app
def upload(app: App, name: str, local: str, path: str) -> None:
    """Copy a file, or what is in a directory, into a volume that no sandbox writes to."""
    with app.client() as client:
        client.volumes.upload(name, local, path)
    if app.json:
        app.print_json({"volume": name, "path": path})


@volumes_command.command("download", cls=Verb)
@click.argument("name")
@click.argument("path")
@click.argument("local", type=click.Path())
@click.option("--version", type=int, help="Default: the newest.")
@pass_app
def download(app: App, name: str, path: str, local: str, version: int | None) -> None:
    """Copy a file, or what is in a directory, out of a volume."""
    with app.client() as client:
        client.volumes.download(name, path, local, version=version)
    if app.json:
        app.print_json({"destination": local})


@volumes_command.command("versions", cls=Verb)
@click.argument("name")
@click.option("--rm", "number", type=int, metavar="VERSION", help="Delete this one.")
@pass_app
def versions(app: App, name: str, number: int | None) -> None:
    """List the versions of a volume, oldest first."""
    with app.client() as client:
        if number is not None:
            client.volumes.delete_version(name, number)
        found = client.volumes.versions(name)
    if app.json:
        app.print_json(found)
        return
    rows = ((str(v.version), "kept" if v.kept else "", v.source or "", show.age(v.created_at)) for v in found)
    show.table(("version", "", "written by", "age"), rows)


@volumes_command.command("snapshot", cls=Verb)
@click.argument("name")
@pass_app
def snapshot(app: App, name: str) -> None:
    """Keep what is in a volume now as a version."""
    with app.client() as client:
        made = client.volumes.snapshot(name)
    app.print_json(made) if app.json else click.echo(made.version)


@volumes_command.command("commit", cls=Verb)
@click.argument("name")
@click.argument("sandbox_id", metavar="ID")
@click.option("--path", help="Where the sandbox has it; needed if it has it more than once.")
@click.option("--force", is_flag=True, help="Also if the volume has a newer version than the copy was made of.")
@pass_app
def commit(app: App, name: str, sandbox_id: str, path: str | None, force: bool) -> None:
    """Make what a sandbox has written to its copy the newest version."""
    with app.client() as client:
        made = client.volumes.commit(name, find_sandbox(client, sandbox_id).id, path=path, force=force)
    app.print_json(made) if app.json else click.echo(made.version)


@volumes_command.command("rm", cls=Verb)
@click.argument("name")
@pass_app
def rm(app: App, name: str) -> None:
    """Delete a volume that no sandbox has."""
    with app.client() as client:
        client.volumes.delete(name)
    app.print_json({"deleted": [name]}) if app.json else click.echo(name)
