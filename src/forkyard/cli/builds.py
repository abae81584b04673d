"""`build`, `builds ls | logs | rm | prune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, pairs, pass_app, waiting
from forkyard.cli.policy import Login, policy_options, registry_option, secret_option, taken_policy

if TYPE_CHECKING:
    from forkyard import Build, BuildInfo, Forkyard, LayerInfo, Spec
    from forkyard.models.builds import BuildEnd, BuildOutput, BuildPhase

DEFAULT_FILE = "forkyard.yaml"


@click.command("build", cls=Verb)
@click.argument("context", required=False, type=click.Path(exists=True, file_okay=False))
@click.option("--file", "-f", "spec_file", metavar="FILE", help=f"The spec. Default: {DEFAULT_FILE}.")
@click.option("--dockerfile", metavar="FILE", help="Build a Dockerfile instead; COPY finds files in CONTEXT.")
@click.option("--build-arg", "args", multiple=True, callback=pairs, metavar="NAME=VALUE", help="Of the Dockerfile.")
@click.option("--target", help="Stage of the Dockerfile. Default: the last.")
@click.option("--image", metavar="IMAGE", help="Start from this image: registry/name:tag, an archive, a layout.")
@click.option(
    "--explain", is_flag=True, help="Build nothing; say which layers are in the cache, and why others are not."
)
@click.option("--skip-cache", is_flag=True, help="Build all layers even if they are there.")
@click.option("--identity", help="Whose hosted repositories the build may clone.")
@policy_options
@registry_option
@secret_option
@click.option("--allow-secrets", is_flag=True, help="Also keep a layer that holds the value of a stored secret.")
@pass_app
def build_command(
    app: App,
    /,
    context: str | None,
    spec_file: str | None,
    dockerfile: str | None,
    args: dict[str, str],
    target: str | None,
    image: str | None,
    explain: bool,
    skip_cache: bool,
    identity: str | None,
    registry: Login | None,
    secrets: dict[str, Any],
    allow_secrets: bool,
    **options: Any,
) -> None:
    """Build a spec in layers and print the snapshot that sandboxes are made from.

    Or a Dockerfile: `build --dockerfile Dockerfile .`

    What it does is shown as it happens. Ctrl-C leaves it running: `builds logs -f` shows it again. What the build may
    reach, its sandboxes need not: they have a policy of their own.
    """
    from forkyard import Spec

    egress = taken_policy(options)
    if sum(option is not None for option in (spec_file, dockerfile, image)) > 1:
        raise click.UsageError("give one of --file, --dockerfile and --image")
    if dockerfile is not None:
        spec = Spec().dockerfile(Path(dockerfile), context, args=args, target=target)
    elif image is not None:
        spec = Spec().from_image(image)
    else:
        spec = Spec.load(spec_file or DEFAULT_FILE)
    with app.client() as client:
        if explain:
            found = client.builds.explain(spec, skip_cache=skip_cache, registry=registry, allow_secrets=allow_secrets)
            _plan(app, found)
            return
        build = client.builds.create(
            spec,
            skip_cache=skip_cache,
            network=None if egress is None else {"egress": egress},
            identity=identity,
            registry=registry,
            secrets=secrets,
            allow_secrets=allow_secrets,
        )
        info = _followed(app, build)
    if app.json:
        app.print_json(info)
    else:
        click.echo(info.snapshot_id)


def built(app: App, client: Forkyard, spec_file: str, **means: Any) -> Spec:
    """A spec from a file, in the cache: its build is shown if there is anything to build. `means`: its `identity`,
    `registry` and stored `secrets`."""
    from forkyard import Spec

    spec = Spec.load(spec_file)
    with waiting(app, "Looking at what is there (a new image is imported, a new shape booted first) …"):
        layers = client.builds.explain(spec, registry=means.get("registry"))
    if not all(layer.cached for layer in layers):
        _followed(app, client.builds.create(spec, **means))
        spec = spec.from_cache()
    return spec


def _followed(app: App, build: Build, *, events: bool = False) -> BuildInfo:
    """Shows it to its end; to programs only if they asked for `events`. `BuildFailed` if it fails."""
    from forkyard.errors import BuildFailed

    try:
        for event in build.logs(follow=True):
            if not app.json:
                _show(event)
            elif events:
                app.print_json(event)
        return build.wait()
    except KeyboardInterrupt:
        app.progress(f"build {build.id} goes on; forkyard builds logs -f {build.id} shows it")
        raise
    except BuildFailed as error:
        if not app.json:
            _diagnosis(error.details)
        raise


def _show(event: BuildPhase | BuildOutput | BuildEnd) -> None:
    if event.type == "output":
        click.echo(event.text, nl=False, err=True)
    elif event.type == "phase":
        mark = {"step": "→", "done": "✓", "cached": "=", "waiting": "…"}.get(event.phase, "•")
        took = f" ({show.duration(event.duration_ms)})" if event.duration_ms is not None else ""
        click.echo(click.style(f"{mark} {event.text}{took}", bold=event.phase == "layer", fg="cyan"), err=True)
    elif event.state != "succeeded":
        click.echo(click.style(f"✗ {event.state}", fg="red"), err=True)


def _diagnosis(details: dict[str, object]) -> None:
    units = details.get("units")
    for unit in units if isinstance(units, list) else ():
        click.echo(f"service {unit['name']}: {unit['active']} ({unit['sub']}, {unit['result']})", err=True)
        click.echo("".join(f"  {line}\n" for line in unit["log"].splitlines()[-20:]), nl=False, err=True)
    if snapshot := details.get("debug_snapshot_id"):
        click.echo(f"The machine as it was: forkyard create --snapshot {snapshot}", err=True)


def _plan(app: App, layers: list[LayerInfo]) -> None:
    if app.json:
        app.print_json(layers)
        return
    show.table(
        ("layer", "key", "cache", "why", "steps"),
        (
            (str(layer.index), layer.key[:12], "hit" if layer.cached else "miss", layer.reason, "; ".join(layer.steps))
            for layer in layers
        ),
    )


@click.group("builds")
def builds_command() -> None:
    """Builds of specs, and the layers they leave."""


@builds_command.command("ls", cls=Verb)
@pass_app
def ls(app: App) -> None:
    """List builds, newest first."""
    with app.client() as client:
        found = [build.info for build in client.builds.list()]
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("id", "name", "state", "layers", "snapshot", "age", "detail"),
        (
            (
                info.id,
                info.name or "",
                info.state,
                f"{sum(layer.cached for layer in info.layers)}/{len(info.layers)} cached",
                info.snapshot_id or "",
                show.age(info.created_at),
                "" if info.failure is None else " ".join(info.failure.message.split()),
            )
            for info in found
        ),
    )


@builds_command.command("logs", cls=Verb)
@click.argument("build_id", metavar="BUILD")
@click.option("--follow", "-f", is_flag=True, help="Go on until it ends.")
@pass_app
def logs(app: App, build_id: str, follow: bool) -> None:
    """Show what a build does and prints.

    With --follow it ends as `build` does: with the snapshot, or with what went wrong.
    """
    with app.client() as client:
        build = client.builds.get(build_id)
        if follow:
            info = _followed(app, build, events=True)
            if not app.json:
                click.echo(info.snapshot_id)
            return
        for event in build.logs():
            app.print_json(event) if app.json else _show(event)


@builds_command.command("rm", cls=Verb)
@click.argument("build_ids", nargs=-1, required=True, metavar="BUILD...")
@pass_app
def rm(app: App, build_ids: tuple[str, ...]) -> None:
    """End and forget builds. Layers stay in the cache."""
    with app.client() as client:
        for build_id in build_ids:
            client.builds.delete(build_id)
            if not app.json:
                click.echo(build_id)
    if app.json:
        app.print_json({"deleted": list(build_ids)})


@builds_command.command("prune", cls=Verb)
@pass_app
def prune(app: App) -> None:
    """Remove all layers that no build works on. Sandboxes made from them go on."""
    with app.client() as client:
        done = client.builds.prune()
    app.print_json(done) if app.json else click.echo(f"{done.layers} layers, {show.size(done.freed_bytes)}")
