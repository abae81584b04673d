"""`logs`, `events`: what happened."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, find_sandbox, pass_app

if TYPE_CHECKING:
    from forkyard import EventInfo, ExecStream, Process, Sandbox

_POLL_S = 0.5


@click.command("logs", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.option("--exec", "exec_id", metavar="EXEC", help="Output of this command instead (see ps).")
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes.")
@pass_app
def logs_command(app: App, sandbox_id: str, exec_id: str | None, follow: bool) -> None:
    """Show how a sandbox started and the end of its console, or the output of one of its commands."""
    with app.client() as client:
        sandbox = find_sandbox(client, sandbox_id)
        if exec_id is not None:
            _exec_output(app, sandbox.process(exec_id), follow)
        else:
            _machine(app, sandbox, follow)


def _machine(app: App, sandbox: Sandbox, follow: bool) -> None:
    from forkyard.lifecycle import ENDED

    logs = sandbox.logs()
    if app.json and not follow:
        app.print_json(logs)
        return
    if app.json:
        app.print_json(logs)
    else:
        rows = [("template boot", mark.name, f"{mark.at_ms:.0f} ms") for mark in logs.template_boot]
        rows += [("create", mark.name, f"{mark.at_ms:.0f} ms") for mark in logs.create]
        show.table(("phase", "milestone", "at"), rows)
        click.echo("\nconsole:")
        click.echo(logs.console, nl=not logs.console.endswith("\n"))
    while follow and sandbox.refresh().state not in ENDED:
        time.sleep(_POLL_S)
        before, logs = logs.console, sandbox.logs()
        if fresh := show.fresh_text(before, logs.console):
            app.print_json({"console": fresh}) if app.json else click.echo(fresh, nl=False)


def _exec_output(app: App, process: Process, follow: bool) -> None:
    """Without `follow`, of a command that still runs: what it has printed by now."""
    from forkyard.cli.execs import write_output

    info = process.info()
    if follow or not info.running:
        stream = process.output()
        if not app.json:
            write_output(stream)
            return
        for chunk in stream:
            app.print_json(
                {"stream": chunk.stream, "offset": chunk.offset, "text": chunk.text, "lost": chunk.lost_bytes}
            )
        app.print_json({"exit_code": stream.exit_code, "signal": stream.signal, "timed_out": stream.timed_out})
        return
    _until_now(app, process.output(), {"stdout": info.stdout_bytes, "stderr": info.stderr_bytes})


def _until_now(app: App, stream: ExecStream, missing: dict[str, int]) -> None:
    if not any(missing.values()):
        return
    with stream:
        for chunk in stream:
            if app.json:
                app.print_json({"stream": chunk.stream, "offset": chunk.offset, "text": chunk.text})
            else:
                click.echo(chunk.data, nl=False, err=chunk.stream == "stderr")
            missing[chunk.stream] -= len(chunk.data) + chunk.lost_bytes
            if all(left <= 0 for left in missing.values()):
                return


@click.command("events", cls=Verb)
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes.")
@click.option("--sandbox", "sandbox_id", metavar="ID", help="Only of this sandbox.")
@click.option("--after", type=int, metavar="EVENT", help="Only those after this event's number.")
@click.option("--limit", "-n", type=click.IntRange(1), default=100, show_default=True, help="The last so many.")
@pass_app
def events_command(app: App, follow: bool, sandbox_id: str | None, after: int | None, limit: int) -> None:
    """Show history: each change of a sandbox's state, with its cause."""
    with app.client() as client:
        only = find_sandbox(client, sandbox_id).id if sandbox_id else None
        if follow:
            for event in client.events.follow(sandbox_id=only, after=after):
                app.print_json(event) if app.json else click.echo("  ".join(_row(event)).rstrip())
            return
        found = client.events.list(sandbox_id=only, after=after, tail=limit)
    if app.json:
        for event in found:
            app.print_json(event)
    else:
        show.table(("event", "at", "sandbox", "what", "cause", "detail"), (_row(event) for event in found))


def _row(event: EventInfo) -> tuple[str, ...]:
    return (
        str(event.id),
        event.at.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        event.sandbox_id or "-",
        event.kind,
        event.cause.value if event.cause else "-",
        event.detail or "",
    )
