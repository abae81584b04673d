"""`port`: a port of a sandbox on this machine."""

from __future__ import annotations

import click

from forkyard.cli.app import App, Verb, find_sandbox, pass_app


@click.command("port", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.argument("ports", metavar="PORT[:LOCAL]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on here.")
@pass_app
def port_command(app: App, sandbox_id: str, ports: str, host: str) -> None:
    """Forward a local port to a port of a sandbox, until Ctrl-C. Without LOCAL it is the same one, or a free one.

    It goes through the API, so it works with a daemon on another machine too. A paused sandbox wakes.
    """
    from forkyard.errors import Conflict

    guest_port, local_port = _parsed(ports)
    with app.client() as client:
        sandbox = find_sandbox(client, sandbox_id)
        forward = sandbox.forward(guest_port, local_port=guest_port if local_port is None else local_port, host=host)
        try:
            forward.open()
        except Conflict:
            if local_port is not None:
                raise
            forward = sandbox.forward(guest_port, host=host).open()
        with forward:
            if app.json:
                app.print_json({"host": host, "port": forward.port, "sandbox_id": sandbox.id, "guest_port": guest_port})
            else:
                click.echo(
                    f"{host}:{forward.port} is port {guest_port} of {sandbox.name or sandbox.id}. Ctrl-C ends it."
                )
            try:
                forward.wait()
            except KeyboardInterrupt:
                app.progress("done")


def _parsed(ports: str) -> tuple[int, int | None]:
    guest, colon, local = ports.partition(":")
    numbers = [guest, local] if colon else [guest]
    if not all(number.isdecimal() and int(number) < 65536 for number in numbers) or int(guest) == 0:
        raise click.BadParameter(f"{ports!r} is not of the form PORT or PORT:LOCAL, such as 5432 or 5432:15432.")
    return int(guest), int(local) if colon else None
