"""The end of the sandbox that the calls shared."""

from __future__ import annotations

from registry import Yard, call, expect


@call("sandbox.kill")
def _(y: Yard) -> None:
    assert y.sbx.kill() is True
    assert y.sbx.is_running() is False


@call("Sandbox.kill: unknown id")
def _(y: Yard) -> None:
    assert y.e2b.Sandbox.kill(y.sbx.sandbox_id) is False


@call("commands.run: in a sandbox that is gone")
def _(y: Yard) -> None:
    expect(y.e2b.SandboxException, lambda: y.sbx.commands.run("true"))
