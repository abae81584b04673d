"""A daemon with real VMs, for as long as one file of tests runs; those that need none have one of their own. And a name
server, whose records are files that the programs of clients write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ..contract import sdk_daemon  # noqa: TID252
from ..contract.zone import Zone  # noqa: TID252
from ..vm.conftest import Daemon, make_daemon, remove_daemon  # noqa: TID252
from .e2b_wire import api_of


@pytest.fixture(scope="session")
def zone_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zone")


@pytest.fixture(scope="session")
def zone(zone_dir: Path) -> Iterator[Zone]:
    with Zone(zone_dir) as zone:
        yield zone


@pytest.fixture(scope="module")
def daemon(zone: Zone) -> Iterator[Daemon]:
    daemon = make_daemon()
    daemon.extra_env["FORKYARD_DNS_SERVERS"] = "{}:{}".format(*zone.address)
    daemon.start()
    yield daemon
    remove_daemon(daemon)


@pytest.fixture(scope="module")
def api(daemon: sdk_daemon.Daemon) -> Iterator[httpx.Client]:
    """E2B's control plane, of whichever daemon a file of tests has."""
    with api_of(daemon) as client:
        yield client
