"""`up`, `down`, `doctor`, `bench`, `version`: the daemon itself. Only these import the server, and lazily."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, pass_app

if TYPE_CHECKING:
    from forkyard import Check

_STOP_S = 120.0


@click.command("up", cls=Verb)
@click.option("--host", help="Address to listen on. Default: 127.0.0.1.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on. Default: 7070.")
@click.option("--accel", type=click.Choice(["auto", "kvm", "tcg"]), help="Accelerator. Default: auto.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), help="Database, keys and disks. Default: /var/lib/forkyard."
)
def up_command(host: str | None, port: int | None, accel: str | None, state_dir: Path | None) -> None:
    """Run the daemon in the foreground. The first start builds the base image and takes minutes.

    Ctrl-C stops it and leaves the sandboxes running; the next start takes them over.
    """
    from forkyard.errors import Conflict
    from forkyard.sdk.connect import probe
    from forkyard.settings import Settings

    given = {"listen_host": host, "listen_port": port, "accel": accel, "state_dir": state_dir}
    overrides: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    settings = Settings(**overrides)
    running = probe(settings.api_socket)
    if running is not None:
        raise Conflict(
            f"A daemon already runs here (pid {running.pid}, {settings.api_socket}). Stop it with `forkyard down`.",
            pid=running.pid,
        )
    _server("forkyard.daemon").run(settings)


@click.command("down", cls=Verb)
@click.option("--all", "destroy", is_flag=True, help="Also end all sandboxes.")
@pass_app
def down_command(app: App, destroy: bool) -> None:
    """Stop the daemon. Sandboxes go on running unless --all is given."""
    from forkyard.errors import DaemonUnreachable, OperationTimeout

    with app.client(start=False) as client:
        health = client.health()
        client.shutdown(destroy=destroy)
        gives_up_at = time.monotonic() + _STOP_S
    while time.monotonic() < gives_up_at:
        try:
            # A new client each time: one that has had an answer would wait for the daemon to come back.
            with app.client(start=False) as client:
                client.health()
        except DaemonUnreachable:
            break
        time.sleep(0.1)
    else:
        raise OperationTimeout(
            f"The daemon (pid {health.pid}) was told to stop and still answers after {_STOP_S:.0f} s."
        )
    if app.json:
        app.print_json({"stopped": health.pid, "destroyed": destroy})
    else:
        click.echo(f"Daemon {health.pid} stopped" + (", sandboxes ended." if destroy else "; sandboxes go on running."))


@click.command("doctor", cls=Verb)
@pass_app
@click.pass_context
def doctor_command(ctx: click.Context, app: App) -> None:
    """Say what is right and wrong with the daemon's machine, and what to do. Exit code 1 if something is wrong."""
    from forkyard.errors import DaemonUnreachable
    from forkyard.settings import ClientSettings

    try:
        with app.client(start=False) as client:
            checks = client.doctor()
    except DaemonUnreachable:
        if app.url or ClientSettings().url:
            raise
        checks = _local_checks()
    if app.json:
        app.print_json(checks)
    else:
        show.table(("", "check", "finding"), ((check.status, check.name, check.summary) for check in checks))
        for check in checks:
            if check.advice and check.status != "ok":
                click.echo(f"\n{click.style(check.name, bold=True)}: {check.advice}")
    if any(check.status == "failed" for check in checks):
        ctx.exit(1)


def _local_checks() -> list[Check]:
    """Without a daemon: look at this machine from here."""
    import asyncio

    from forkyard.settings import Settings

    checks: list[Check] = asyncio.run(_server("forkyard.daemon").checks(Settings()))
    return checks


@click.command("bench", cls=Verb)
@click.argument("names", nargs=-1, metavar="[create|exec|files|density]...")
@click.option("--n", "count", type=click.IntRange(1), help="How often, or how many.")
@click.option("--write", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures into this page.")
@click.option("--peers", is_flag=True, help="Also measure what one would use instead: runc, gVisor, a cold boot.")
@pass_app
@click.pass_context
def bench_command(
    ctx: click.Context, app: App, names: tuple[str, ...], count: int | None, write: Path | None, peers: bool
) -> None:
    """Measure this machine against the promises of SPECIFICATION.md. Exit code 3 if one is missed."""
    for name, value in (("FORKYARD_URL", app.url), ("FORKYARD_API_KEY", app.api_key)):
        if value:
            os.environ[name] = value
    ctx.exit(_server("forkyard.bench").main(names, n=count, as_json=app.json, write=write, with_peers=peers))


@click.command("version", cls=Verb)
@pass_app
def version_command(app: App) -> None:
    """Print the version of this program and of the daemon, if one runs."""
    import forkyard
    from forkyard.errors import ForkyardError

    try:
        with app.client(start=False) as client:
            daemon: str | None = client.health().version
    except ForkyardError:
        daemon = None
    if app.json:
        app.print_json({"client": forkyard.__version__, "daemon": daemon})
    else:
        click.echo(f"forkyard {forkyard.__version__}" + (f", daemon {daemon}" if daemon else ", no daemon runs"))


def _server(module: str) -> Any:
    """A module of the server part, which may not be installed."""
    import importlib

    from forkyard.errors import InvalidRequest

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        raise InvalidRequest(
            f"The server is not installed here (no module {exc.name}). Install it: pip install 'forkyard[server]'."
        ) from exc
