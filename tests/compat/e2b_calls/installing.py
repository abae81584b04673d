"""Templates with packages, from where the package managers of the machine get theirs."""

from __future__ import annotations

import time

from registry import Yard, call


def _name(of: str) -> str:
    return f"installs-{of}-{time.time_ns()}"


@call("template.apt_install")
def _(y: Yard) -> None:
    name = _name("apt")
    y.e2b.Template.build(y.e2b.Template().from_base_image().apt_install(["tree"]), alias=name)
    made = y.e2b.Sandbox.create(name, timeout=300)
    assert "tree v" in made.commands.run("tree --version").stdout
    assert made.kill()


@call("template.pip_install")
def _(y: Yard) -> None:
    name = _name("pip")
    y.e2b.Template.build(y.e2b.Template().from_python_image().pip_install(["cowsay"]), alias=name)
    made = y.e2b.Sandbox.create(name, timeout=300)
    assert "moo" in made.commands.run("python3 -c 'import cowsay; cowsay.cow(\"moo\")'").stdout
    assert made.kill()


@call("template.npm_install")
def _(y: Yard) -> None:
    name = _name("npm")
    y.e2b.Template.build(y.e2b.Template().from_node_image().npm_install(["left-pad"]), alias=name)
    made = y.e2b.Sandbox.create(name, timeout=300)
    assert made.commands.run('node -p \'require("left-pad")("x", 3)\'').stdout == "  x\n"
    assert made.kill()


@call("template.bun_install")
def _(y: Yard) -> None:
    name = _name("bun")
    y.e2b.Template.build(y.e2b.Template().from_bun_image().bun_install(["left-pad"]), alias=name)
    made = y.e2b.Sandbox.create(name, timeout=300)
    assert made.commands.run('bun -p \'require("left-pad")("x", 3)\'').stdout == "  x\n"
    assert made.kill()
