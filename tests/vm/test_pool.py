"""Machines made before anybody asks."""

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from forkyard import Volume

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


def test_volumes_come_to_a_pooled_machine_and_those_of_many_are_there_already(pooled: Daemon) -> None:
    wait_for_pool(pooled)
    with pooled.client() as fy:
        names = [fy.volumes.create(f"data-{number}", size_mib=64).name for number in range(4)]
        with fy.sandboxes.create(volumes={f"/mnt/{name}": name for name in names}) as first:
            assert machine_of(pooled, first.id).startswith("pool-"), "to mount takes less than to restore"
            first.exec("for v in /mnt/*; do basename $v > $v/name; done; ! ls -d /.forkyard", check=True)
        for name in names:
            assert fy.volumes.read_bytes(name, "/name") == f"{name}\n".encode()

        copy = {"/data": Volume(names[0], mode="cow")}
        fy.sandboxes.create(volumes=copy).delete()
        for volumes, left in ((copy, b"data-0\n"), ({"/data": names[0]}, b"data-0\nwritten\n")):
            parked = until_parked(pooled, "/data")
            with fy.sandboxes.create(volumes=volumes) as sandbox:
                assert machine_of(pooled, sandbox.id) == parked, "they were there before it was somebody's"
                assert sandbox.exec("hostname").stdout.strip() == sandbox.id
                written = sandbox.exec("echo written >> /data/name; cat /data/name", check=True).stdout
                assert written == "data-0\nwritten\n"
            assert fy.volumes.read_bytes(names[0], "/name") == left
        assert '"/data"' not in json.dumps(journals(pooled)), "none is of a version that is gone"
        for name in names:
            fy.volumes.delete(name)


def journals(daemon: Daemon) -> list[dict[str, Any]]:
    found = []
    for path in (daemon.root / "vms").glob("*/journal.json"):
        with contextlib.suppress(FileNotFoundError):  # it went meanwhile
            found.append(json.loads(path.read_text()))
    return found


def machine_of(daemon: Daemon, sandbox_id: str) -> str:
    (found,) = [one["vm_id"] for one in journals(daemon) if one["sandbox_id"] == sandbox_id]
    return str(found)


def until_parked(daemon: Daemon, path: str) -> str:
    """A machine that is nobody's, with a volume there."""
    deadline = time.monotonic() + 60
    while True:
        for one in journals(daemon):
            nobodys = one["vm_id"].startswith("pool-") and not one["sandbox_id"]
            if nobodys and [volume["path"] for volume in one["volumes"]] == [path]:
                time.sleep(3)  # it is warmed up
                return str(one["vm_id"])
        assert time.monotonic() < deadline, "nothing was made ready"
        time.sleep(0.2)
