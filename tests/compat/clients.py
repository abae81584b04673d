"""The published clients of clients.txt: which there are, where they are installed, running one, and the table of what it did.

A client is tested by a program of its own (a list of calls) that prints a line of JSON for each call: `call`, and `wrong`
if anything was. With `--list` it prints the names of its calls, the oldest version that has each, and perhaps whether it
takes a real machine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DOCS = ROOT / "docs" / "compat.md"
DEADLINE_S = 800


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


def distinct(names: Iterable[str]) -> set[str]:
    """The calls of an SDK that these cases made: `pty.create, kill: twice` is `pty.create` and `pty.kill`. What is told to be
    not served, and whole programs (`snippet: …`), count for nothing."""
    calls: set[str] = set()
    for name in names:
        heads, _, case = name.partition(":")
        if case.strip() == "not served" or heads == "snippet":
            continue
        owner = ""
        for head in heads.partition(" (")[0].split(", "):
            call = head if "." in head or not owner else f"{owner}.{head}"
            owner = call.rpartition(".")[0]
            calls.add(call)
    return calls


@functools.cache
def calls(program: Path, *, machines: bool = False) -> list[tuple[str, str]]:
    """Those that take a machine, or none, and the oldest version that has each."""
    main = program / "main.js"
    command = ["node", str(main)] if main.exists() else [sys.executable, str(program)]
    told = subprocess.run([*command, "--list"], capture_output=True, check=True, timeout=60)
    return [(name, since) for name, since, *vm in json.loads(told.stdout) if any(vm) is machines]


def cases(programs: Mapping[Client, Path]) -> pytest.MarkDecorator:
    """A test for each call of each client."""
    params = [
        pytest.param(client, name, id=f"{client}: {name}")
        for client, program in programs.items()
        for name, since in calls(program)
        if client.has(since)
    ]
    return pytest.mark.parametrize(("client", "name"), params)


class Daemon(Protocol):
    @property
    def url(self) -> str: ...

    def cli(self, *args: str) -> subprocess.CompletedProcess[str]: ...


def e2b(daemon: Daemon) -> dict[str, str]:
    """What is changed to move from E2B: a key and addresses."""
    key = daemon.cli("keys", "create", "e2b", "--format", "e2b").stdout.strip()
    addresses = ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL")
    return {"E2B_API_KEY": key, **dict.fromkeys(addresses, daemon.url)}


def freestyle(daemon: Daemon, client: Client, zone_dir: Path) -> dict[str, str]:
    """`zone_dir`: where the records of its domains are."""
    key = daemon.cli("keys", "create", "freestyle", "--format", "freestyle").stdout.strip()
    told = {"COMPAT_PACKAGE": client.name, "COMPAT_ZONE": str(zone_dir)}
    return {"FREESTYLE_API_KEY": key, "FREESTYLE_API_URL": daemon.url, **told}


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

    def works(self, name: str) -> None:
        assert name in self.outcomes, "it did not come so far"
        wrong = self.outcomes[name]
        assert wrong is None, wrong

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def all_at_once(
    programs: Mapping[Client, Path], env: Callable[[int, Client], dict[str, str]]
) -> Iterator[dict[Client, Run]]:
    """Half of the time they wait. `env`: by their number."""
    with contextlib.ExitStack() as ends:
        started: dict[Client, Run] = {}
        for n, (client, program) in enumerate(programs.items()):
            started[client] = Run(client, program, env(n, client))
            ends.callback(started[client].end)
        yield started


def check_table(title: str, program: Path, ran: dict[Client, Run], *, machines: bool = False) -> None:
    """The table in the docs is what ran; with FORKYARD_WRITE_DOCS it is written."""
    rows = [f"| call | {' | '.join(map(str, ran))} |", "|---" * (len(ran) + 1) + "|"]
    for name, since in calls(program, machines=machines):
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
