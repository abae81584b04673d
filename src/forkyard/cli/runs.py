"""`runs create | ls | show`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, given, pairs, pass_app, seconds

if TYPE_CHECKING:
    from forkyard import RunInfo

F = TypeVar("F", bound=Callable[..., Any])


@click.group("runs")
def runs_command() -> None:
    """Scripts, each in a machine of its own that is restored warm and used once."""


def script_options(command: F) -> F:
    """Of what is run, now or by a schedule."""
    for option in (
        click.option("--timeout", "timeout_s", type=seconds, help="Default: 1m."),
        click.option(
            "--module", "node_modules", multiple=True, callback=pairs, metavar="NAME=VERSION", help="A package of npm."
        ),
        click.option("--env", "-e", multiple=True, callback=pairs, metavar="KEY=VALUE"),
        click.option("--payload", callback=_json, metavar="JSON", help="What the default export is called with."),
        click.argument("script", type=click.File(encoding="utf-8")),
    ):
        command = option(command)
    return command


def _json(_ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    try:
        return None if value is None else json.loads(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not JSON.", param=param) from None


@runs_command.command("create", cls=Verb)
@script_options
@pass_app
def create(app: App, /, script: Any, **options: Any) -> None:
    """Run a module for Node.js (`-`: from standard input), and print what its default export returns, as JSON.

    What it logs goes to standard error. Exits with 1 if it failed.
    """
    with app.client() as client:
        info = client.runs.create(script.read(), **given(options))
    _show(app, info)


@runs_command.command("ls", cls=Verb)
@click.option("--limit", "-n", type=click.IntRange(1, 1000), default=20, show_default=True)
@pass_app
def ls(app: App, limit: int) -> None:
    """List runs, newest first; those of schedules too."""
    with app.client() as client:
        print_runs(app, client.runs.list(limit=limit))


@runs_command.command("show", cls=Verb)
@click.argument("run_id", metavar="ID")
@pass_app
def show_(app: App, run_id: str) -> None:
    """Show what a run logged and returned, as `create` does."""
    with app.client() as client:
        info = client.runs.get(run_id)
    _show(app, info)


def _show(app: App, info: RunInfo) -> None:
    outcome = info.outcome
    if app.json:
        app.print_json(info)
    elif outcome is None:
        click.echo(info.state)
    else:
        for line in outcome.logs:
            click.echo(line.message, err=True)
        if outcome.ok:
            click.echo(json.dumps(outcome.result))
        else:
            click.echo(f"{click.style('error:', fg='red', bold=True)} {outcome.error}", err=True)
    if outcome is not None and not outcome.ok:
        sys.exit(1)


def print_runs(app: App, found: Sequence[RunInfo]) -> None:
    if app.json:
        app.print_json(found)
        return
    rows = (
        (
            info.id,
            info.schedule_id or "",
            info.state,
            str(info.attempts),
            f"{show.age(info.run_at)} ago",
            "" if info.outcome is None or info.outcome.ok else (info.outcome.error or "").partition("\n")[0][:80],
        )
        for info in found
    )
    show.table(("id", "schedule", "state", "tries", "begun", "error"), rows)
