"""The published code interpreters of E2B: every call of `e2b_code` and `e2b_code_npm`, with every version in clients.txt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard.guest import code

from ..contract.sdk_daemon import running_daemon  # noqa: TID252
from .clients import HERE, Client, Run, all_at_once, cases, check_table, clients, e2b, places

KINDS = {"pypi": HERE / "e2b_code", "npm": HERE / "e2b_code_npm"}
CLIENTS = [*clients("pypi", "e2b-code-interpreter"), *clients("npm", "@e2b/code-interpreter")]
PROGRAMS = {client: KINDS[client.kind] for client in CLIENTS}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Client, Run]]:
    (python,) = places("ipykernel").values()
    # This machine's own python3 has no kernel.
    path = {"COMPAT_PATH": f"{Path(python).parent}:/usr/local/bin:/usr/bin:/bin"}
    with pytest.MonkeyPatch.context() as patch, running_daemon() as daemon:
        patch.setattr(code, "FOLDER", str(tmp_path_factory.mktemp("code")))
        code.bundle.cache_clear()
        with all_at_once(PROGRAMS, lambda _n, _client: e2b(daemon) | path) as started:
            yield started
    code.bundle.cache_clear()


@cases(PROGRAMS)
def test_a_published_interpreter_gets_what_it_expects(ran: dict[Client, Run], client: Client, name: str) -> None:
    ran[client].works(name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_in_the_docs_is_what_ran(ran: dict[Client, Run], kind: str) -> None:
    found = {client: run for client, run in ran.items() if client.kind == kind}
    check_table(f"{kind} e2b-code-interpreter", KINDS[kind], found)
