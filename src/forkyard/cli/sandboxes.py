"""`create`, `ls`, `rm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from forkyard.cli import show
from forkyard.cli.app import PERSISTENCE, App, Verb, find_sandbox, given, pairs, pass_app, seconds, waiting
from forkyard.cli.policy import (
    access_options,
    policy_options,
    registry_option,
    secret_option,
    size,
    taken_access,
    taken_policy,
    with_values,
)

if TYPE_CHECKING:
    from forkyard import Sandbox, SandboxInfo


def mounts(_context: click.Context, _parameter: click.Parameter, typed: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in typed:
        wanted, colon, rest = one.partition(":")
        name, at, version = wanted.partition("@")
        path, _, mode = rest.partition(":")
        if not colon or not path.startswith("/") or (at and not version.isdecimal()):
            raise click.BadParameter(f"{one!r} is not NAME[@VERSION]:/PATH[:MODE]")
        found[path] = {"name": name, "mode": mode or "rw", **({"version": int(version)} if at else {})}
    return found


@click.command("create", cls=Verb)
@click.option("--name", help="For people; need not be unique.")
@click.option("--vcpus", type=int, default=1, show_default=True)
@click.option("--memory", "memory_mib", type=int, default=512, show_default=True, metavar="MIB")
@click.option("--disk", "disk_gib", type=int, default=8, show_default=True, metavar="GIB")
@click.option("--label", "labels", multiple=True, callback=pairs, metavar="KEY=VALUE", help="May be repeated.")
@click.option("--env", "-e", multiple=True, callback=pairs, metavar="KEY=VALUE", help="For every command in it.")
@click.option("--snapshot", metavar="SNAPSHOT", help="Id or name of a snapshot to go on from, in its shape.")
@click.option(
    "--file",
    "-f",
    "spec_file",
    metavar="FILE",
    help="A spec, such as forkyard.yaml; built first if need be (see build).",
)
@registry_option
@click.option("--idle-timeout", "idle_timeout_s", type=seconds, help="Sleeps when idle for this long. Default: 5m.")
@click.option("--ttl", "ttl_s", type=seconds, help="Ends this long after its creation. Default: never.")
@click.option("--on-ttl", type=click.Choice(["delete", "pause", "stop"]), help="What happens at the end of its ttl.")
@click.option(
    "--persistence",
    type=PERSISTENCE,
    help="ephemeral: deleted when it pauses or stops. sticky (default): may give way when the disk is full. "
    "persistent: never does.",
)
@click.option("--priority", type=int, help="0 to 10: of sticky sandboxes the lowest give way first. Default: 5.")
@click.option("--checkpoint-every", "checkpoint_every_s", type=seconds, help="Take a snapshot this often.")
@click.option("--checkpoints-kept", type=int, help="How many of those are kept. Default: 5.")
@policy_options
@access_options
@secret_option
@click.option(
    "--volume",
    "-v",
    "volumes",
    multiple=True,
    callback=mounts,
    metavar="NAME[@VERSION]:/PATH[:rw|ro|cow]",
    help="Mount a volume. rw (default): by one sandbox at a time. An older version with ro or cow. May be repeated.",
)
@click.option("--cache", multiple=True, type=click.Choice(["npm", "pip"]), help="A package cache. May be repeated.")
@click.option(
    "--identity", help="Id or name: repositories that it may use are at http://git.forkyard.internal in there."
)
@click.option(
    "--git",
    multiple=True,
    metavar="URL[#REV][:PATH]",
    help="Clone this repository, a hosted one by its name, to PATH (default: /repo) before it is said to be there. May be "
    "repeated.",
)
@click.option(
    "--git-secret",
    metavar="NAME",
    help="Secret with the password or token for them: one of --secret, or a stored one.",
)
@click.option(
    "--activity-threshold",
    "activity_threshold_bytes",
    type=size,
    metavar="SIZE",
    help="More traffic than this, in a quarter of the idle timeout, keeps it awake. Default: 4K.",
)
@pass_app
@click.pass_context
def create_command(
    context: click.Context, app: App, /, snapshot: str | None, spec_file: str | None, **options: Any
) -> None:
    """Create a sandbox and print its id.

    The first use of a new shape (vCPUs, memory, disk) builds its template once and takes longer. Times are seconds, or
    90s, 5m, 2h, 1d, or never.
    """
    if spec_file is not None:
        _only_the_spec(context, snapshot)
    typed = {"egress": taken_policy(options), "ingress": taken_access(options)}
    network = {way: policy for way, policy in typed.items() if policy is not None}
    secrets = options.pop("secrets")
    repos = _repos(options.pop("git"), options.pop("git_secret"))
    request = given(options)
    if repos:
        request["git"] = repos
    with app.client() as client:
        client.health()  # finds, or starts, the daemon before the spinner below turns
        if secrets:
            secrets = request["secrets"] = with_values(secrets, {info.name for info in client.secrets.list()})
        if snapshot is not None:
            from forkyard.cli.snapshots import find_snapshot

            found = request["snapshot"] = find_snapshot(client, snapshot)
            if network:  # who names one way shall not open the other
                was = client.sandboxes.get(found.info.sandbox_id).info.network
                network = {**was.model_dump(), **network}
        if spec_file is not None:
            from forkyard.cli.builds import built

            means = {name: request[name] for name in ("identity", "registry") if name in request}
            stored = {name: one for name, one in secrets.items() if "value" not in one}
            request["spec"] = built(app, client, spec_file, secrets=stored, **means)
        if network:
            request["network"] = network
        with waiting(app, "Creating a sandbox (the first of a shape takes a minute) …"):
            sandbox = client.sandboxes.create(**request)
    if app.json:
        app.print_json(sandbox.info)
    else:
        click.echo(sandbox.id)


def _only_the_spec(context: click.Context, snapshot: str | None) -> None:
    """What a spec says is not said a second time, and not only when it is built."""
    said = {"vcpus": "--vcpus", "memory_mib": "--memory", "disk_gib": "--disk"}
    typed = [
        option for name, option in said.items() if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    typed += ["--snapshot"] if snapshot is not None else []
    if typed:
        what = "base" if typed == ["--snapshot"] else "size"
        raise click.UsageError(f"--file and {', '.join(typed)}: the {what} of a spec stands in it.")


def _repos(given: tuple[str, ...], secret: str | None) -> list[str | dict[str, Any]]:
    if secret is None:
        return [*given]
    from forkyard.sdk.validation import git_repo

    return [git_repo(text).model_dump(exclude_defaults=True) | {"secret": secret} for text in given]


@click.command("ls", cls=Verb)
@click.option("--all", "-a", "everything", is_flag=True, help="Also those that have ended.")
@click.option("--label", "labels", multiple=True, callback=pairs, metavar="KEY=VALUE", help="May be repeated.")
@click.option("--state", help="Only those in this state: running, paused, stopped, failed …")
@pass_app
def ls_command(app: App, everything: bool, labels: dict[str, str], state: str | None) -> None:
    """List sandboxes."""
    with app.client() as client:
        found = [
            sandbox.info
            for sandbox in client.sandboxes.list(all=everything or state is not None, state=state, labels=labels)
        ]
    if app.json:
        app.print_json(found)
    else:
        columns = ("id", "name", "state", "cause", "shape", "age", *(("detail",) if everything else ()))
        show.table(columns, (_row(info)[: len(columns)] for info in found))


def _row(info: SandboxInfo) -> tuple[str, ...]:
    from forkyard.lifecycle import State

    shape = info.shape
    cause = "" if info.state in (State.CREATING, State.RUNNING) else show.cause(info)
    size = f"{shape.vcpus} cpu, {shape.memory_mib} MiB, {shape.disk_gib} GiB"
    detail = " ".join((info.cause_detail or "").split())
    return info.id, info.name or "", info.state.value, cause, size, show.age(info.created_at), detail


@click.command("rm", cls=Verb)
@click.argument("ids", nargs=-1, metavar="ID...")
@click.option("--all", "-a", "everything", is_flag=True, help="All sandboxes.")
@click.option("--force", "-f", is_flag=True, help="Do not ask, and do not mind sandboxes that are not there.")
@pass_app
@click.pass_context
def rm_command(ctx: click.Context, app: App, ids: tuple[str, ...], everything: bool, force: bool) -> None:
    """Delete sandboxes and all they own."""
    from forkyard.errors import ForkyardError, SandboxNotFound
    from forkyard.lifecycle import State

    if bool(ids) == everything:
        raise click.UsageError("Give the ids of the sandboxes to delete, or --all.")
    deleted: list[str] = []
    failed = False
    with app.client() as client:
        targets: list[Sandbox] = []
        if everything:
            targets = [sandbox for sandbox in client.sandboxes.list(all=True) if sandbox.state != State.DELETED]
            if targets and not force:
                click.confirm(f"Delete {len(targets)} sandboxes and all they own?", abort=True, err=True)
        for typed in ids:
            try:
                targets.append(find_sandbox(client, typed))
            except SandboxNotFound as error:
                if not force:
                    app.fail(error)
                    failed = True
        for sandbox in targets:
            try:
                sandbox.delete()
            except ForkyardError as error:
                app.fail(error)
                failed = True
            else:
                deleted.append(sandbox.id)
                if not app.json:
                    click.echo(sandbox.id)
    if app.json:
        app.print_json({"deleted": deleted})
    if failed:
        ctx.exit(1)
