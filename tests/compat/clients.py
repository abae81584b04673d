"""The published clients of clients.txt: which there are, where they are installed, running one, and the table of what it did.

A client is tested by a program of its own (a list of calls) that prints a line of JSON for each call: `call`, and `wrong`
if anything was. With `--list` it prints the names of its calls, and the oldest version that has each.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DOCS = ROOT / "docs" / "compat.md"
DEADLINE_S = 400


@dataclass(frozen=True)
class Client:
    kind: str  # where it is from
    name: str
    version: str

    def __str__(self) -> str:
        return f"{'npm ' if self.kind == 'npm' else ''}{self.name} {self.version}"

    def has(self, since: str) -> bool:
        return _number(self.version) >= _number(since)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


def clients(kind: str, name: str) -> list[Client]:
    lines = (line.split() for line in (HERE / "clients.txt").read_text().splitlines())
    return [Client(kind, name, line[2]) for line in lines if line[:2] == [kind, name]]


@functools.cache
def places(name: str) -> dict[Client, str]:
    """Where each version is, installed if it was not: its interpreter, or its directory."""
    told = subprocess.run([ROOT / "scripts" / "compat-clients", name], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    lines = (line.split() for line in told.stdout.splitlines())
    return {Client(line[0], line[1], line[2]): line[3] for line in lines}


def command(client: Client, program: Path) -> list[str]:
    """A module of npm finds its packages beside itself: it runs from a copy there."""
    place = places(client.name)[client]
    if client.kind == "pypi":
        return [place, str(program)]
    copy = Path(place) / program.name
    if copy.exists():
        shutil.rmtree(copy)
    shutil.copytree(program, copy)
    return ["node", str(copy / "main.js")]


class Run:
    """One version of a client, in a process of its own."""

    def __init__(self, client: Client, program: Path, env: dict[str, str]) -> None:
        self.directory = tempfile.mkdtemp(prefix="fycompat-")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "FREESTYLE_"))}
        self.process = subprocess.Popen(
            command(client, program),
            env=clean | env | {"COMPAT_DIR": self.directory},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._outcomes: dict[str, str | None] | None = None

    @property
    def outcomes(self) -> dict[str, str | None]:
        """By call: what went wrong."""
        if self._outcomes is None:
            out, _ = self.process.communicate(timeout=DEADLINE_S)
            told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            self._outcomes = {one["call"]: one["wrong"] for one in told if "call" in one}
        return self._outcomes

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def check_table(title: str, calls: list[tuple[str, str]], ran: dict[Client, Run]) -> None:
    """The table in the docs is what ran; with FORKYARD_WRITE_DOCS it is written."""
    rows = [f"| call | {' | '.join(map(str, ran))} |", "|---" * (len(ran) + 1) + "|"]
    for name, since in calls:
        cells = [
            "–" if not client.has(since) else "works" if run.outcomes.get(name, "") is None else "not"
            for client, run in ran.items()
        ]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    begin, end = f"<!-- matrix: {title} -->", f"<!-- end of matrix: {title} -->"
    text = DOCS.read_text()
    assert text.count(begin) == text.count(end) == 1, f"docs/compat.md has no place for {title}"
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    wanted = f"{before}{begin}\n{chr(10).join(rows)}\n{end}{after}"
    if os.environ.get("FORKYARD_WRITE_DOCS"):
        DOCS.write_text(wanted)
    assert DOCS.read_text() == wanted, "run `make test-compat`"
