"""`exec`, `ps`."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import click

from forkyard.cli import show
from forkyard.cli.app import App, Verb, find_sandbox, pairs, pass_app

if TYPE_CHECKING:
    from forkyard import ExecStream, Sandbox

TIMED_OUT = 124


class ExecVerb(Verb):
    """The command to run begins at `--`, or else at the first word after the id."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" not in args:
            with_value = {
                name
                for param in self.params
                if isinstance(param, click.Option) and not param.is_flag
                for name in param.opts
            }
            words = position = 0
            while position < len(args) and words < 2:
                if args[position].startswith("-"):
                    position += 2 if args[position] in with_value else 1
                    continue
                words += 1
                position += words < 2
            args = [*args[:position], "--", *args[position:]] if words == 2 else args
        return super().parse_args(ctx, args)


@click.command("exec", cls=ExecVerb, short_help="Run a command in a sandbox.")
@click.argument("sandbox_id", metavar="ID")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option("--user", "-u", help="Who runs it. Default: that of the spec or image, else root.")
@click.option("--cwd", "-w", help="Where. Default: that of the spec or image, else the user's home.")
@click.option("--env", "-e", multiple=True, callback=pairs, metavar="KEY=VALUE", help="May be repeated.")
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="Then kill it and all it started.")
@click.option("--trace", "trace_id", metavar="ID", help="Recorded with every connection it makes (see egress).")
@click.option("--detach", "-d", is_flag=True, help="Leave it running and print its exec id.")
@click.option("--tty", "-t", is_flag=True, help="Give it a terminal.")
@click.option("--no-stdin", "-n", is_flag=True, help="Do not forward standard input.")
@pass_app
@click.pass_context
def exec_command(
    ctx: click.Context,
    app: App,
    sandbox_id: str,
    command: tuple[str, ...],
    user: str | None,
    cwd: str | None,
    env: dict[str, str],
    timeout_s: float | None,
    trace_id: str | None,
    detach: bool,
    tty: bool,
    no_stdin: bool,
) -> None:
    """Run a command in a sandbox. Its output and exit code become ours.

    One word is run by bash (forkyard exec ID -- 'ls | wc -l'); several are run as they are, without a shell.
    Standard input is forwarded when it is a pipe or a file. Ctrl-C is passed on. After --timeout the exit code is
    124; a command ended by a signal gives 128 + the signal's number. An error of Forkyard's own gives 1.
    """
    if detach and tty:
        raise click.UsageError("--detach and --tty cannot be combined.")
    run: str | list[str] = command[0] if len(command) == 1 else list(command)
    with app.client() as client:
        sandbox = find_sandbox(client, sandbox_id)
        if detach:
            process = sandbox.spawn(run, cwd=cwd, env=env, user=user, timeout_s=timeout_s, trace_id=trace_id)
            app.print_json(process.info()) if app.json else click.echo(process.id)
            return
        if tty:
            from forkyard.cli.shell import run_in_terminal

            ctx.exit(run_in_terminal(sandbox, run, cwd=cwd, env=env, user=user, timeout_s=timeout_s))
        stdin = None if no_stdin or not _forwardable() else _read_stdin()
        stream = sandbox.exec_stream(
            run, cwd=cwd, env=env, user=user, timeout_s=timeout_s, stdin=stdin, trace_id=trace_id
        )
        ctx.exit(_as_document(app, stream) if app.json else _copy_output(sandbox, stream))


def exit_status(exit_code: int | None, signal_number: int | None, timed_out: bool) -> int:
    """What a shell would report."""
    if timed_out:
        return TIMED_OUT
    return exit_code if exit_code is not None else 128 + (signal_number or 0)


def _as_document(app: App, stream: ExecStream) -> int:
    from forkyard.sdk.results import DEFAULT_MAX_OUTPUT_BYTES

    result = stream.collect(DEFAULT_MAX_OUTPUT_BYTES)
    app.print_json(
        {
            "exec_id": result.exec_id,
            "exit_code": result.exit_code,
            "signal": result.signal,
            "timed_out": result.timed_out,
            "duration_ms": result.duration_ms,
            "stdout": result.stdout,
            "stderr": result.stderr,
            "truncated": result.truncated,
            "denied": list(result.denied),
        }
    )
    return exit_status(result.exit_code, result.signal, result.timed_out)


def _copy_output(sandbox: Sandbox, stream: ExecStream) -> int:
    """Bytes as they come. A signal to us goes to the command; the second of a kind ends us."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        if stream.exec_id is not None:
            process = sandbox.process(stream.exec_id)
            # Not here: the handler may have interrupted the very connection pool it would use.
            threading.Thread(target=process.signal, args=(number,), daemon=True).start()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        write_output(stream)
    except BrokenPipeError:
        if stream.exec_id is not None:
            sandbox.process(stream.exec_id).signal(signal.SIGPIPE)
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _tell_denied(sandbox, stream)
    return exit_status(stream.exit_code, stream.signal, stream.timed_out)


def _tell_denied(sandbox: Sandbox, stream: ExecStream) -> None:
    """Why a command may have failed, and what to do about it."""
    for destination in stream.end.denied if stream.end else ():
        host = destination.rpartition(":")[0] or destination
        what = f"--cidr {host}" if host.replace(".", "").isdigit() else host
        click.echo(
            f"forkyard: the network policy blocked {destination}; allow it: forkyard egress allow {sandbox.id} {what}",
            err=True,
        )


def write_output(stream: ExecStream) -> None:
    out = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    for chunk in stream:
        if chunk.lost_bytes:
            click.echo(f"forkyard: {chunk.lost_bytes} bytes of {chunk.stream} were not kept", err=True)
        out[chunk.stream].write(chunk.data)
        out[chunk.stream].flush()


def _forwardable() -> bool:
    """A pipe, a file or a socket. Not a terminal, where nobody means to type, and not /dev/null."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read_stdin() -> Iterator[bytes]:
    while piece := os.read(0, 256 * 1024):
        yield piece


@click.command("ps", cls=Verb)
@click.argument("sandbox_id", metavar="ID")
@pass_app
def ps_command(app: App, sandbox_id: str) -> None:
    """List the commands of a sandbox that run, or ended not long ago."""
    with app.client() as client:
        found = find_sandbox(client, sandbox_id).execs()
    if app.json:
        app.print_json(found)
        return
    show.table(
        ("exec", "state", "user", "age", "took", "command"),
        (
            (
                info.id,
                "running" if info.running else f"exit {exit_status(info.exit_code, info.signal, info.timed_out)}",
                info.user,
                show.age(info.started_at),
                show.duration(info.duration_ms),
                show.command(info.command),
            )
            for info in found
        ),
    )
