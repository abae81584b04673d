"""`pause`, `resume`, `stop`, `start`, `resize`, `set`: what a sandbox does next, and on which terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkyard.cli.app import PERSISTENCE, App, Verb, find_sandbox, given, pairs, pass_app, seconds
from forkyard.cli.policy import access_options, size, taken_access, with_access

if TYPE_CHECKING:
    from forkyard import SandboxInfo


@click.command("pause", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.option("--durable", is_flag=True, help="Return when its memory is on disk.")
@pass_app
def pause_command(app: App, sandbox_id: str, durable: bool) -> None:
    """Put a sandbox to sleep. It goes on where it was with `resume`, or when it is next used."""
    with app.client() as client:
        _show(app, find_sandbox(client, sandbox_id).pause(durable=durable))


@click.command("resume", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.option("--no-memory", is_flag=True, help="Boot from its disk instead; what was in memory is dropped.")
@pass_app
def resume_command(app: App, sandbox_id: str, no_memory: bool) -> None:
    """Let a sandbox that sleeps go on where it was."""
    with app.client() as client:
        _show(app, find_sandbox(client, sandbox_id).resume(memory=not no_memory))


@click.command("stop", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@pass_app
def stop_command(app: App, sandbox_id: str) -> None:
    """Shut a sandbox down. Its disk stays."""
    with app.client() as client:
        _show(app, find_sandbox(client, sandbox_id).stop())


@click.command("start", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@pass_app
def start_command(app: App, sandbox_id: str) -> None:
    """Boot a stopped sandbox from its disk."""
    with app.client() as client:
        _show(app, find_sandbox(client, sandbox_id).start())


@click.command("resize", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.option("--vcpus", type=int)
@click.option("--memory", "memory_mib", type=int, metavar="MIB")
@click.option("--disk", "disk_gib", type=int, metavar="GIB", help="It can only grow.")
@pass_app
def resize_command(app: App, sandbox_id: str, vcpus: int | None, memory_mib: int | None, disk_gib: int | None) -> None:
    """Give a stopped sandbox another shape, for its next start. Of a paused one only the disk can change."""
    if vcpus is None and memory_mib is None and disk_gib is None:
        raise click.UsageError("Give what to change: --vcpus, --memory or --disk.")
    with app.client() as client:
        sandbox = find_sandbox(client, sandbox_id)
        _show(app, sandbox.resize(vcpus=vcpus, memory_mib=memory_mib, disk_gib=disk_gib))


@click.command("set", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.option("--name")
@click.option("--label", "labels", multiple=True, callback=pairs, metavar="KEY=VALUE", help="Replaces all its labels.")
@click.option("--idle-timeout", "idle_timeout_s", type=seconds, help="Sleeps when idle for this long, or never.")
@click.option("--ttl", "ttl_s", type=seconds, help="Ends this long from now, or never.")
@click.option("--on-ttl", type=click.Choice(["delete", "pause", "stop"]), help="What happens at the end of its ttl.")
@click.option("--persistence", type=PERSISTENCE, help="What may happen to it while it sleeps.")
@click.option("--priority", type=int, help="0 to 10: of sticky sandboxes the lowest are evicted first.")
@click.option("--checkpoint-every", "checkpoint_every_s", type=seconds, help="Take a snapshot this often, or never.")
@click.option("--checkpoints-kept", type=int, help="How many of those are kept.")
@click.option(
    "--activity-threshold",
    "activity_threshold_bytes",
    type=size,
    metavar="SIZE",
    help="More traffic than this, in a quarter of the idle timeout, keeps it awake.",
)
@access_options
@pass_app
def set_command(app: App, /, sandbox_id: str, **options: Any) -> None:
    """Change what `create` was told of a sandbox. What is not given stays as it is.

    What may leave it is changed by `egress allow`, `deny` and `set`.
    """
    access = taken_access(options)
    changes = given(options)
    if not changes and access is None:
        raise click.UsageError("Give what to change, for example --idle-timeout 10m.")
    with app.client() as client:
        sandbox = find_sandbox(client, sandbox_id)
        if access is not None:
            network = sandbox.refresh().network.model_dump()
            changes["network"] = {**network, "ingress": with_access(network["ingress"], access)}
        _show(app, sandbox.update(**changes))


def _show(app: App, info: SandboxInfo) -> None:
    app.print_json(info) if app.json else click.echo(info.id)
