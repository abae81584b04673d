"""`git triggers …`, `git remotes …`, `git sync`: added to the `git` group by `cli.git`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from forkyard.cli import show
from forkyard.cli.app import NEVER, App, Verb, find_sandbox, pairs, pass_app, seconds

if TYPE_CHECKING:
    from forkyard.models.git_triggers import GitHubApp, RefState

EVENTS = ("push", "branch.created", "branch.deleted", "tag.created", "tag.deleted")


@click.group("triggers")
def triggers() -> None:
    """What shall happen when a branch or a tag changes."""


@triggers.command("add", cls=Verb)
@click.argument("repo")
@click.option("--webhook", metavar="URL", help="Post the event there, signed.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", callback=pairs, help="With --webhook.")
@click.option("--secret-stdin", is_flag=True, help="With --webhook: read a secret for an HMAC from standard input.")
@click.option("--allow-private", is_flag=True, help="The URL may lead to this host or into a private network.")
@click.option("--sandbox", is_flag=True, help="Create a sandbox.")
@click.option("--snapshot", help="With --sandbox: start from this one.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", callback=pairs, help="With --sandbox or --exec.")
@click.option("--exec", "command", metavar="COMMAND", help="Run this in the sandbox given with --in.")
@click.option("--in", "sandbox_id", metavar="SANDBOX", help="With --exec.")
@click.option("--user", default="root", show_default=True, help="With --exec.")
@click.option("--spec", "spec_file", metavar="FILE", help="Build this spec; with --sandbox: a sandbox of it.")
@click.option("--event", "events", multiple=True, type=click.Choice(EVENTS), default=("push",), show_default=True)
@click.option("--branch", "branches", multiple=True, metavar="GLOB", help="Only these. Repeatable.")
@click.option("--tag", "tags", multiple=True, metavar="GLOB", help="Only these. Repeatable.")
@click.option("--path", "paths", multiple=True, metavar="GLOB", help="Only if such a file changed. Repeatable.")
@pass_app
def add(
    app: App,
    repo: str,
    webhook: str | None,
    headers: dict[str, str],
    secret_stdin: bool,
    allow_private: bool,
    sandbox: bool,
    snapshot: str | None,
    env: dict[str, str],
    command: str | None,
    sandbox_id: str | None,
    user: str,
    spec_file: str | None,
    events: tuple[Any, ...],
    branches: tuple[str, ...],
    tags: tuple[str, ...],
    paths: tuple[str, ...],
) -> None:
    """Add a trigger, and print its id."""
    runs_spec = spec_file is not None and not sandbox
    if (webhook is not None) + sandbox + (command is not None) + runs_spec != 1:
        raise click.UsageError("Give one of --webhook, --sandbox, --spec and --exec.")
    action: dict[str, Any]
    spec = None if spec_file is None else _spec(spec_file)
    if webhook is not None:
        action = {"type": "webhook", "url": webhook, "headers": headers, "allow_private": allow_private}
        if secret_stdin:
            action["secret"] = sys.stdin.read().removesuffix("\n")
    elif sandbox:
        action = {"type": "sandbox", "sandbox": {"env": env, "snapshot": snapshot, "spec": spec}}
    elif spec is not None:
        action = {"type": "spec", "spec": spec}
    else:
        if sandbox_id is None:
            raise click.UsageError("--exec needs --in.")
        action = {"type": "exec", "command": command, "user": user, "env": env}
    with app.client() as client:
        if command is not None and sandbox_id is not None:
            action["sandbox_id"] = find_sandbox(client, sandbox_id).id
        made = client.git.repo(repo).triggers.create(action, events=events, branches=branches, tags=tags, paths=paths)
    app.print_json(made) if app.json else click.echo(made.id)


def _spec(file: str) -> dict[str, Any]:
    from forkyard.sdk.spec import Spec

    return Spec.load(file).to_dict()


@triggers.command("ls", cls=Verb)
@click.argument("repo")
@pass_app
def ls(app: App, repo: str) -> None:
    """List triggers."""
    with app.client() as client:
        found = client.git.repo(repo).triggers.list()
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("id", "action", "events", "only", "on"),
        (
            (
                one.id,
                str(one.action.get("url") or one.action.get("command") or one.action["type"]),
                " ".join(one.events),
                " ".join([*one.branches, *one.tags, *one.paths]),
                "yes" if one.enabled else "no",
            )
            for one in found
        ),
    )


@triggers.command("set", cls=Verb)
@click.argument("repo")
@click.argument("trigger")
@click.option("--on/--off", "enabled", required=True)
@pass_app
def set_(app: App, repo: str, trigger: str, enabled: bool) -> None:
    """Turn a trigger on or off."""
    with app.client() as client:
        changed = client.git.repo(repo).triggers.update(trigger, enabled=enabled)
    app.print_json(changed) if app.json else click.echo(changed.id)


@triggers.command("rm", cls=Verb)
@click.argument("repo")
@click.argument("trigger")
@pass_app
def rm(app: App, repo: str, trigger: str) -> None:
    """Delete a trigger and its log."""
    with app.client() as client:
        client.git.repo(repo).triggers.delete(trigger)
    app.print_json({"deleted": [trigger]}) if app.json else click.echo(trigger)


@triggers.command("deliveries", cls=Verb)
@click.argument("repo")
@click.argument("trigger")
@click.option("--status", type=click.Choice(("pending", "delivered", "failed")))
@click.option("-n", "limit", type=click.IntRange(1), default=20, show_default=True)
@pass_app
def deliveries(
    app: App, repo: str, trigger: str, status: Literal["pending", "delivered", "failed"] | None, limit: int
) -> None:
    """What a trigger told, newest first."""
    with app.client() as client:
        found = client.git.repo(repo).triggers.deliveries(trigger, status=status, limit=limit)
    if app.json:
        app.print_json(found)
        return
    rows = []
    for one in found:
        last = one.attempts[-1] if one.attempts else None
        how = "" if last is None else last.error or str(last.status or "")
        rows.append((one.id, show.age(one.created_at), one.event, one.ref, one.status, str(len(one.attempts)), how))
    show.table(("id", "age", "event", "ref", "status", "tries", "last"), rows)


@triggers.command("redeliver", cls=Verb)
@click.argument("repo")
@click.argument("trigger")
@click.argument("delivery")
@pass_app
def redeliver(app: App, repo: str, trigger: str, delivery: str) -> None:
    """Deliver again, with the same id and payload."""
    with app.client() as client:
        begun = client.git.repo(repo).triggers.redeliver(trigger, delivery)
    app.print_json(begun) if app.json else click.echo(begun.id)


@click.group("remotes")
def remotes() -> None:
    """Other git hosts that a repository is kept in step with."""


@remotes.command("add", cls=Verb)
@click.argument("repo")
@click.argument("url")
@click.option("--name", default="origin", show_default=True)
@click.option("--direction", type=click.Choice(("both", "in", "out")), default="both", show_default=True)
@click.option("--branch", "branches", multiple=True, metavar="GLOB", help="Only these. Repeatable.")
@click.option("--no-tags", is_flag=True)
@click.option("--username", default="git", show_default=True)
@click.option("--secret", metavar="NAME", help="Stored secret with the password or token.")
@click.option("--github-app", metavar="APP:INSTALLATION:SECRET", help="An installation of a GitHub App, instead.")
@click.option("--poll", "poll_s", type=seconds, default="5m", show_default=True, help="How often to look, or never.")
@pass_app
def add_remote(
    app: App,
    repo: str,
    url: str,
    name: str,
    direction: Literal["both", "in", "out"],
    branches: tuple[str, ...],
    no_tags: bool,
    username: str,
    secret: str | None,
    github_app: str | None,
    poll_s: float,
) -> None:
    """Keep REPO in step with what is at URL. Prints where that host's webhook should go, and its secret."""
    installed = None if github_app is None else _installed(github_app)
    with app.client() as client:
        made = client.git.repo(repo).remotes.create(
            url,
            name,
            direction=direction,
            branches=branches,
            tags=not no_tags,
            username=username,
            secret=secret,
            github_app=installed,
            poll_s=None if poll_s == NEVER else poll_s,
        )
    if app.json:
        app.print_json(made)
        return
    click.echo(f"webhook: {made.hook_path}\nsecret:  {made.hook_secret}")


