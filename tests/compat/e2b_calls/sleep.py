"""Pause, forks, snapshots."""

from __future__ import annotations

import os
import socket
import time
import urllib.error
import urllib.request
from typing import Any

from registry import Yard, call, expect, until


def _free_port() -> int:
    """Sandboxes of these tests may share the ports of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _serves(made: Any, port: int) -> None:
    made.commands.run(f"exec python3 -m http.server {port} --bind 127.0.0.1", background=True, timeout=0)
    until(lambda: _asked(made, port)[0] == 200, 60)


def _asked(made: Any, port: int) -> tuple[int, str]:
    asked = urllib.request.Request(os.environ["E2B_API_URL"], headers={"Host": f"{port}-{made.sandbox_id}.localhost"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return int(answer.status), ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@call("a port of a sandbox is opened from outside")
def _(y: Yard) -> None:
    made, port = y.e2b.Sandbox.create(timeout=300), _free_port()
    assert made.get_host(port).startswith(f"{port}-{made.sandbox_id}.")
    status, text = _asked(made, port)
    assert (status, "port is not open" in text) == (502, True), text
    _serves(made, port)
    (made.pause if hasattr(made, "pause") else made.beta_pause)()
    status, text = _asked(made, port)
    assert (status, "was not found" in text) == (502, True), "it was woken"
    assert "paused" in str(made.get_info().state).lower()
    made = y.e2b.Sandbox.connect(made.sandbox_id, timeout=300)
    assert _asked(made, port)[0] == 200
    assert made.kill()
    assert _asked(made, port)[0] == 502


@call("Sandbox.create: a port wakes it", "2.63")
def _(y: Yard) -> None:
    port = _free_port()
    made = y.e2b.Sandbox.create(timeout=60, lifecycle={"on_timeout": "pause", "auto_resume": True})
    _serves(made, port)
    made.set_timeout(1)
    until(lambda: "paused" in str(made.get_info().state).lower(), 30)
    assert _asked(made, port)[0] == 200
    time.sleep(2)
    assert "running" in str(made.get_info().state).lower()
    assert made.kill()


@call("sandbox.pause: mode=filesystem, on_timeout: mode=filesystem", "2.63")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(timeout=3, lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}})
    until(lambda: "paused" in str(made.get_info().state).lower(), 60)
    made = y.e2b.Sandbox.connect(made.sandbox_id, timeout=300)
    assert made.commands.run("echo booted").stdout == "booted\n"
    assert made.pause(mode="filesystem")
    made = y.e2b.Sandbox.connect(made.sandbox_id, timeout=300)
    assert made.commands.run("echo booted").stdout == "booted\n"
    assert made.kill()


@call("Sandbox.connect: on_resume=reboot", "2.51")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(timeout=300)
    made.pause()
    made = y.e2b.Sandbox.connect(made.sandbox_id, timeout=300, on_resume="reboot")
    assert made.commands.run("echo booted").stdout == "booted\n"
    assert made.kill()


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


@call("sandbox.create_snapshot: name:tag, again", "2.34")
def _(y: Yard) -> None:
    name = f"tagged-{time.time_ns()}"
    first, second = y.sbx.create_snapshot(name=f"{name}:v1"), y.sbx.create_snapshot(name=f"{name}:v2")
    assert first.names[0].endswith(f"{name}:v1")
    assert second.names[0].endswith(f"{name}:v2")
    again = y.sbx.create_snapshot(name=f"{name}:v1")
    assert again.snapshot_id != first.snapshot_id
    made = y.e2b.Sandbox.create(f"{name}:v1", timeout=300)
    assert made.kill()
    expect(Exception, lambda: y.e2b.Sandbox.create(f"{name}:v3"), "not found")
    for one in (first, second, again):
        assert y.e2b.Sandbox.delete_snapshot(one.snapshot_id)


@call("sandbox.create_snapshot: mode=filesystem", "2.63")
def _(y: Yard) -> None:
    made = y.sbx.create_snapshot(mode="filesystem")
    again = y.e2b.Sandbox.create(made.snapshot_id, timeout=300)
    assert again.commands.run("echo booted").stdout == "booted\n"
    assert again.kill()
    assert y.e2b.Sandbox.delete_snapshot(made.snapshot_id)


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
