"""`url`: the address of a server in a sandbox."""

from __future__ import annotations

import click

from forkyard.cli.app import App, Verb, find_sandbox, pass_app


@click.command("url", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.argument("port", type=click.IntRange(1, 65535))
@click.option("--link", is_flag=True, help="Of a port that asks for a token: a link that opens it once, in a browser.")
@click.option("--token", is_flag=True, help="The token itself, for the header X-Forkyard-Preview-Token.")
@click.option("--rotate", is_flag=True, help="Make a new token first; the old one, its cookies and links are void.")
@pass_app
def url_command(app: App, sandbox_id: str, port: int, link: bool, token: bool, rotate: bool) -> None:
    """Print the address of a server in a sandbox. Opening it wakes the sandbox."""
    from forkyard.errors import InvalidRequest

    with app.client() as client:
        sandbox = find_sandbox(client, sandbox_id)
        preview = sandbox.rotate_preview(port) if rotate else sandbox.preview(port)
    if app.json:
        app.print_json(preview)
        return
    wanted = preview.link if link else preview.token if token else preview.url
    if wanted is None:
        raise InvalidRequest(
            f"Port {port} of {sandbox.id} asks for no token (access: {preview.access}): {preview.url}. "
            f"`forkyard set {sandbox.id} --port-access {port}=token` makes it ask."
            if preview.access != "token"
            else f"There is no link for {preview.url}; send the token (--token) in X-Forkyard-Preview-Token."
        )
    click.echo(wanted)
