"""The oldest and the newest published clients of Freestyle on real VMs: the calls of `freestyle_calls`, with those that take
a machine, and the snippets of its documentation. How long they take is `bench compat`'s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..vm.conftest import Daemon  # noqa: TID252
from .clients import HERE, Client, Run, all_at_once, check_table, clients, distinct, freestyle

DISTINCT_CALLS = 120
CLIENTS = [clients("npm", "freestyle-sandboxes")[0], clients("npm", "freestyle")[-1]]
PROGRAMS = dict.fromkeys(CLIENTS, HERE / "freestyle_calls")
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def ran(daemon: Daemon, zone_dir: Path) -> Iterator[dict[Client, Run]]:
    with all_at_once(PROGRAMS, lambda _, client: {**freestyle(daemon, client, zone_dir), "COMPAT_VM": "1"}) as started:
        yield started


@pytest.mark.parametrize("client", CLIENTS, ids=str)
def test_every_call_works_on_machines(ran: dict[Client, Run], client: Client) -> None:
    outcomes = ran[client].outcomes
    wrong = [f"{name}:\n{why}" for name, why in outcomes.items() if why is not None]
    assert not wrong, "\n\n".join(wrong)
    assert "vm.exec: in a VM that is gone" in outcomes, "it did not come to the end"


def test_enough_different_calls_work(ran: dict[Client, Run]) -> None:
    works = [name for run in ran.values() for name, wrong in run.outcomes.items() if wrong is None]
    assert len(distinct(works)) >= DISTINCT_CALLS


def test_the_matrix_in_the_docs_is_what_ran(ran: dict[Client, Run]) -> None:
    check_table("npm freestyle on machines", HERE / "freestyle_calls", ran, machines=True)
