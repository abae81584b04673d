"""The oldest and the newest published clients of E2B on real VMs: the calls of `e2b_calls` and `e2b_code`, and what a sandbox
with its first command takes, compared with our own SDK in the same run."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Iterator

import pytest

from ..vm.conftest import Daemon, make_daemon, remove_daemon  # noqa: TID252
from .clients import HERE, Client, Run, clients, command

DISTINCT_CALLS = 120
ROUNDS = 7
MOST = 1.3
_PYPI = clients("pypi", "e2b")
PROGRAMS = {
    _PYPI[0]: HERE / "e2b_calls",
    _PYPI[-1]: HERE / "e2b_calls",
    clients("pypi", "e2b-code-interpreter")[-1]: HERE / "e2b_code",
}
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    daemon = make_daemon()
    # As a user has it: warm.
    daemon.extra_env = {"FORKYARD_POOL_SIZE": "2", "FORKYARD_POOL_SHELLS": "2", "FORKYARD_POOL_SLOTS": "4"}
    daemon.start()
    with daemon.client() as fy, fy.sandboxes.create() as made:
        made.exec("true")
    yield daemon
    remove_daemon(daemon)


@pytest.fixture(scope="module")
def env(daemon: Daemon) -> dict[str, str]:
    found = re.findall(r"http://127\.0\.0\.1:[0-9]+", daemon.log)
    key = daemon.cli("keys", "create", "e2b", "--format", "e2b").stdout.strip()
    urls = {name: found[0] for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL")}
    return {"E2B_API_KEY": key, **urls, "COMPAT_VM": "1"}


@pytest.fixture(scope="module")
def ran(env: dict[str, str]) -> Iterator[dict[Client, Run]]:
    started = {client: Run(client, program, env) for client, program in PROGRAMS.items()}
    yield started
    for run in started.values():
        run.end()


@pytest.mark.parametrize("client", PROGRAMS, ids=str)
def test_every_call_works_on_machines(ran: dict[Client, Run], client: Client) -> None:
    outcomes = ran[client].outcomes
    assert {name: wrong for name, wrong in outcomes.items() if wrong is not None} == {}
    assert "kill" in " ".join(outcomes), "it did not come to the end"


def test_enough_different_calls_work(ran: dict[Client, Run]) -> None:
    names = {name for run in ran.values() for name, wrong in run.outcomes.items() if wrong is None}
    assert len(names) >= DISTINCT_CALLS


def test_a_sandbox_and_its_first_command_take_hardly_longer_than_with_our_own_sdk(
    daemon: Daemon, env: dict[str, str]
) -> None:
    newest = _PYPI[-1]
    theirs: list[float] = []
    ours: list[float] = []
    with (
        daemon.client() as fy,
        subprocess.Popen(
            command(newest, HERE / "e2b_bench"),
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client,
    ):
        assert client.stdin is not None
        assert client.stdout is not None
        for _ in range(ROUNDS + 1):
            client.stdin.write("\n")
            client.stdin.flush()
            theirs.append(json.loads(client.stdout.readline())["ms"])
            began = time.monotonic()
            made = fy.sandboxes.create()
            made.exec(["/bin/bash", "-l", "-c", "true"], user="user")
            ours.append((time.monotonic() - began) * 1000)
            made.delete()
        client.stdin.close()
    # The first of each warms what the rest find.
    mean = [statistics.median(found[1:]) for found in (theirs, ours)]
    print(f"create and first command: {mean[0]:.0f} ms with {newest}, {mean[1]:.0f} ms with our own SDK")
    assert mean[0] <= MOST * mean[1]
