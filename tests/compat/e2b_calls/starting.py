"""Templates that are saved while their start command runs."""

from __future__ import annotations

import time
from typing import Any

from registry import Yard, call, expect


def _named(name: str) -> str:
    return f"starts-{name}-{time.time_ns()}"


def _served(made: Any) -> str:
    """At once: nobody waits for the server."""
    return str(made.commands.run("curl -s localhost:8000/begun").stdout)


@call("Template.build: set_start_cmd, wait_for_port")
def _(y: Yard) -> None:
    name = y.template = _named("port")
    wanted = (
        y.e2b.Template()
        .from_base_image()
        .set_workdir("/home/user/site")
        .set_envs({"WHO": "it"})
        .set_start_cmd(
            "echo $WHO $(whoami) $(date +%s%N) > begun && python3 -m http.server 8000", y.e2b.wait_for_port(8000)
        )
    )
    y.e2b.Template.build(wanted, alias=name)
    first, second = y.e2b.Sandbox.create(name, timeout=300), y.e2b.Sandbox.create(name, timeout=300)
    said = _served(first)
    assert said.split()[:2] == ["it", "user"], said
    assert _served(second) == said, "it was started anew"
    for made in (first, second):
        assert made.kill()


@call("Template.build: from_template with a start command", "2.63")
def _(y: Yard) -> None:
    name = _named("more")
    y.e2b.Template.build(y.e2b.Template().from_template(y.template).run_cmd("echo more > more"), alias=name)
    made = y.e2b.Sandbox.create(name, timeout=300)
    assert _served(made).split()[:2] == ["it", "user"]
    assert made.commands.run("curl -s localhost:8000/more").stdout == "more\n"
    assert made.kill()


@call("Template.build: a start command that ends, wait_for_file", "2.63")
def _(y: Yard) -> None:
    name = _named("file")
    wanted = y.e2b.Template().from_base_image()
    wanted = wanted.set_start_cmd("touch /tmp/first && sleep 1 && touch /tmp/done", y.e2b.wait_for_file("/tmp/done"))
    y.e2b.Template.build(wanted, alias=name)
    made = y.e2b.Sandbox.create(name, timeout=300)
    assert made.commands.run("ls /tmp/first /tmp/done").exit_code == 0
    assert made.kill()


@call("Template.build: set_ready_cmd", "2.63")
def _(y: Yard) -> None:
    name = _named("ready")
    wanted = y.e2b.Template().from_base_image().run_cmd("(sleep 2; touch /tmp/late) >/dev/null 2>&1 &")
    y.e2b.Template.build(wanted.set_ready_cmd("[ -f /tmp/late ]"), alias=name)
    assert y.e2b.Template.exists(name)


@call("Template.build: a start command that fails", "2.63")
def _(y: Yard) -> None:
    wanted = y.e2b.Template().from_base_image()
    wanted = wanted.set_start_cmd("echo it is broken; exit 3", y.e2b.wait_for_port(8000))
    expect(y.e2b.BuildException, lambda: y.e2b.Template.build(wanted, alias=_named("fails")), "it is broken")
