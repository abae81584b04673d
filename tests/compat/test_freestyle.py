"""The published Freestyle clients against the facade: every call of `freestyle_calls`, with every version in clients.txt."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator

import pytest

from ..contract.sdk_daemon import running_daemon  # noqa: TID252
from .clients import HERE, Client, Run, check_table, clients

PROGRAM = HERE / "freestyle_calls"
CLIENTS = [*clients("npm", "freestyle-sandboxes"), *clients("npm", "freestyle")]


@functools.cache
def _calls() -> list[tuple[str, str]]:
    """Those that need no real machine."""
    told = subprocess.run(["node", PROGRAM / "main.js", "--list"], capture_output=True, check=True, timeout=60)
    return [(name, since) for name, since, vm in json.loads(told.stdout) if not vm]


@pytest.fixture(scope="module")
def ran() -> Iterator[dict[Client, Run]]:
    """All versions at once, on two daemons: half of the time they wait."""
    started: dict[Client, Run] = {}
    with running_daemon() as one, running_daemon() as another:
        try:
            for n, client in enumerate(CLIENTS):
                daemon = (one, another)[n % 2]
                env = {
                    "FREESTYLE_API_KEY": daemon.cli("keys", "create", "fs", "--format", "freestyle").stdout.strip(),
                    "FREESTYLE_API_URL": daemon.url,
                    "COMPAT_PACKAGE": client.name,
                }
                started[client] = Run(client, PROGRAM, env)
            yield started
        finally:
            for run in started.values():
                run.end()


@pytest.mark.parametrize(
    ("client", "name"),
    [
        pytest.param(client, name, id=f"{client}: {name}")
        for client in CLIENTS
        for name, since in _calls()
        if client.has(since)
    ],
)
def test_a_published_client_gets_what_it_expects(ran: dict[Client, Run], client: Client, name: str) -> None:
    assert name in ran[client].outcomes, "it did not come so far"
    wrong = ran[client].outcomes[name]
    assert wrong is None, wrong


def test_the_matrix_in_the_docs_is_what_ran(ran: dict[Client, Run]) -> None:
    check_table("npm freestyle", _calls(), ran)
