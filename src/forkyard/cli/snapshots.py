"""`snapshot`, `snapshots ls | rm`, `rollback`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, find_sandbox, pass_app

if TYPE_CHECKING:
    from forkyard import Forkyard, Snapshot


@click.command("snapshot", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.option("--name", help="To find it again. Must be unique.")
@pass_app
def snapshot_command(app: App, sandbox_id: str, name: str | None) -> None:
    """Save a sandbox as it is now, memory and processes included, and print the snapshot's id.

    create --snapshot starts another sandbox from it; rollback returns to it.
    """
    with app.client() as client:
        made = find_sandbox(client, sandbox_id).snapshot(name)
    app.print_json(made.info) if app.json else click.echo(made.id)


@click.group("snapshots")
def snapshots_command() -> None:
    """Saved states of sandboxes. `snapshot ID` makes one."""


@snapshots_command.command("ls", cls=Verb)
@click.option("--sandbox", "sandbox_id", metavar="ID", help="Only of this sandbox.")
@click.option("--automatic/--manual", default=None, help="Only checkpoints, or only those that were asked for.")
@pass_app
def ls(app: App, sandbox_id: str | None, automatic: bool | None) -> None:
    """List snapshots, newest first."""
    with app.client() as client:
        only = find_sandbox(client, sandbox_id).id if sandbox_id else None
        found = [snapshot.info for snapshot in client.snapshots.list(sandbox_id=only, automatic=automatic)]
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("id", "name", "sandbox", "kind", "size", "age"),
        (
            (
                info.id,
                info.name or "",
                info.sandbox_id,
                "checkpoint" if info.automatic else "",
                f"{info.size_bytes / 2**20:.0f} MiB",
                show.age(info.created_at),
            )
            for info in found
        ),
    )


@snapshots_command.command("rm", cls=Verb)
@click.argument("snapshots", nargs=-1, required=True, metavar="SNAPSHOT...")
@click.option("--force", "-f", is_flag=True, help="Do not mind snapshots that are not there.")
@pass_app
@click.pass_context
def rm(ctx: click.Context, app: App, snapshots: tuple[str, ...], force: bool) -> None:
    """Delete snapshots, by id or name. Sandboxes that were started from them go on."""
    from forkyard.errors import ForkyardError, SnapshotNotFound

    deleted: list[str] = []
    failed = False
    with app.client() as client:
        for typed in snapshots:
            try:
                snapshot = find_snapshot(client, typed)
                snapshot.delete()
            except ForkyardError as error:
                if not (force and isinstance(error, SnapshotNotFound)):
                    app.fail(error)
                    failed = True
            else:
                deleted.append(snapshot.id)
                if not app.json:
                    click.echo(snapshot.id)
    if app.json:
        app.print_json({"deleted": deleted})
    if failed:
        ctx.exit(1)


@click.command("rollback", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.argument("snapshot")
@pass_app
def rollback_command(app: App, sandbox_id: str, snapshot: str) -> None:
    """Return a sandbox to one of its snapshots. What happened since is dropped."""
    with app.client() as client:
        info = find_sandbox(client, sandbox_id).rollback(find_snapshot(client, snapshot))
    app.print_json(info) if app.json else click.echo(info.id)


def find_snapshot(client: Forkyard, typed: str) -> Snapshot:
    """By its id, its name, or the beginning of its id."""
    from forkyard.errors import InvalidRequest, NotFound, SnapshotNotFound

    try:
        return client.snapshots.get(typed)
    except NotFound:
        # A name with a slash has no address of its own.
        every = client.snapshots.list()
        matches = [snapshot for snapshot in every if snapshot.name == typed]
        matches = matches or [snapshot for snapshot in every if typed and snapshot.id.startswith(typed)]
    if len(matches) > 1:
        ids = ", ".join(snapshot.id for snapshot in matches[:5]) + (" …" if len(matches) > 5 else "")
        raise InvalidRequest(f"{typed!r} means {len(matches)} snapshots ({ids}). Give more of the id.", given=typed)
    if not matches:
        raise SnapshotNotFound(f"There is no snapshot {typed!r}. `forkyard snapshots ls` lists them.", given=typed)
    return matches[0]
