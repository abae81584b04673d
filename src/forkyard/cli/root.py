"""The `forkyard` group: global options, and where each command lives."""

from __future__ import annotations

import importlib
from typing import Any

import click

from forkyard.cli.app import App, json_option

#: In the order of a newcomer's path; `--help` keeps it.
COMMANDS = {
    "up": "daemon",
    "down": "daemon",
    "create": "sandboxes",
    "build": "builds",
    "builds": "builds",
    "dev": "dev",
    "ls": "sandboxes",
    "exec": "execs",
    "run-code": "code",
    "shell": "shell",
    "url": "url",
    "ssh": "ssh",
    "port": "port",
    "cp": "copy",
    "fork": "forks",
    "tree": "forks",
    "pause": "states",
    "resume": "states",
    "snapshot": "snapshots",
    "snapshots": "snapshots",
    "rollback": "snapshots",
    "volumes": "volumes",
    "stop": "states",
    "start": "states",
    "resize": "states",
    "set": "states",
    "rm": "sandboxes",
    "egress": "egress",
    "git": "git",
    "review": "review",
    "identities": "identities",
    "audit": "identities",
    "secrets": "secrets",
    "recordings": "recordings",
    "logs": "logs",
    "events": "logs",
    "ps": "execs",
    "contexts": "code",
    "services": "services",
    "images": "images",
    "runs": "runs",
    "cron": "cron",
    "doctor": "daemon",
    "bench": "daemon",
    "domains": "domains",
    "keys": "keys",
    "ca": "ca",
    "ssh-keys": "ssh",
    "version": "daemon",
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"forkyard.cli.{COMMANDS[cmd_name]}")
        command: Any = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--url", metavar="URL", help="The daemon's address. Default: FORKYARD_URL, else the daemon of this machine."
)
@click.option("--api-key", metavar="KEY", help="Default: FORKYARD_API_KEY, else the key file of this machine.")
@click.pass_context
def cli(ctx: click.Context, url: str | None, api_key: str | None) -> None:
    """Linux machines for coding agents: create one, run commands in it, fork it, let it sleep, throw it away.

    Where a command wants a sandbox ID, the beginning of an id or a sandbox's name will do.
    """
    app = ctx.ensure_object(App)
    app.url, app.api_key = url, api_key


cli.params.append(json_option())
