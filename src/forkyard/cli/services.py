"""`services ls | show | add | logs | start | stop | restart | rm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, find_sandbox, given, pairs, pass_app, seconds

if TYPE_CHECKING:
    from forkyard import ServiceInfo


@click.group("services")
def services_command() -> None:
    """What runs in a sandbox by itself: systemd units."""


@services_command.command("ls", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@pass_app
def ls(app: App, sandbox_id: str) -> None:
    """List services."""
    with app.client() as client:
        found = find_sandbox(client, sandbox_id).services.list()
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("name", "state", "sub", "pid", "restarts", "command"),
        (
            (
                info.name,
                info.active,
                info.sub,
                str(info.pid or ""),
                str(info.restarts),
                show.command(info.service.exec or "") if info.service else "",
            )
            for info in found
        ),
    )


@services_command.command("show", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.argument("name")
@pass_app
def show_one(app: App, sandbox_id: str, name: str) -> None:
    """Show the state of a service, and what it was made of."""
    with app.client() as client:
        info = find_sandbox(client, sandbox_id).services.get(name)
    if app.json:
        app.print_json(info)
        return
    ended = "" if info.exit_code is None or info.pid is not None else f", last ended with {info.exit_code}"
    click.echo(f"{info.name}: {info.active} ({info.sub}, {info.result}), {info.restarts} restarts{ended}")
    made_of = {} if info.service is None else info.service.model_dump(mode="json", exclude_defaults=True)
    for field, value in made_of.items():
        if field != "name":
            click.echo(f"  {field}: {value}")


@services_command.command("add", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.argument("name")
@click.argument("exec", metavar="[COMMAND]", required=False)
@click.option("--type", type=click.Choice(["simple", "oneshot", "notify"]))
@click.option("--ready", metavar="COMMAND", help="Exits with 0 once the service answers.")
@click.option("--ready-timeout", "ready_timeout_s", type=seconds, help="Default: 2m.")
@click.option("--restart", type=click.Choice(["no", "on-failure", "on-abnormal", "always"]))
@click.option("--restart-pause", "restart_s", type=seconds, help="Before a restart. Default: 1s.")
@click.option("--start-limit", type=int, help="So many starts within 10s, or --start-limit-time, and it has failed.")
@click.option("--start-limit-time", "start_limit_s", type=seconds)
@click.option("--watchdog", "watchdog_s", type=seconds, help="It must say so this often that it is alive (sd_notify).")
@click.option(
    "--remain/--no-remain", default=None, help="It counts as up when it has ended well. Default: a oneshot does."
)
@click.option("--env", "-e", multiple=True, callback=pairs, metavar="KEY=VALUE")
@click.option("--user")
@click.option("--group", help="Default: that of the user.")
@click.option("--workdir")
@click.option("--after", multiple=True, help="A service to wait for. May be repeated.")
@click.option("--requires", multiple=True, help="A service that must run, and is waited for. May be repeated.")
@click.option("--on-failure", multiple=True, help="A service to start when it fails. May be repeated.")
@click.option("--wanted-by", multiple=True, help="What pulls it in at boot. Default: multi-user.target.")
@click.option("--disabled", is_flag=True, help="Do not start it at boots from disk.")
@click.option("--no-wait", is_flag=True, help="Do not wait until it is ready.")
@pass_app
def add(
    app: App, /, sandbox_id: str, name: str, exec: str | None, no_wait: bool, disabled: bool, **options: Any
) -> None:
    """Start a service, and wait until it is ready. One of the same name is replaced. Without a command it is what the
    image of the sandbox says: its ENTRYPOINT and CMD."""
    request = {name: list(value) if isinstance(value, tuple) else value for name, value in given(options).items()}
    if disabled:
        request["enabled"] = False
    with app.client() as client:
        info = find_sandbox(client, sandbox_id).services.add(name, exec, wait=not no_wait, **request)
    _print(app, info)


@services_command.command("logs", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.argument("name")
@click.option("--lines", "-n", type=click.IntRange(1, 10000), default=100, show_default=True)
@pass_app
def logs(app: App, sandbox_id: str, name: str, lines: int) -> None:
    """Show the end of a service's journal."""
    with app.client() as client:
        text = find_sandbox(client, sandbox_id).services.logs(name, lines=lines)
    app.print_json({"name": name, "log": text}) if app.json else click.echo(text, nl=False)


def _turn(verb: str, text: str) -> click.Command:
    @click.command(verb, cls=Verb, help=text)
    @click.argument("sandbox_id", metavar="ID")
    @click.argument("name")
    @pass_app
    def command(app: App, sandbox_id: str, name: str) -> None:
        with app.client() as client:
            info = getattr(find_sandbox(client, sandbox_id).services, verb)(name)
        _print(app, info)

    return command


for _verb, _text in (("start", "Start a service."), ("stop", "Stop a service."), ("restart", "Restart a service.")):
    services_command.add_command(_turn(_verb, _text))


@services_command.command("rm", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.argument("name")
@pass_app
def rm(app: App, sandbox_id: str, name: str) -> None:
    """Stop and remove a service."""
    with app.client() as client:
        find_sandbox(client, sandbox_id).services.remove(name)
    app.print_json({"deleted": [name]}) if app.json else click.echo(name)


def _print(app: App, info: ServiceInfo) -> None:
    app.print_json(info) if app.json else click.echo(f"{info.name}: {info.active} ({info.sub})")
