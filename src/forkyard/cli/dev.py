"""`dev up | ls | show | reload | logs | rm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, given, pairs, pass_app, seconds
from forkyard.cli.policy import policy_options, secret_option, taken_policy, with_values

if TYPE_CHECKING:
    from forkyard import DevServerInfo


@click.group("dev")
def dev_command() -> None:
    """Dev servers: a repository, installed and served in a sandbox, reloaded when it is pushed to."""


@dev_command.command("up", cls=Verb)
@click.argument("repo", required=False)
@click.option("--template", "template_repo", metavar="REPO", help="Make REPO of this one first: hosted, or a url.")
@click.option("--name", help="Default: its id.")
@click.option("--branch", help="Default: the default branch.")
@click.option("--command", metavar="COMMAND", help="Default: found out from its files.")
@click.option("--install", metavar="COMMAND", help="Default: found out from its files. Empty: nothing.")
@click.option("--port", type=click.IntRange(1, 65535), default=3000, show_default=True)
@click.option("--path", default="/repo", show_default=True, help="Where the repository is, in the sandbox.")
@click.option("--user", help="Who runs it. Default: root.")
@click.option("--env", "-e", multiple=True, callback=pairs, metavar="KEY=VALUE")
@click.option("--on-push", type=click.Choice(["restart", "pull", "ignore"]), help="Default: restart.")
@click.option("--git-secret", "secret", metavar="NAME", help="Secret with the password or token for a url.")
@click.option("--ready-timeout", "ready_timeout_s", type=seconds, help="Default: 5m.")
@click.option("--vcpus", type=int)
@click.option("--memory", "memory_mib", type=int, metavar="MIB")
@click.option("--disk", "disk_gib", type=int, metavar="GIB")
@click.option("--file", "-f", "spec_file", metavar="FILE", help="A spec for the machine, such as forkyard.yaml.")
@click.option("--idle-timeout", "idle_timeout_s", type=seconds, help="Sleeps when idle for this long. Default: 5m.")
@policy_options
@secret_option
@pass_app
def up(app: App, /, repo: str | None, spec_file: str | None, **options: Any) -> None:
    """Serve REPO, a hosted repository or a url, and print the address of its preview."""
    policy, secrets = taken_policy(options), options.pop("secrets")
    machine = given({name: options.pop(name) for name in ("vcpus", "memory_mib", "disk_gib", "idle_timeout_s")})
    if policy is not None:
        machine["network"] = {"egress": policy}
    with app.client() as client:
        if secrets:
            machine["secrets"] = with_values(secrets, {info.name for info in client.secrets.list()})
        if spec_file is not None:
            from forkyard.cli.builds import built

            machine["spec"] = built(app, client, spec_file)
        server = client.dev_servers.create(repo, sandbox=machine, **given(options))
    app.print_json(server.info) if app.json else click.echo(server.url)


@dev_command.command("ls", cls=Verb)
@pass_app
def ls(app: App) -> None:
    """List dev servers."""
    with app.client() as client:
        found = [server.info for server in client.dev_servers.list()]
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("name", "repo", "branch", "commit", "sandbox", "state", "url"),
        (
            (info.name, info.repo_url, info.branch, info.sha[:9], info.sandbox_id, info.sandbox_state.value, info.url)
            for info in found
        ),
    )


@dev_command.command("show", cls=Verb)
@click.argument("server", metavar="SERVER")
@pass_app
def show_one(app: App, server: str) -> None:
    """Show a dev server, by its id or name."""
    with app.client() as client:
        _print(app, client.dev_servers.get(server).info)


@dev_command.command("reload", cls=Verb)
@click.argument("server", metavar="SERVER")
@pass_app
def reload(app: App, server: str) -> None:
    """Fetch the head of its branch, install if need be, restart."""
    with app.client() as client:
        _print(app, client.dev_servers.get(server).reload())


@dev_command.command("logs", cls=Verb)
@click.argument("server", metavar="SERVER")
@click.option("--lines", "-n", type=click.IntRange(1, 10000), default=100, show_default=True)
@pass_app
def logs(app: App, server: str, lines: int) -> None:
    """Show the end of what it has printed."""
    with app.client() as client:
        text = client.dev_servers.get(server).logs(lines=lines)
    app.print_json({"log": text}) if app.json else click.echo(text, nl=False)


@dev_command.command("rm", cls=Verb)
@click.argument("server", metavar="SERVER")
@pass_app
def rm(app: App, server: str) -> None:
    """Delete a dev server and its sandbox. The repository stays."""
    with app.client() as client:
        client.dev_servers.delete(server)
    app.print_json({"deleted": [server]}) if app.json else click.echo(server)


def _print(app: App, info: DevServerInfo) -> None:
    if app.json:
        app.print_json(info)
        return
    click.echo(f"{info.url}  {info.branch} {info.sha[:9]}  {info.command}")
    if info.error is not None:
        click.echo(f"the last reload failed: {info.error}")
