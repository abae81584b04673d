"""The published Freestyle clients against the facade: every call of `freestyle_calls`, with every version in clients.txt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..contract.sdk_daemon import running_daemon  # noqa: TID252
from ..contract.zone import Zone  # noqa: TID252
from .clients import HERE, Client, Run, all_at_once, cases, check_table, clients, freestyle

PROGRAM = HERE / "freestyle_calls"
PROGRAMS = dict.fromkeys([*clients("npm", "freestyle-sandboxes"), *clients("npm", "freestyle")], PROGRAM)


@pytest.fixture(scope="module")
def ran(zone: Zone, zone_dir: Path) -> Iterator[dict[Client, Run]]:
    with running_daemon() as one, running_daemon() as another:
        for daemon in (one, another):
            daemon._control.domains.nameservers = [zone.address]
        with all_at_once(PROGRAMS, lambda n, client: freestyle((one, another)[n % 2], client, zone_dir)) as started:
            yield started


@cases(PROGRAMS)
def test_a_published_client_gets_what_it_expects(ran: dict[Client, Run], client: Client, name: str) -> None:
    ran[client].works(name)


def test_the_matrix_in_the_docs_is_what_ran(ran: dict[Client, Run]) -> None:
    check_table("npm freestyle", PROGRAM, ran)
