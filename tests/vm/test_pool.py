"""Machines made before anybody asks."""

import time
from collections.abc import Iterator

import pytest

from .conftest import Daemon, belongings, make_daemon, remove_daemon


@pytest.fixture
def pooled() -> Iterator[Daemon]:
    daemon = make_daemon()
    daemon.extra_env = {"FORKYARD_POOL_SIZE": "2", "FORKYARD_POOL_SHELLS": "1"}
    daemon.start()
    yield daemon
    remove_daemon(daemon)


def pooled_vms(daemon: Daemon) -> set[str]:
    return {item for item in belongings(daemon) if "/pool-" in item or "/shell-" in item}


def wait_for_pool(daemon: Daemon) -> None:
    deadline = time.monotonic() + 120
    while not any("/pool-" in item for item in pooled_vms(daemon)):
        assert time.monotonic() < deadline, "nothing was made ready"
        time.sleep(0.2)
    time.sleep(3)


def test_a_pooled_machine_is_as_clean_as_a_fresh_one(pooled: Daemon) -> None:
    wait_for_pool(pooled)
    with pooled.client() as fy:
        one = fy.sandboxes.create(env={"A": "1"})
        assert one.logs().create[0].name == "restored"
        two = fy.sandboxes.create()
        for sandbox in (one, two):
            assert sandbox.exec("hostname").stdout.strip() == sandbox.id
            assert sandbox.execs()[0].command == "hostname", "its past is not shown"
            assert abs(float(sandbox.exec("date +%s.%N").stdout) - time.time()) < 3
        assert one.exec("echo $A").stdout == "1\n"
        assert two.exec("echo $A").stdout == "\n"
        assert (
            len({s.exec("cat /etc/machine-id; head -c 8 /dev/urandom | od -An -tx1").stdout for s in (one, two)}) == 2
        )


def test_a_killed_daemon_leaves_no_pooled_machine_behind(pooled: Daemon) -> None:
    wait_for_pool(pooled)
    before = pooled_vms(pooled)
    pooled.kill()
    pooled.start()
    assert not before & pooled_vms(pooled)
