"""`identities create | ls | rm | token | tokens | revoke | allow | deny | show`, `audit`."""

from __future__ import annotations

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, find_sandbox, pass_app, seconds


@click.group("identities")
def identities_command() -> None:
    """Who agents are, and what each may do. Its tokens are good for the API, for git and for SSH."""


@identities_command.command("create", cls=Verb)
@click.argument("name")
@pass_app
def create(app: App, name: str) -> None:
    """Make an identity and print its id. It may do nothing until it is allowed something."""
    with app.client() as client:
        made = client.identities.create(name)
    app.print_json(made) if app.json else click.echo(made.id)


@identities_command.command("ls", cls=Verb)
@click.option("--all", "managed", is_flag=True, help="Also those Forkyard made for itself.")
@pass_app
def ls(app: App, managed: bool) -> None:
    """List identities."""
    with app.client() as client:
        found = client.identities.list(managed=managed)
    if app.json:
        app.print_json(found)
        return
    show.table(("id", "name", "age"), ((one.id, one.name, show.age(one.created_at)) for one in found))


@identities_command.command("show", cls=Verb)
@click.argument("identity_id", metavar="ID")
@pass_app
def show_command(app: App, identity_id: str) -> None:
    """An identity, its tokens and what it may do."""
    with app.client() as client:
        info = client.identities.get(identity_id)
        tokens = client.identities.tokens(identity_id)
        repos = client.identities.repos(identity_id)
        sandboxes = client.identities.sandboxes(identity_id)
    if app.json:
        more = {"tokens": list(tokens), "repos": list(repos), "sandboxes": list(sandboxes)}
        app.print_json({**info.model_dump(mode="json"), **more})
        return
    click.echo(f"{info.id} {info.name}")
    for token in tokens:
        until = f", until {token.expires_at:%Y-%m-%d %H:%M}" if token.expires_at else ""
        click.echo(f"token    {token.id} {token.prefix}… {token.name or ''}{until}")
    for repo in repos:
        click.echo(f"repo     {repo.repo_id} {repo.permission}")
    for sandbox in sandboxes:
        users = "any user" if sandbox.allowed_users is None else ", ".join(sandbox.allowed_users)
        click.echo(f"sandbox  {sandbox.sandbox_id} as {users}")


@identities_command.command("rm", cls=Verb)
@click.argument("identity_id", metavar="ID")
@pass_app
def rm(app: App, identity_id: str) -> None:
    """Delete an identity, its tokens and permissions."""
    with app.client() as client:
        client.identities.delete(identity_id)
    app.print_json({"deleted": [identity_id]}) if app.json else click.echo(identity_id)


@identities_command.command("token", cls=Verb)
@click.argument("identity_id", metavar="ID")
@click.option("--name")
@click.option("--expires", type=seconds, default="never", show_default=True, help="Such as 90s, 5m, 2h, 1d.")
@click.option("--sandbox", "sandbox_id", metavar="ID", help="The sandbox it is for; the audit log names it.")
@pass_app
def token(app: App, identity_id: str, name: str | None, expires: float, sandbox_id: str | None) -> None:
    """Make a token and print it. It is shown this once."""
    with app.client() as client:
        made = client.identities.create_token(
            identity_id,
            name=name,
            expires_in_s=None if expires == float("inf") else expires,
            sandbox_id=find_sandbox(client, sandbox_id).id if sandbox_id else None,
        )
    app.print_json(made) if app.json else click.echo(made.token)


@identities_command.command("revoke", cls=Verb)
@click.argument("identity_id", metavar="ID")
@click.argument("token_id", metavar="TOKEN_ID")
@pass_app
def revoke(app: App, identity_id: str, token_id: str) -> None:
    """Revoke a token: from now on it opens nothing."""
    with app.client() as client:
        client.identities.revoke_token(identity_id, token_id)
    app.print_json({"revoked": [token_id]}) if app.json else click.echo(token_id)


@identities_command.command("allow", cls=Verb)
@click.argument("identity_id", metavar="ID")
@click.option("--repo", help="A repository, to read.")
@click.option("--write", is_flag=True, help="With --repo: also to write.")
@click.option("--sandbox", "sandbox_id", metavar="ID", help="A sandbox, to use.")
@click.option("--user", "users", multiple=True, help="With --sandbox: only as this Linux user. Repeatable.")
@pass_app
def allow(
    app: App, identity_id: str, repo: str | None, write: bool, sandbox_id: str | None, users: tuple[str, ...]
) -> None:
    """Let an identity use a repository or a sandbox."""
    if (repo is None) == (sandbox_id is None):
        raise click.UsageError("Give either --repo or --sandbox.")
    with app.client() as client:
        if repo is not None:
            granted: object = client.identities.grant_repo(identity_id, repo, "write" if write else "read")
        else:
            found = find_sandbox(client, sandbox_id or "").id
            granted = client.identities.grant_sandbox(identity_id, found, allowed_users=users or None)
    app.print_json(granted) if app.json else click.echo(identity_id)


@identities_command.command("deny", cls=Verb)
@click.argument("identity_id", metavar="ID")
@click.option("--repo")
@click.option("--sandbox", "sandbox_id", metavar="ID")
@pass_app
def deny(app: App, identity_id: str, repo: str | None, sandbox_id: str | None) -> None:
    """Take a repository or a sandbox from an identity."""
    if (repo is None) == (sandbox_id is None):
        raise click.UsageError("Give either --repo or --sandbox.")
    with app.client() as client:
        if repo is not None:
            client.identities.revoke_repo(identity_id, repo)
        else:
            client.identities.revoke_sandbox(identity_id, sandbox_id or "")
    app.print_json({"id": identity_id}) if app.json else click.echo(identity_id)


@click.command("audit", cls=Verb)
@click.option("--actor", "actor_id", metavar="ID", help="Only of this identity or API key.")
@click.option("--action", help="Only this, such as git.push.")
@click.option("--resource", metavar="ID", help="Only on this repository or sandbox.")
@click.option("-n", "limit", type=click.IntRange(1), default=50, show_default=True)
@pass_app
def audit_command(app: App, actor_id: str | None, action: str | None, resource: str | None, limit: int) -> None:
    """Who did what, newest first."""
    with app.client() as client:
        found = client.identities.audit(actor_id=actor_id, action=action, resource=resource, limit=limit)
    if app.json:
        app.print_json(list(found))
        return
    show.table(
        ("at", "who", "what", "on", "from", ""),
        (
            (
                f"{one.at:%Y-%m-%d %H:%M:%S}",
                one.actor_name,
                one.action,
                one.resource or "",
                one.sandbox_id or one.address or "",
                "" if one.allowed else "refused",
            )
            for one in found
        ),
    )
