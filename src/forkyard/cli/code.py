"""`run-code`, `contexts ls | add | restart | interrupt | rm`."""

from __future__ import annotations

import base64
import sys
from typing import TYPE_CHECKING, Any

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, find_sandbox, given, pairs, pass_app, seconds

if TYPE_CHECKING:
    from pathlib import Path

    from forkyard import CodeResult

TIMED_OUT = 124
INTERRUPTED = 130
_LANGUAGES = click.Choice(["python", "javascript", "typescript", "bash"])
_BY_SUFFIX = {".py": "python", ".js": "javascript", ".mjs": "javascript", ".ts": "typescript", ".sh": "bash"}


@click.command("run-code", cls=Verb, short_help="Run code in a sandbox; what it defines is there in the next run.")
@click.argument("sandbox_id", metavar="ID")
@click.argument("source", metavar="[FILE|-]", default="-")
@click.option("--code", "-c", help="The code itself, instead of a file.")
@click.option(
    "--language", "-l", type=_LANGUAGES, help="Default: by the file's name, else that of the context, else Python."
)
@click.option("--context", metavar="CONTEXT", help="Id of a context. Default: the one of the language.")
@click.option("--env", "-e", multiple=True, callback=pairs, metavar="KEY=VALUE", help="May be repeated.")
@click.option("--timeout", "timeout_s", type=seconds, help="Then interrupt it; the context goes on.")
@click.option("--save", metavar="DIR", help="Write pictures that it shows into this directory.")
@pass_app
@click.pass_context
def run_code_command(
    ctx: click.Context,
    app: App,
    /,
    sandbox_id: str,
    source: str,
    code: str | None,
    save: str | None,
    **options: Any,
) -> None:
    """Run code from a file, or from standard input, in a sandbox.

    What it prints is printed; so is the value of its last expression. The exit code is 0 if it ended well, 1 if it raised
    something, 124 after --timeout. With --json every event is a line.
    """
    from pathlib import Path

    from forkyard import CodeEnd, CodeException, CodeOutput, CodeResult

    if code is None:
        code = _read(source)
        options["language"] = options["language"] or _BY_SUFFIX.get(Path(source).suffix)
    status = "died"
    shown = 0
    with app.client() as client, find_sandbox(client, sandbox_id).run_code_stream(code, **given(options)) as events:
        for event in events:
            if isinstance(event, CodeEnd):
                status = event.status
            if app.json:
                app.print_json(event)
            elif isinstance(event, CodeOutput):
                click.echo(event.text, nl=False, err=event.stream == "stderr")
            elif isinstance(event, CodeException):
                click.echo(event.traceback or f"{event.name}: {event.value}", err=True)
            elif isinstance(event, CodeResult):
                shown += 1
                _show(event, Path(save) if save else None, shown)
    ctx.exit({"ok": 0, "timed_out": TIMED_OUT, "interrupted": INTERRUPTED}.get(status, 1))


def _read(source: str) -> str:
    from pathlib import Path

    from forkyard.errors import InvalidRequest

    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text("utf-8")
    except OSError as error:
        raise InvalidRequest(f"{source} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{source} is not UTF-8: {error}") from None


def _show(result: CodeResult, folder: Path | None, number: int) -> None:
    text = result.markdown or result.text
    for name in ("png", "jpeg", "svg", "pdf"):
        content = getattr(result, name)
        if content is not None and folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{number}.{name}"
            file.write_bytes(content.encode() if name == "svg" else base64.b64decode(content))
            text = str(file)
    if text is not None:
        click.echo(text)


@click.group("contexts")
def contexts_command() -> None:
    """What remembers code that was run: variables, functions, imports."""


@contexts_command.command("ls", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@pass_app
def ls(app: App, sandbox_id: str) -> None:
    """List contexts."""
    with app.client() as client:
        found = find_sandbox(client, sandbox_id).contexts.list()
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("id", "language", "user", "cwd"), ((info.id, info.language, info.user, info.cwd or "") for info in found)
    )


@contexts_command.command("add", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@click.option("--language", "-l", type=_LANGUAGES, default="python", show_default=True)
@click.option("--user")
@click.option("--cwd")
@click.option("--env", "-e", multiple=True, callback=pairs, metavar="KEY=VALUE", help="May be repeated.")
@pass_app
def add(app: App, /, sandbox_id: str, **options: Any) -> None:
    """Make a context, and print its id."""
    with app.client() as client:
        info = find_sandbox(client, sandbox_id).contexts.create(**given(options))
    app.print_json(info) if app.json else click.echo(info.id)


def _on_one(name: str, method: str, text: str) -> click.Command:
    @click.command(name, cls=Verb, help=text)
    @click.argument("sandbox_id", metavar="ID")
    @click.argument("context_id", metavar="CONTEXT")
    @pass_app
    def command(app: App, sandbox_id: str, context_id: str) -> None:
        with app.client() as client:
            getattr(find_sandbox(client, sandbox_id).contexts, method)(context_id)
        app.print_json({name: context_id}) if app.json else click.echo(context_id)

    return command


for _name, _method, _text in (
    ("restart", "restart", "Let a context forget everything."),
    ("interrupt", "interrupt", "End what runs in a context; it remembers all it knew."),
    ("rm", "delete", "Delete a context."),
):
    contexts_command.add_command(_on_one(_name, _method, _text))
