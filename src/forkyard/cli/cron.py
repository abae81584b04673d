"""`cron create | ls | runs | on | off | rm`."""

from __future__ import annotations

from typing import Any

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, given, pass_app
from forkyard.cli.runs import print_runs, script_options


@click.group("cron")
def cron_command() -> None:
    """Scripts that run by the clock: as `forkyard runs`, with every run on record."""


@cron_command.command("create", cls=Verb)
@click.argument("cron", metavar="WHEN")
@script_options
@click.option("--name")
@click.option("--timezone", metavar="ZONE", help="Default: UTC.")
@click.option("--retries", type=click.IntRange(0, 10), help="How often one that failed is tried again.")
@pass_app
def create(app: App, /, cron: str, script: Any, **options: Any) -> None:
    """Run a module for Node.js by the clock. WHEN has five fields: minute, hour, day, month, weekday.

    Each time is used at most once; one that passed while no daemon ran is made up for once.
    """
    with app.client() as client:
        info = client.cron.create(cron, script.read(), **given(options))
    app.print_json(info) if app.json else click.echo(info.id)


@cron_command.command("ls", cls=Verb)
@pass_app
def ls(app: App) -> None:
    """List schedules."""
    with app.client() as client:
        found = client.cron.list()
    if app.json:
        app.print_json(found)
        return
    rows = (
        (
            info.id,
            info.name or "",
            info.cron,
            info.timezone,
            "on" if info.active else "off",
            "" if info.next_at is None else info.next_at.astimezone().strftime("%Y-%m-%d %H:%M"),
        )
        for info in found
    )
    show.table(("id", "name", "when", "timezone", "", "next"), rows)


@cron_command.command("runs", cls=Verb)
@click.argument("schedule_id", metavar="ID")
@click.option("--limit", "-n", type=click.IntRange(1, 1000), default=20, show_default=True)
@pass_app
def runs(app: App, schedule_id: str, limit: int) -> None:
    """List the runs of a schedule, newest first."""
    with app.client() as client:
        print_runs(app, client.cron.runs(schedule_id, limit=limit))


def _turn(verb: str, text: str) -> click.Command:
    @click.command(verb, cls=Verb, help=text)
    @click.argument("schedule_id", metavar="ID")
    @pass_app
    def command(app: App, schedule_id: str) -> None:
        with app.client() as client:
            info = client.cron.update(schedule_id, active=verb == "on")
        app.print_json(info) if app.json else click.echo(info.id)

    return command


cron_command.add_command(_turn("on", "Turn a schedule on. Its next time is counted from now."))
cron_command.add_command(_turn("off", "Turn a schedule off: it begins nothing, and is kept."))


@cron_command.command("rm", cls=Verb)
@click.argument("schedule_id", metavar="ID")
@pass_app
def rm(app: App, schedule_id: str) -> None:
    """Delete a schedule, with the runs it has made."""
    with app.client() as client:
        client.cron.delete(schedule_id)
    app.print_json({"deleted": [schedule_id]}) if app.json else click.echo(schedule_id)
