"""The published code interpreters of E2B: every call of `e2b_code` and `e2b_code_npm`, with every version in clients.txt."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard.guest import code

from ..contract.sdk_daemon import running_daemon  # noqa: TID252
from .clients import HERE, Client, Run, check_table, clients, places

CLIENTS = {
    "pypi": clients("pypi", "e2b-code-interpreter"),
    "npm": clients("npm", "@e2b/code-interpreter"),
}
PROGRAMS = {"pypi": HERE / "e2b_code", "npm": HERE / "e2b_code_npm"}


@functools.cache
def _calls(kind: str) -> list[tuple[str, str]]:
    command = [sys.executable, PROGRAMS[kind]] if kind == "pypi" else ["node", PROGRAMS[kind] / "main.js"]
    told = subprocess.run([*command, "--list"], capture_output=True, check=True, timeout=60)
    return [(name, since) for name, since in json.loads(told.stdout)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Client, Run]]:
    started: dict[Client, Run] = {}
    (python,) = places("ipykernel").values()
    with pytest.MonkeyPatch.context() as patch, running_daemon() as daemon:
        patch.setattr(code, "FOLDER", str(tmp_path_factory.mktemp("code")))
        code.bundle.cache_clear()
        try:
            for client in (found for kind in CLIENTS for found in CLIENTS[kind]):
                env = {
                    "E2B_API_KEY": daemon.cli("keys", "create", "e2b", "--format", "e2b").stdout.strip(),
                    "E2B_API_URL": daemon.url,
                    "E2B_SANDBOX_URL": daemon.url,
                    # This machine's own python3 has no kernel.
                    "COMPAT_PATH": f"{Path(python).parent}:/usr/local/bin:/usr/bin:/bin",
                }
                started[client] = Run(client, PROGRAMS[client.kind], env)
            yield started
        finally:
            for run in started.values():
                run.end()
    code.bundle.cache_clear()


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
def test_a_published_interpreter_gets_what_it_expects(ran: dict[Client, Run], client: Client, name: str) -> None:
    assert name in ran[client].outcomes, "it did not come so far"
    wrong = ran[client].outcomes[name]
    assert wrong is None, wrong


@pytest.mark.parametrize("kind", CLIENTS)
def test_the_table_in_the_docs_is_what_ran(ran: dict[Client, Run], kind: str) -> None:
    found = {client: run for client, run in ran.items() if client.kind == kind}
    check_table(f"{kind} e2b-code-interpreter", _calls(kind), found)
