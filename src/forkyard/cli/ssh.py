"""`ssh`: OpenSSH into a sandbox, with nothing to set up. `ssh-keys`: who else may.

The first use makes a key pair in the user's configuration directory and registers its public half with the daemon.
The daemon's host key comes by the API, so that nobody is asked whether to trust it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, find_sandbox, pass_app
from forkyard.cli.execs import ExecVerb

if TYPE_CHECKING:
    from forkyard import Forkyard, SshDoor


@click.command("ssh", cls=ExecVerb, short_help="Log in to a sandbox with OpenSSH.")
@click.argument("sandbox_id", metavar="ID")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
@click.option("--user", "-u", default="root", show_default=True, help="Who to be in the sandbox.")
@click.option("--forward", "-L", "forwards", multiple=True, metavar="SPEC", help="As of ssh: 8080:localhost:80.")
@click.option("--config", is_flag=True, help="Print a block for ~/.ssh/config (VS Code, rsync, scp) and do nothing.")
@pass_app
def ssh_command(
    app: App, sandbox_id: str, command: tuple[str, ...], user: str, forwards: tuple[str, ...], config: bool
) -> None:
    """Log in to a sandbox with OpenSSH, or run a command in it. A paused sandbox wakes."""
    with app.client() as client:
        sandbox = find_sandbox(client, sandbox_id)
        door = client.ssh.door()
        login = sandbox.id if user == "root" else f"{sandbox.id}+{user}"
        options = _set_up(client, door)
        alias = sandbox.name if sandbox.name and sandbox.name.isidentifier() else sandbox.id
    if app.json:
        app.print_json({"host": door.host, "port": door.port, "user": login, "options": options})
    elif config:
        settings = {"HostName": door.host, "Port": str(door.port), "User": login, **options}
        click.echo("\n".join([f"Host {alias}", *(f"    {name} {_quoted(value)}" for name, value in settings.items())]))
    else:
        arguments = ["ssh", "-p", str(door.port)]
        arguments += [word for name, value in options.items() for word in ("-o", f"{name}={_quoted(value)}")]
        arguments += [word for forward in forwards for word in ("-L", forward)]
        words = list(command) if len(command) < 2 else [shlex.join(command)]
        os.execvp("ssh", [*arguments, f"{login}@{door.host}", *words])


def _set_up(client: Forkyard, door: SshDoor) -> dict[str, str]:
    """Options of ssh by which it trusts the daemon and is let in."""
    if shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        raise click.ClickException("OpenSSH is not installed here. On Debian: apt install openssh-client")
    directory = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "forkyard" / "ssh"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = directory / "id_ed25519"
    if not key.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "forkyard", "-f", str(key)], check=True)
    client.ssh.add_key(key.with_suffix(".pub").read_text(), name=f"forkyard ssh of {os.uname().nodename}"[:128])
    known_hosts = directory / f"known_hosts.{door.host.replace(':', '_')}.{door.port}"
    lines = "".join(f"[{door.host}]:{door.port} {host_key}\n" for host_key in door.host_keys)
    temporary = known_hosts.with_name(f"{known_hosts.name}.{os.getpid()}")
    temporary.write_text(lines)
    temporary.replace(known_hosts)
    return {
        "IdentityFile": str(key),
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": str(known_hosts),
        "StrictHostKeyChecking": "yes",
        "LogLevel": "ERROR",
    }


def _quoted(value: str) -> str:
    return f'"{value}"' if " " in value else value


@click.group("ssh-keys")
def ssh_keys_command() -> None:
    """Public keys that may log in to sandboxes."""


@ssh_keys_command.command("add", cls=Verb)
@click.argument("file", type=click.File("r"))
@click.option("--name", help="Default: the comment of the key.")
@pass_app
def add(app: App, file: TextIO, name: str | None) -> None:
    """Let a public key in (a file such as ~/.ssh/id_ed25519.pub, or - for standard input)."""
    with app.client() as client:
        made = client.ssh.add_key(file.read(), name=name)
    app.print_json(made) if app.json else click.echo(made.id)


@ssh_keys_command.command("ls", cls=Verb)
@pass_app
def ls(app: App) -> None:
    """List them."""
    with app.client() as client:
        found = client.ssh.list_keys()
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("id", "name", "fingerprint", "age", "last used"),
        (
            (
                key.id,
                key.name,
                key.fingerprint,
                show.age(key.created_at),
                f"{show.age(key.last_used_at)} ago" if key.last_used_at else "never",
            )
            for key in found
        ),
    )


@ssh_keys_command.command("rm", cls=Verb)
@click.argument("ssh_key_id", metavar="ID")
@pass_app
def rm(app: App, ssh_key_id: str) -> None:
    """Let a key in no more."""
    with app.client() as client:
        client.ssh.delete_key(ssh_key_id)
    app.print_json({"deleted": [ssh_key_id]}) if app.json else click.echo(ssh_key_id)
