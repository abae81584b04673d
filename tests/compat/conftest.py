"""A daemon with real VMs, for as long as one file of tests runs; those that need none have one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..vm.conftest import Daemon, make_daemon, remove_daemon  # noqa: TID252


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    daemon = make_daemon()
    daemon.start()
    yield daemon
    remove_daemon(daemon)
