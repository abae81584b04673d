"""`egress`: what left a sandbox; `egress allow | deny | set`: what may."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, find_sandbox, pass_app
from forkyard.cli.policy import policy_options, taken_policy, with_policy

if TYPE_CHECKING:
    from forkyard import EgressRecord, SandboxInfo


class _Group(click.Group):
    """`forkyard egress ID` is `forkyard egress log ID`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [word for word in args if not word.startswith("-")]
        if args and (not words or words[0] not in self.commands) and not {"-h", "--help"} & set(args):
            args = ["log", *args]
        return super().parse_args(ctx, args)


@click.group("egress", cls=_Group, short_help="Show what left a sandbox, and change what may.")
def egress_command() -> None:
    """Show what left a sandbox (egress ID), and change what may leave.

    Every connection and DNS query is a line: when, which command made it, where it went, how much, and whether it was
    allowed. `allow` and `deny` put a rule ahead of the others; `set` changes the preset, the limits, or the rules as a
    whole. All take effect at once.
    """


@egress_command.command("log", cls=Verb, short_help="Show what left a sandbox; the same as `egress ID`.")
@click.argument("sandbox_id", metavar="ID")
@click.option("--exec", "exec_id", metavar="EXEC", help="Only of this command (see ps).")
@click.option("--denied", is_flag=True, help="Only what was denied.")
@click.option("--kind", type=click.Choice(["tcp", "dns", "http"]), help="Only of this kind.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes.")
@click.option("--limit", "-n", type=click.IntRange(1, 1000), default=100, show_default=True, help="The last so many.")
@click.option("--jsonl", is_flag=True, help="All of it, one JSON document per line.")
@click.option("--totals", is_flag=True, help="Sums over its life instead.")
@pass_app
def log_command(
    app: App,
    sandbox_id: str,
    exec_id: str | None,
    denied: bool,
    kind: Any,
    follow: bool,
    limit: int,
    jsonl: bool,
    totals: bool,
) -> None:
    """Show the connections and DNS queries of a sandbox, also after its end."""
    verdict: Any = "denied" if denied else None
    with app.client() as client:
        egress = find_sandbox(client, sandbox_id).egress
        if totals:
            sums = egress.totals()
            if app.json:
                app.print_json(sums)
            else:
                show.table(("connections", "denied", "sent", "received"), [_sums(sums)])
            return
        if follow:
            for record in egress.follow(exec_id=exec_id, kind=kind, verdict=verdict):
                app.print_json(record) if app.json or jsonl else click.echo("  ".join(_row(record)).rstrip())
            return
        found = egress.list(exec_id=exec_id, kind=kind, verdict=verdict, tail=None if jsonl or exec_id else limit)
    if jsonl:
        for record in found:
            app.print_json(record)
    elif app.json:
        app.print_json(found)
    else:
        columns = ("at", "verdict", "kind", "destination", "sent", "received", "took", "exec", "process", "why")
        show.table(columns, (_row(record) for record in found[-limit:]))


def _row(record: EgressRecord) -> tuple[str, ...]:
    where = record.name or record.address or "?"
    if record.name and record.address and record.kind != "http":
        where = f"{record.name} ({record.address})"
    if record.port is not None and record.kind != "dns":
        where = f"{where}:{record.port}"
    if record.kind == "http":
        where = f"{record.method} {where}{record.path}" + (f" → {record.status}" if record.status else "")
    return (
        record.at.astimezone().strftime("%H:%M:%S"),
        record.verdict,
        record.kind,
        where,
        show.size(record.bytes_out),
        show.size(record.bytes_in),
        show.duration(record.duration_ms),
        record.exec_id or "-",
        record.process or "-",
        record.reason or "",
    )


def _sums(sums: Any) -> tuple[str, ...]:
    return str(sums.connections), str(sums.denied), show.size(sums.bytes_out), show.size(sums.bytes_in)


def _destination(function: Any) -> Any:
    for option in (
        click.option("--port", "ports", type=int, multiple=True, help="Only this port; may be repeated."),
        click.option("--cidr", metavar="CIDR", help="Addresses instead of a name; the only way to private networks."),
        click.argument("domain", required=False),
        click.argument("sandbox_id", metavar="ID"),
    ):
        function = option(function)
    return function


@egress_command.command("allow", cls=Verb)
@_destination
@pass_app
def allow(app: App, sandbox_id: str, domain: str | None, cidr: str | None, ports: tuple[int, ...]) -> None:
    """Let a sandbox reach a name (`*.example.com`: all below it) or addresses."""
    _one_of(domain, cidr)
    with app.client() as client:
        _show(app, find_sandbox(client, sandbox_id).egress.allow(domain, cidr=cidr, ports=ports))


@egress_command.command("deny", cls=Verb)
@_destination
@pass_app
def deny(app: App, sandbox_id: str, domain: str | None, cidr: str | None, ports: tuple[int, ...]) -> None:
    """Keep a sandbox from a name or addresses; open connections there end."""
    _one_of(domain, cidr)
    with app.client() as client:
        _show(app, find_sandbox(client, sandbox_id).egress.deny(domain, cidr=cidr, ports=ports))


@egress_command.command("set", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@policy_options
@click.option("--reset", is_flag=True, help="What is not given is as of a new sandbox: no rules, no limits.")
@pass_app
def set_(app: App, /, sandbox_id: str, reset: bool, **options: Any) -> None:
    """Change the policy of a sandbox for what leaves. What is not given stays as it is.

    Rules that are given take the place of all its rules; `allow` and `deny` add one.
    """
    policy = taken_policy(options)
    if policy is None and not reset:
        raise click.UsageError("Give what to change, for example --preset research, or --reset.")
    with app.client() as client:
        sandbox = find_sandbox(client, sandbox_id)
        network = sandbox.refresh().network.model_dump()
        egress = with_policy({} if reset else network["egress"], policy or {})
        _show(app, sandbox.egress.set({**network, "egress": egress}))


def _one_of(domain: str | None, cidr: str | None) -> None:
    if (domain is None) == (cidr is None):
        raise click.UsageError("Give a DOMAIN, or --cidr.")


def _show(app: App, info: SandboxInfo) -> None:
    app.print_json(info) if app.json else click.echo(info.id)
