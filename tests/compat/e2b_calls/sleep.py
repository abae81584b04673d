"""Pause, forks, snapshots."""

from __future__ import annotations

import time

from registry import Yard, call, expect, until


@call("sandbox.pause (once beta_pause)")
def _(y: Yard) -> None:
    pause = getattr(y.sbx, "pause", None) or y.sbx.beta_pause
    pause()
    assert y.sbx.is_running() is False
    assert "paused" in str(y.sbx.get_info().state).lower()
    paused = y.e2b.SandboxQuery(state=[y.e2b.SandboxState.PAUSED])
    assert y.sbx.sandbox_id in [one.sandbox_id for one in y.e2b.Sandbox.list(query=paused).next_items()]


@call("commands.run: in a paused sandbox")
def _(y: Yard) -> None:
    expect(y.e2b.SandboxException, lambda: y.sbx.commands.run("true"))


@call("sandbox.connect: resumes")
def _(y: Yard) -> None:
    y.sbx = y.e2b.Sandbox.connect(y.sbx.sandbox_id, timeout=1500)
    assert y.sbx.is_running() is True
    assert y.sbx.commands.run("echo back").stdout == "back\n"


@call("Sandbox.create: pauses at its timeout", "2.63")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(timeout=4, lifecycle={"on_timeout": "pause"})
    until(lambda: "paused" in str(made.get_info().state).lower(), 30)
    made = y.e2b.Sandbox.connect(made.sandbox_id, timeout=60)
    assert made.is_running()
    assert made.kill()


@call("Sandbox.create: auto_pause (once beta_create)")
def _(y: Yard) -> None:
    if hasattr(y.e2b.Sandbox, "beta_create"):
        made = y.e2b.Sandbox.beta_create(timeout=4, auto_pause=True)
    else:
        made = y.e2b.Sandbox.create(timeout=4, lifecycle={"on_timeout": "pause", "auto_resume": False})
    until(lambda: "paused" in str(made.get_info().state).lower(), 30)
    assert made.kill()


@call("Sandbox.create: resumes by itself", "2.63")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    made.pause()
    assert made.commands.run("echo woken").stdout == "woken\n"
    assert made.kill()


@call("sandbox.fork", "2.34")
def _(y: Yard) -> None:
    end = y.sbx.get_info().end_at
    forks = y.sbx.fork(count=2)
    ids = {one.sandbox_id for one in forks}
    assert len(ids | {y.sbx.sandbox_id}) == 3
    assert forks[0].commands.run("echo fork").stdout == "fork\n"
    assert y.sbx.get_info().end_at == end
    for one in forks:
        assert one.kill()


@call("sandbox.create_snapshot, delete_snapshot", "2.14")
def _(y: Yard) -> None:
    made = y.sbx.create_snapshot()
    assert made.snapshot_id
    again = y.e2b.Sandbox.create(made.snapshot_id)
    assert again.commands.run("echo restored").stdout == "restored\n"
    assert again.kill()
    assert y.e2b.Sandbox.delete_snapshot(made.snapshot_id) is True
    assert y.e2b.Sandbox.delete_snapshot(made.snapshot_id) is False


@call("sandbox.create_snapshot: name", "2.24")
def _(y: Yard) -> None:
    made = y.sbx.create_snapshot(name="with-a-name")
    assert "with-a-name" in made.names[0]
    again = y.e2b.Sandbox.create("with-a-name")
    assert again.kill()
    assert y.e2b.Sandbox.delete_snapshot(made.names[0]) is True


@call("sandbox.list_snapshots", "2.14")
def _(y: Yard) -> None:
    made = y.sbx.create_snapshot()
    pages = y.sbx.list_snapshots()
    assert made.snapshot_id in [one.snapshot_id for one in pages.next_items()]
    assert not pages.has_next
    y.e2b.Sandbox.delete_snapshot(made.snapshot_id)


@call("sandbox.update_network", "2.24")
def _(y: Yard) -> None:
    y.sbx.update_network({"allow_out": ["example.com"], "deny_out": ["0.0.0.0/0"]})
    y.sbx.update_network({})


@call("Template.exists", "2.24")
def _(y: Yard) -> None:
    assert y.e2b.Template.exists("base") is True
    assert y.e2b.Template.exists("no-such-template") is False


@call("Volume.create, list, get_info, destroy", "2.43")
def _(y: Yard) -> None:
    name = f"v{time.time_ns()}"
    made = y.e2b.Volume.create(name)
    assert made.name == name
    assert made.volume_id in [one.volume_id for one in y.e2b.Volume.list()]
    assert y.e2b.Volume.get_info(made.volume_id).name == name
    assert y.e2b.Volume.destroy(made.volume_id) is True
    assert y.e2b.Volume.destroy(made.volume_id) is False
