"""The published E2B clients against the facade: every call of `e2b_calls` and `e2b_npm`, with every version in clients.txt."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ..contract.sdk_daemon import running_daemon  # noqa: TID252
from .clients import HERE, Client, Run, check_table, clients

CLIENTS = {
    "pypi": clients("pypi", "e2b"),
    "npm": clients("npm", "e2b"),
}
PROGRAMS = {"pypi": HERE / "e2b_calls", "npm": HERE / "e2b_npm"}


@functools.cache
def _calls(kind: str) -> list[tuple[str, str]]:
    command = [sys.executable, PROGRAMS[kind]] if kind == "pypi" else ["node", PROGRAMS[kind] / "main.js"]
    told = subprocess.run([*command, "--list"], capture_output=True, check=True, timeout=60)
    return [(name, since) for name, since in json.loads(told.stdout)]


@pytest.fixture(scope="module")
def ran() -> Iterator[dict[Client, Run]]:
    """All versions at once, on two daemons: half of the time they wait."""
    started: dict[Client, Run] = {}
    with running_daemon() as one, running_daemon() as another:
        try:
            for n, client in enumerate(found for kind in CLIENTS for found in CLIENTS[kind]):
                daemon = (one, another)[n % 2]
                env = {
                    "E2B_API_KEY": daemon.cli("keys", "create", "e2b", "--format", "e2b").stdout.strip(),
                    "E2B_API_URL": daemon.url,
                    "E2B_SANDBOX_URL": daemon.url,
                    "E2B_VOLUME_API_URL": daemon.url,
                }
                started[client] = Run(client, PROGRAMS[client.kind], env)
            yield started
        finally:
            for run in started.values():
                run.end()


@pytest.mark.parametrize(
    ("client", "name"),
    [
        pytest.param(client, name, id=f"{client}: {name}")
        for kind, found in CLIENTS.items()
        for client in found
        for name, since in _calls(kind)
        if client.has(since)
    ],
)
def test_a_published_client_gets_what_it_expects(ran: dict[Client, Run], client: Client, name: str) -> None:
    assert name in ran[client].outcomes, "it did not come so far"
    wrong = ran[client].outcomes[name]
    assert wrong is None, wrong


@pytest.mark.parametrize("kind", CLIENTS)
def test_the_matrix_in_the_docs_is_what_ran(ran: dict[Client, Run], kind: str) -> None:
    check_table(f"{kind} e2b", _calls(kind), {client: run for client, run in ran.items() if client.kind == kind})
