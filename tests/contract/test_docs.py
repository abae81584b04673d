"""What pages show that needs no machine: a spec in Python and as a file, and command lines against the real API and agents."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from forkyard import Forkyard, Spec

from ..vm.test_docs import ROOT, python_of  # noqa: TID252
from .sdk_daemon import running_daemon


def test_the_python_and_the_file_of_specs_say_the_same() -> None:
    page = (ROOT / "docs" / "specs.md").read_text()
    source, names = python_of(page), {"Spec": Spec}
    exec(source[source.index("spec = (") : source.index("sandbox = ")], names)
    assert Spec.parse(python_of(page, "yaml")) == names["spec"]


def test_the_commands_on_git_do_what_the_page_shows(tmp_path: Path) -> None:
    forkyard = tmp_path / "bin" / "forkyard"
    forkyard.parent.mkdir()
    forkyard.write_text(f'#!/bin/sh\nexec {sys.executable} -m forkyard.cli "$@"\n')
    forkyard.chmod(0o755)
    (tmp_path / "ci.yaml").write_text("steps:\n  - run: make test\n")
    page = (ROOT / "docs" / "git.md").read_text()
    commands = [one for section in ("Git", "Triggers", "Identities") for one in console_of(page, section)]
    known: dict[str, str] = {}
    with running_daemon() as daemon, Forkyard(daemon.url, daemon.key) as fy:
        fy.sandboxes.create(name="web").snapshot("ci")  # the page takes them as there
        path = f"{forkyard.parent}:{daemon.env['PATH']}"
        env = {**daemon.env, "PATH": path, "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}
        for shown, output in commands:
            command = shown
            for elided, whole in known.items():
                command = command.replace(elided, whole)
            done = subprocess.run(
                ["bash", "-c", command], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, f"{command}: {done.stderr}"
            printed = done.stdout.splitlines()
            assert len(printed) >= len(output), f"{command} printed {printed}"
            for line, actual in zip(output, printed, strict=False):
                # An id is shown as its first letter and four others.
                pattern = re.sub(r"^([a-z])\w{4}…$", r"\1…", line)
                assert re.fullmatch(re.escape(pattern).replace("…", ".+").replace("7070", r"\d+"), actual), command
                if line.endswith("…"):
                    known[line] = actual


def console_of(page: str, section: str) -> list[tuple[str, list[str]]]:
    """The commands of a section, each with the lines that it is shown to print."""
    text = next(part for part in re.split(r"^#+ ", page, flags=re.MULTILINE) if part.startswith(f"{section}\n"))
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    assert found, f"there are no commands in {section}"
    return found