def _installed(text: str) -> GitHubApp:
    from forkyard.models.git_triggers import GitHubApp

    parts = text.split(":")
    if len(parts) != 3 or not parts[1].isdigit():
        raise click.BadParameter("must be APP:INSTALLATION:SECRET", param_hint="--github-app")
    return GitHubApp(app_id=parts[0], installation_id=int(parts[1]), private_key_secret=parts[2])


@remotes.command("set", cls=Verb)
@click.argument("repo")
@click.argument("remote", metavar="NAME")
@click.option("--name", help="Call it this from now on.")
@click.option("--url", help="It is somewhere else now, and compared anew.")
@click.option("--direction", type=click.Choice(("both", "in", "out")))
@click.option("--branch", "branches", multiple=True, metavar="GLOB", help="Only these. Repeatable.")
@click.option("--username")
@click.option("--secret", metavar="NAME", help="Stored secret with the password or token; empty: none.")
@click.option("--github-app", metavar="APP:INSTALLATION:SECRET", help="An installation of a GitHub App; empty: none.")
@click.option("--poll", "poll_s", type=seconds, help="How often to look, or never.")
@pass_app
def set_remote(app: App, /, repo: str, remote: str, **options: Any) -> None:
    """Change a remote."""
    changes = {key: value for key, value in options.items() if value not in (None, ())}
    if not changes:
        raise click.UsageError("Say what to change.")
    if "branches" in changes:
        changes["branches"] = list(changes["branches"])
    if "secret" in changes:
        changes["secret"] = changes["secret"] or None
    if "github_app" in changes:
        changes["github_app"] = _installed(changes["github_app"]) if changes["github_app"] else None
    if changes.get("poll_s") == NEVER:
        changes["poll_s"] = None
    with app.client() as client:
        changed = client.git.repo(repo).remotes.update(remote, **changes)
    app.print_json(changed) if app.json else click.echo(changed.name)


