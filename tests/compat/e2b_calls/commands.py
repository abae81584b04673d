"""Commands and terminals."""

from __future__ import annotations

import time
from typing import Any

from registry import Yard, call, expect


@call("commands.run")
def _(y: Yard) -> None:
    result = y.sbx.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)


@call("commands.run: envs, cwd")
def _(y: Yard) -> None:
    y.sbx.files.make_dir(y.path("cwd"))
    result = y.sbx.commands.run("echo $NAME; pwd", envs={"NAME": "value"}, cwd=y.path("cwd"))
    assert result.stdout == f"value\n{y.path('cwd')}\n"


@call("commands.run: cwd that is not there")
def _(y: Yard) -> None:
    error = expect(Exception, lambda: y.sbx.commands.run("true", cwd="/no/such/place"), "does not exist")
    assert isinstance(error, y.e2b.InvalidArgumentException)


@call("commands.run: exit code")
def _(y: Yard) -> None:
    error = expect(y.e2b.CommandExitException, lambda: y.sbx.commands.run("echo before; exit 7"))
    assert (error.exit_code, error.stdout) == (7, "before\n")


@call("commands.run: callbacks")
def _(y: Yard) -> None:
    out: list[str] = []
    err: list[str] = []
    y.sbx.commands.run("echo one; echo two >&2", on_stdout=out.append, on_stderr=err.append)
    assert ("".join(out), "".join(err)) == ("one\n", "two\n")


@call("commands.run: timeout")
def _(y: Yard) -> None:
    began = time.monotonic()
    expect(y.e2b.TimeoutException, lambda: y.sbx.commands.run("sleep 30", timeout=1))
    assert time.monotonic() - began < 10


@call("commands.run: user")
def _(y: Yard) -> None:
    assert y.sbx.commands.run("whoami", user="root").stdout == "root\n"


@call("commands.run: unknown user")
def _(y: Yard) -> None:
    expect(y.e2b.AuthenticationException, lambda: y.sbx.commands.run("whoami", user="nobody-here"), "invalid username")


@call("commands.run: much output")
def _(y: Yard) -> None:
    assert len(y.sbx.commands.run("head -c 3000000 /dev/zero | tr '\\0' x").stdout) == 3_000_000


@call("commands.run: background")
def _(y: Yard) -> None:
    handle = y.sbx.commands.run("sleep 0.2; echo done", background=True)
    assert handle.pid > 0
    assert handle.wait().stdout == "done\n"


@call("commands.list")
def _(y: Yard) -> None:
    handle = y.sbx.commands.run("sleep 60", background=True)
    found = [one for one in y.sbx.commands.list() if one.pid == handle.pid]
    assert found[0].cmd == "/bin/bash"
    assert found[0].args[-1] == "sleep 60"
    handle.kill()


@call("commands.kill")
def _(y: Yard) -> None:
    handle = y.sbx.commands.run("sleep 60", background=True)
    assert y.sbx.commands.kill(handle.pid) is True
    error = expect(y.e2b.CommandExitException, lambda: y.sbx.commands.run(f"kill -0 {handle.pid}"))
    assert error.exit_code == 1
    assert y.sbx.commands.kill(handle.pid) is False


@call("handle.kill")
def _(y: Yard) -> None:
    handle = y.sbx.commands.run("sleep 60", background=True)
    assert handle.kill() is True
    expect(y.e2b.CommandExitException, handle.wait)


@call("commands.connect")
def _(y: Yard) -> None:
    handle = y.sbx.commands.run("sleep 0.7; echo late", background=True)
    handle.disconnect()
    assert y.sbx.commands.connect(handle.pid).wait().stdout == "late\n"


@call("commands.connect: unknown pid")
def _(y: Yard) -> None:
    expect(y.e2b.NotFoundException, lambda: y.sbx.commands.connect(999_999_9))


@call("commands.send_stdin")
def _(y: Yard) -> None:
    handle = y.sbx.commands.run("read line; echo got $line", background=True, stdin=True)
    y.sbx.commands.send_stdin(handle.pid, "a line\n")
    assert handle.wait().stdout == "got a line\n"


@call("commands.close_stdin", "2.24")
def _(y: Yard) -> None:
    handle = y.sbx.commands.run("cat", background=True, stdin=True)
    y.sbx.commands.send_stdin(handle.pid, "to the end")
    y.sbx.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "to the end"


@call("commands.stream_input", "2.63")
def _(y: Yard) -> None:
    handle = y.sbx.commands.run("cat", background=True, stdin=True)
    y.sbx.commands.stream_input(handle.pid, ["one ", b"two ", "three"])
    y.sbx.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "one two three"


@call("commands.send_stdin: unknown pid")
def _(y: Yard) -> None:
    expect(y.e2b.NotFoundException, lambda: y.sbx.commands.send_stdin(9_999_999, "x"))


def _terminal(y: Yard, **envs: str) -> Any:
    return y.sbx.pty.create(y.e2b.PtySize(rows=30, cols=100), cwd=y.dir, envs={"HISTFILE": "/dev/null", **envs})


def _read(handle: Any) -> str:
    seen: list[bytes] = []
    handle.wait(on_pty=seen.append)
    return b"".join(seen).decode()


@call("pty.create, pty.send_stdin")
def _(y: Yard) -> None:
    handle = _terminal(y, MARK="x9")
    y.sbx.pty.send_stdin(handle.pid, b"stty size; echo mark-$MARK; exit\n")
    text = _read(handle)
    assert "30 100" in text
    assert "mark-x9" in text


@call("pty.resize")
def _(y: Yard) -> None:
    handle = _terminal(y)
    y.sbx.pty.resize(handle.pid, y.e2b.PtySize(rows=11, cols=77))
    y.sbx.pty.send_stdin(handle.pid, b"stty size; exit\n")
    assert "11 77" in _read(handle)


@call("pty.kill")
def _(y: Yard) -> None:
    handle = _terminal(y)
    assert y.sbx.pty.kill(handle.pid) is True
    assert y.sbx.pty.kill(handle.pid) is False


@call("pty.connect", "2.24")
def _(y: Yard) -> None:
    handle = _terminal(y)
    handle.disconnect()
    again = y.sbx.pty.connect(handle.pid)
    y.sbx.pty.send_stdin(handle.pid, b"echo again-$((40+2)); exit\n")
    assert "again-42" in _read(again)
