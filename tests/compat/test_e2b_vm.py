"""The oldest and the newest published clients of E2B on real VMs: the calls of `e2b_calls` and `e2b_code`, and of their like
for npm, with those that take a machine. How long they take is `bench compat`'s."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..vm.conftest import Daemon  # noqa: TID252
from .clients import HERE, Client, Run, check_table, clients, distinct, e2b

DISTINCT_CALLS = 120
_PYPI = clients("pypi", "e2b")
CLIENTS = [_PYPI[0], _PYPI[-1]]
NPM = clients("npm", "e2b")[-1]
PROGRAMS = {
    **dict.fromkeys(CLIENTS, HERE / "e2b_calls"),
    clients("pypi", "e2b-code-interpreter")[-1]: HERE / "e2b_code",
    NPM: HERE / "e2b_npm",
    clients("npm", "@e2b/code-interpreter")[-1]: HERE / "e2b_code_npm",
}
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def env(daemon: Daemon) -> dict[str, str]:
    return {**e2b(daemon), "COMPAT_VM": "1"}


@pytest.fixture(scope="module")
def ran(env: dict[str, str]) -> Iterator[dict[Client, Run]]:
    """Two at a time: machines that nobody gives a processor to are not what is tested."""
    started: dict[Client, Run] = {}
    try:
        for client, program in PROGRAMS.items():
            if len(started) >= 2:
                assert list(started.values())[-2].outcomes
            started[client] = Run(client, program, env)
        yield started
    finally:
        for run in started.values():
            run.end()


@pytest.mark.parametrize("client", PROGRAMS, ids=str)
def test_every_call_works_on_machines(ran: dict[Client, Run], client: Client) -> None:
    outcomes = ran[client].outcomes
    wrong = [f"{name}:\n{why}" for name, why in outcomes.items() if why is not None]
    assert not wrong, "\n\n".join(wrong)
    assert "kill" in " ".join(outcomes), "it did not come to the end"


def test_enough_different_calls_work(ran: dict[Client, Run]) -> None:
    works = [name for run in ran.values() for name, wrong in run.outcomes.items() if wrong is None]
    assert len(distinct(works)) >= DISTINCT_CALLS


def test_the_matrix_in_the_docs_is_what_ran(ran: dict[Client, Run]) -> None:
    check_table("pypi e2b on machines", HERE / "e2b_calls", {client: ran[client] for client in CLIENTS}, machines=True)
    check_table("npm e2b on machines", HERE / "e2b_npm", {NPM: ran[NPM]}, machines=True)
