"""`fork`, `tree`: copies of a sandbox, and who comes from whom."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, find_sandbox, pairs, pass_app

if TYPE_CHECKING:
    from rich.text import Text

    from forkyard import SandboxInfo


@click.command("fork", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.option("--count", "-n", type=int, default=1, show_default=True, help="How many.")
@click.option("--name", help="Of the children. Default: none.")
@click.option("--label", "labels", multiple=True, callback=pairs, metavar="KEY=VALUE", help="Default: the parent's.")
@pass_app
@click.pass_context
def fork_command(
    ctx: click.Context, app: App, sandbox_id: str, count: int, name: str | None, labels: dict[str, str]
) -> None:
    """Make running copies of a sandbox as it is now, memory and processes included, and print their ids.

    Exit code 1 if one of them could not be made; the others are there.
    """
    with app.client() as client:
        parent = find_sandbox(client, sandbox_id)
        outcomes = parent.fork(count, name=name, labels=labels or None, partial=True)
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if app.json:
        children = [
            {
                "sandbox": outcome.sandbox and outcome.sandbox.info,
                "problem": outcome.error and outcome.error.to_problem(),
            }
            for outcome in outcomes
        ]
        paused_ms = outcomes[0].paused_ms if outcomes else 0.0
        app.print_json({"parent_id": parent.id, "paused_ms": paused_ms, "children": children})
    else:
        for outcome in outcomes:
            if outcome.sandbox:
                click.echo(outcome.sandbox.id)
    for error in errors:
        app.fail(error)
    if errors:
        ctx.exit(1)


@click.command("tree", cls=Verb)
@click.argument("sandbox_id", metavar="[ID]", required=False)
@click.option("--all", "-a", "everything", is_flag=True, help="Also those that have ended without a living descendant.")
@pass_app
def tree_command(app: App, sandbox_id: str | None, everything: bool) -> None:
    """Draw which sandbox was forked from which: the family of one, or all of them.

    Those that have ended are shown, dimmed, where something that lives comes from them.
    """
    with app.client() as client:
        chosen = find_sandbox(client, sandbox_id).id if sandbox_id else None
        infos = [sandbox.info for sandbox in client.sandboxes.list(all=True)]
    family = lineage(infos, chosen, everything)
    if app.json:
        app.print_json(_nested(family))
    else:
        _draw(family, chosen)


def lineage(infos: Iterable[SandboxInfo], chosen: str | None, everything: bool) -> list[SandboxInfo]:
    """What to show, every parent before its children."""
    from forkyard.lifecycle import ENDED

    known = {info.id: info for info in sorted(infos, key=lambda info: info.created_at)}
    root: dict[str, str] = {}
    for info in known.values():
        root[info.id] = root.get(info.parent_id or "", info.id)
    shown = {info.id for info in known.values() if everything or info.state not in ENDED or info.id == chosen}
    for sandbox_id in list(shown):
        parent = known[sandbox_id].parent_id
        while parent in known and parent not in shown:
            shown.add(parent)
            parent = known[parent].parent_id
    return [info for info in known.values() if info.id in shown and (chosen is None or root[info.id] == root[chosen])]


def _nested(family: list[SandboxInfo]) -> list[dict[str, Any]]:
    nodes: dict[str | None, dict[str, Any]] = {}
    roots: list[dict[str, Any]] = []
    for info in family:
        node = nodes[info.id] = {"sandbox": info, "children": []}
        (nodes[info.parent_id]["children"] if info.parent_id in nodes else roots).append(node)
    return roots


def _draw(family: list[SandboxInfo], chosen: str | None) -> None:
    from rich.console import Console
    from rich.tree import Tree

    trees: dict[str | None, Tree] = {}
    roots = []
    for info in family:
        label = _label(info, info.id == chosen)
        if info.parent_id in trees:
            trees[info.id] = trees[info.parent_id].add(label)
        else:
            trees[info.id] = Tree(label)
            roots.append(trees[info.id])
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 4096, highlight=False)
    for tree in roots:
        console.print(tree)


def _label(info: SandboxInfo, chosen: bool) -> Text:
    from rich.text import Text

    from forkyard.lifecycle import ENDED

    ended = info.state in ENDED
    state = f"{info.state.value}, {show.cause(info)}" if ended else info.state.value
    words = [
        (info.id, "bold" if chosen else ""),
        *([(info.name, "")] if info.name else []),
        (state, "" if ended else show.STYLES.get(state, "")),
        (show.age(info.created_at), "dim"),
    ]
    label = Text("  ").join(Text(word, style=style) for word, style in words)
    if ended:
        label.stylize("dim")
    return label
