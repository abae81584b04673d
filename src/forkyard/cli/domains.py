"""`domains add | verify | map | ls | rm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, find_sandbox, pass_app

if TYPE_CHECKING:
    from forkyard import DomainInfo

_PORT = click.IntRange(1, 65535)


@click.group("domains")
def domains_command() -> None:
    """Names of your own for ports of sandboxes."""


@domains_command.command("add", cls=Verb)
@click.argument("domain")
@click.argument("sandbox_id", metavar="[ID", required=False)
@click.argument("port", metavar="PORT]", type=_PORT, required=False)
@pass_app
def add(app: App, domain: str, sandbox_id: str | None, port: int | None) -> None:
    """Map a domain to a port of a sandbox, now or later, and print the TXT record that shows it is yours."""
    if (sandbox_id is None) != (port is None):
        raise click.UsageError("give the id of a sandbox and a port, or neither")
    with app.client() as client:
        info = client.domains.add(domain, None if sandbox_id is None else find_sandbox(client, sandbox_id), port)
    if app.json:
        app.print_json(info)
        return
    click.echo(f'{info.record_name}. TXT "{info.record_value}"')
    click.echo(f"Set this record, then: forkyard domains verify {info.domain}", err=True)


@domains_command.command("verify", cls=Verb)
@click.argument("domain")
@pass_app
def verify(app: App, domain: str) -> None:
    """Look for the TXT record. From then on the domain serves."""
    with app.client() as client:
        _show(app, client.domains.verify(domain))


@domains_command.command("map", cls=Verb)
@click.argument("domain")
@click.argument("sandbox_id", metavar="ID")
@click.argument("port", type=_PORT)
@pass_app
def map_(app: App, domain: str, sandbox_id: str, port: int) -> None:
    """Map a domain to another sandbox or port, a fork say, without a gap."""
    with app.client() as client:
        _show(app, client.domains.map(domain, find_sandbox(client, sandbox_id), port))


@domains_command.command("ls", cls=Verb)
@pass_app
def ls(app: App) -> None:
    """List domains."""
    with app.client() as client:
        found = client.domains.list()
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("domain", "sandbox", "port", "state", "age"),
        (
            (
                info.domain,
                info.sandbox_id or "-",
                str(info.port or "-"),
                "verified" if info.verified else "not verified",
                show.age(info.created_at),
            )
            for info in found
        ),
    )


@domains_command.command("rm", cls=Verb)
@click.argument("domain")
@pass_app
def rm(app: App, domain: str) -> None:
    """Remove a domain. Its sandbox is not affected."""
    with app.client() as client:
        client.domains.delete(domain)
    app.print_json({"deleted": domain}) if app.json else click.echo(domain)


def _show(app: App, info: DomainInfo) -> None:
    where = f"{info.sandbox_id}:{info.port}" if info.sandbox_id else "nothing yet"
    app.print_json(info) if app.json else click.echo(f"{info.domain} -> {where}")
