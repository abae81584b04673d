"""The published E2B clients against the facade: every call of `e2b_calls` and `e2b_npm`, with every version in clients.txt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from forkyard.models.bases import ImageConfig

from ..contract.sdk_daemon import Daemon, running_daemon  # noqa: TID252
from .clients import HERE, Client, Run, all_at_once, cases, check_table, clients, e2b

KINDS = {"pypi": HERE / "e2b_calls", "npm": HERE / "e2b_npm"}
PROGRAMS = {client: program for kind, program in KINDS.items() for client in clients(kind, "e2b")}


#: What the registry of these tests has; who may, it does not ask.
IMAGES = ("ubuntu:24.04", "alpine:3.20", "fedora:42", "archlinux:base", "registry.example.com/team/app:1")


class WithImages(Daemon):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.host.world.registry.update({name: ImageConfig() for name in IMAGES})


@pytest.fixture(scope="module")
def ran() -> Iterator[dict[Client, Run]]:
    with (
        running_daemon(of=WithImages) as one,
        running_daemon(of=WithImages) as another,
        all_at_once(PROGRAMS, lambda n, _: e2b((one, another)[n % 2])) as started,
    ):
        yield started


@cases(PROGRAMS)
def test_a_published_client_gets_what_it_expects(ran: dict[Client, Run], client: Client, name: str) -> None:
    ran[client].works(name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_in_the_docs_is_what_ran(ran: dict[Client, Run], kind: str) -> None:
    check_table(f"{kind} e2b", KINDS[kind], {client: run for client, run in ran.items() if client.kind == kind})
