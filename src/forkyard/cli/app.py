"""What all commands share: global options, the client, finding a sandbox by what was typed, and how errors are shown.

Commands import what is heavy (the SDK, rich) inside their functions, so that `forkyard --help` is quick.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from forkyard import Forkyard, ForkyardError, Sandbox


@dataclass
class App:
    """The options before the command. `--json` is also accepted after it."""

    url: str | None = None
    api_key: str | None = None
    json: bool = False

    def client(self, *, start: bool = True) -> Forkyard:
        from forkyard import Forkyard

        return Forkyard(self.url, self.api_key, start=start, progress=self.progress)

    def progress(self, message: str) -> None:
        if not self.json:
            click.echo(f"forkyard: {message}", err=True)

    def fail(self, error: ForkyardError) -> None:
        """On stderr: a problem document with `--json`, else a line or two for people."""
        if self.json:
            click.echo(json.dumps(error.to_problem()), err=True)
        else:
            click.echo(f"{click.style('error:', fg='red', bold=True)} {error.message}", err=True)

    def print_json(self, document: Any) -> None:
        click.echo(json.dumps(document, default=_plain))


def _plain(value: Any) -> Any:
    """Wire types as the API spells them."""
    return value.model_dump(mode="json")


pass_app = click.make_pass_decorator(App, ensure=True)


class Verb(click.Command):
    """A command with `--json`, whose errors are shown and not thrown."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(json_option())

    def invoke(self, ctx: click.Context) -> Any:
        from forkyard.errors import ForkyardError

        try:
            return super().invoke(ctx)
        except ForkyardError as error:
            ctx.ensure_object(App).fail(error)
            ctx.exit(1)


def json_option() -> click.Option:
    def remember(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(App).json = True

    return click.Option(
        ["--json"],
        is_flag=True,
        expose_value=False,
        callback=remember,
        help="Machine-readable output: one JSON document, or one per line for streams.",
    )


def pairs(_ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """KEY=VALUE options."""
    found = {}
    for value in values:
        key, equals, rest = value.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{value!r} is not of the form KEY=VALUE.", param=param)
        found[key] = rest
    return found


#: What `never` is among seconds; None is "not given".
NEVER = math.inf
_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str) -> float:
    """`300`, `90s`, `5m`, `2h`, `1d`, `never`."""
    if text == "never":
        return NEVER
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is no time. Give seconds, or 90s, 5m, 2h, 1d, or never.")
    return float(found[1]) * _UNITS_S[found[2]]


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were typed, `never` as the SDK spells it."""
    return {name: None if value == NEVER else value for name, value in options.items() if value not in (None, {}, ())}


PERSISTENCE = click.Choice(["ephemeral", "until-stopped", "sticky", "persistent"])


def find_sandbox(client: Forkyard, typed: str) -> Sandbox:
    """A sandbox by its id, its name, or the beginning of its id. Those that run win over those that have ended."""
    from forkyard.errors import InvalidRequest, SandboxNotFound

    if len(typed) == 20 and typed.isalnum():
        try:
            return client.sandboxes.get(typed)
        except SandboxNotFound:
            pass  # it may be a name of this length
    for ended in (False, True):
        candidates = client.sandboxes.list(all=ended)
        matches = [sandbox for sandbox in candidates if sandbox.name == typed]
        matches = matches or [sandbox for sandbox in candidates if typed and sandbox.id.startswith(typed)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            ids = ", ".join(sandbox.id for sandbox in matches[:5]) + (" …" if len(matches) > 5 else "")
            raise InvalidRequest(f"{typed!r} means {len(matches)} sandboxes ({ids}). Give more of the id.", given=typed)
    raise SandboxNotFound(f"There is no sandbox {typed!r}. `forkyard ls` lists those that run.", given=typed)


def interactive() -> bool:
    """Somebody looks at the messages."""
    return sys.stderr.isatty()


def waiting(app: App, message: str) -> contextlib.AbstractContextManager[object]:
    """Says so meanwhile, to somebody who looks."""
    if app.json or not interactive():
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(message)
