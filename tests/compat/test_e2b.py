"""The published E2B clients against the facade: every call of `e2b_calls`, with every version in clients.txt."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..contract.sdk_daemon import Daemon, running_daemon  # noqa: TID252

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
DOCS = ROOT / "docs" / "compat.md"
BEGIN, END = "<!-- matrix: e2b -->", "<!-- end of matrix -->"
DEADLINE_S = 240


def _versions() -> list[str]:
    lines = (line.split() for line in (HERE / "clients.txt").read_text().splitlines())
    return [line[2] for line in lines if line[:2] == ["pypi", "e2b"]]


@functools.cache
def _calls() -> list[tuple[str, tuple[int, int]]]:
    told = subprocess.run([sys.executable, HERE / "e2b_calls", "--list"], capture_output=True, check=True, timeout=60)
    return [(name, (since[0], since[1])) for name, since in json.loads(told.stdout)]


def _has(version: str, since: tuple[int, int]) -> bool:
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= since


class Running:
    """One version of the package, in a process of its own."""

    def __init__(self, python: str, daemon: Daemon) -> None:
        self.directory = tempfile.mkdtemp(prefix="fye2b-")
        env = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
        env |= {
            "E2B_API_KEY": daemon.cli("keys", "create", "e2b", "--format", "e2b").stdout.strip(),
            "E2B_API_URL": daemon.url,
            "E2B_SANDBOX_URL": daemon.url,
            "E2B_TEST_DIR": self.directory,
        }
        self.process = subprocess.Popen([python, HERE / "e2b_calls"], env=env, stdout=subprocess.PIPE, text=True)
        self._outcomes: dict[str, str | None] | None = None

    @property
    def outcomes(self) -> dict[str, str | None]:
        """By call: what went wrong."""
        if self._outcomes is None:
            out, _ = self.process.communicate(timeout=DEADLINE_S)
            told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            self._outcomes = {one["call"]: one["wrong"] for one in told}
        return self._outcomes

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, Running]]:
    """All versions at once, each on a daemon of its own: half of the time they wait."""
    told = subprocess.run([ROOT / "scripts" / "compat-clients"], capture_output=True, text=True, check=True)
    pythons = {line.split()[1]: line.split()[2] for line in told.stdout.splitlines() if line.startswith("e2b ")}
    with running_daemon() as daemon, running_daemon() as another:
        daemons = (daemon, another)
        started = {version: Running(pythons[version], daemons[n % 2]) for n, version in enumerate(_versions())}
        try:
            yield started
        finally:
            for one in started.values():
                one.end()


@pytest.mark.parametrize(
    ("version", "name"),
    [(version, name) for version in _versions() for name, since in _calls() if _has(version, since)],
)
def test_a_published_client_gets_what_it_expects(running: dict[str, Running], version: str, name: str) -> None:
    assert name in running[version].outcomes, "it did not come so far"
    wrong = running[version].outcomes[name]
    assert wrong is None, wrong


def test_at_least_forty_calls_are_tested() -> None:
    assert len(_calls()) >= 40


def test_the_matrix_in_the_docs_is_what_ran(running: dict[str, Running]) -> None:
    """`make test-compat` writes it."""
    versions = _versions()
    rows = [f"| call | {' | '.join(f'e2b {version}' for version in versions)} |", "|---" * (len(versions) + 1) + "|"]
    for name, since in _calls():
        cells = [
            "–" if not _has(version, since) else "works" if running[version].outcomes.get(name, "") is None else "not"
            for version in versions
        ]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    wanted = f"{before}{BEGIN}\n{chr(10).join(rows)}\n{END}{after}"
    if os.environ.get("FORKYARD_WRITE_DOCS"):
        DOCS.write_text(wanted)
    assert DOCS.read_text() == wanted, "run `make test-compat`"
