"""`ca show | export | install`: the certificate authority of this installation."""

from __future__ import annotations

import subprocess
from pathlib import Path

import click

from forkyard.cli.app import App, Verb, pass_app

_INSTALLED = Path("/usr/local/share/ca-certificates/forkyard.crt")


@click.group("ca")
def ca_command() -> None:
    """The certificate authority of this installation.

    Trust it to open previews over HTTPS without a warning. Its key never leaves the daemon. Sandboxes with secrets,
    --record or --replay trust it by themselves; others do not.
    """


@ca_command.command("show", cls=Verb)
@pass_app
def show(app: App) -> None:
    """Print the certificate, as PEM."""
    with app.client() as client:
        pem = client.ca()
    app.print_json({"certificate": pem}) if app.json else click.echo(pem, nl=False)


@ca_command.command("export", cls=Verb)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@pass_app
def export(app: App, file: Path) -> None:
    """Write the certificate to a file, for a browser or another machine."""
    with app.client() as client:
        file.write_text(client.ca())
    app.print_json({"file": str(file)}) if app.json else click.echo(str(file))


@ca_command.command("install", cls=Verb)
@click.option("--remove", is_flag=True, help="Take it away again.")
@pass_app
def install(app: App, remove: bool) -> None:
    """Make this machine trust the certificate. Needs root, and a Debian or Ubuntu."""
    if remove:
        _INSTALLED.unlink(missing_ok=True)
    else:
        with app.client() as client:
            pem = client.ca()
        try:
            _INSTALLED.parent.mkdir(parents=True, exist_ok=True)
            _INSTALLED.write_text(pem)
        except PermissionError:
            raise click.ClickException(f"{_INSTALLED} cannot be written. Run this as root.") from None
    try:
        subprocess.run(["update-ca-certificates", "--fresh"], check=True, capture_output=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        raise click.ClickException(
            "update-ca-certificates does not work here. Export the certificate, and give it to your system by hand."
        ) from None
    app.print_json({"installed": not remove}) if app.json else click.echo("removed" if remove else "installed")