@remotes.command("ls", cls=Verb)
@click.argument("repo")
@pass_app
def ls_remotes(app: App, repo: str) -> None:
    """List remotes."""
    with app.client() as client:
        found = client.git.repo(repo).remotes.list()
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("name", "url", "direction", "synced", "state"),
        (
            (
                one.name,
                one.url,
                one.direction,
                "never" if one.synced_at is None else f"{show.age(one.synced_at)} ago",
                one.error or ("in step" if one.in_step else "not in step"),
            )
            for one in found
        ),
    )


@remotes.command("show", cls=Verb)
@click.argument("repo")
@click.argument("name", default="origin")
@pass_app
def show_remote(app: App, repo: str, name: str) -> None:
    """How branches and tags stood at the last sync."""
    with app.client() as client:
        found = client.git.repo(repo).remotes.refs(name)
    app.print_json(found) if app.json else _table(found)


@remotes.command("rm", cls=Verb)
@click.argument("repo")
@click.argument("name")
@pass_app
def rm_remote(app: App, repo: str, name: str) -> None:
    """Keep in step no longer. Both sides stay as they are."""
    with app.client() as client:
        client.git.repo(repo).remotes.delete(name)
    app.print_json({"deleted": [name]}) if app.json else click.echo(name)


@click.command("sync", cls=Verb)
@click.argument("repo")
@click.argument("name", default="origin")
@pass_app
def sync(app: App, repo: str, name: str) -> None:
    """Bring a repository and a remote into step, now. What has diverged is listed and left."""
    with app.client() as client:
        report = client.git.repo(repo).remotes.sync(name)
    if app.json:
        app.print_json(report)
        return
    for ref in report.pulled:
        click.echo(f"pulled {ref}")
    for ref in report.pushed:
        click.echo(f"pushed {ref}")
    _table([state for state in report.refs if state.state != "in_step"])


def _table(states: Sequence[RefState]) -> None:
    rows = [
        (one.ref, one.state, (one.local_sha or "-")[:12], (one.remote_sha or "-")[:12], one.detail or "")
        for one in states
    ]
    if rows:
        show.table(("ref", "state", "here", "there", "why"), rows)
