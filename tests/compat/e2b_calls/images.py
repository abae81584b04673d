"""Templates from images that a registry has. Those of tests know these by name alone."""

from __future__ import annotations

import time
from typing import Any

from registry import Yard, call

_RUN = str(time.time_ns())


def _builds(y: Yard, template: Any, name: str) -> None:
    name = f"image-{name}-{_RUN}"
    y.e2b.Template.build(template.run_cmd(f"echo {name} > {y.path('image.txt')}"), alias=name)
    made = y.e2b.Sandbox.create(name, timeout=300)
    assert made.commands.run(f"cat {y.path('image.txt')}").stdout == f"{name}\n"
    assert made.kill()


@call("template.from_ubuntu_image")
def _(y: Yard) -> None:
    _builds(y, y.e2b.Template().from_ubuntu_image("24.04"), "ubuntu")


@call("template.from_alpine_image, from_fedora_image, from_arch_image", "2.45.1")
def _(y: Yard) -> None:
    _builds(y, y.e2b.Template().from_alpine_image("3.20"), "alpine")
    _builds(y, y.e2b.Template().from_fedora_image("42"), "fedora")
    _builds(y, y.e2b.Template().from_arch_image("base"), "arch")


@call("template.from_image: with credentials", "2.20")
def _(y: Yard) -> None:
    wanted = y.e2b.Template().from_image("registry.example.com/team/app:1", username="ada", password="secret")
    _builds(y, wanted, "private")
