"""Fork: running copies of now."""

import time

import pytest

from forkyard import Forkyard, Sandbox
from forkyard.errors import InvalidRequest, SandboxEnded

from .conftest import Daemon

COUNTER = "i=0; while :; do i=$((i+1)); echo $i; echo $i > /dev/shm/count; sleep 0.05; done"


def count(sandbox: Sandbox) -> int:
    return int(sandbox.exec("cat /dev/shm/count").stdout or 0)


@pytest.fixture
def parent(fy: Forkyard) -> Sandbox:
    sandbox = fy.sandboxes.create(env={"TEAM": "yard"})
    sandbox.files.write("/root/file", "before")
    return sandbox


def test_children_go_on_where_the_parent_was_each_by_itself(parent: Sandbox) -> None:
    process = parent.spawn(COUNTER)
    time.sleep(1)
    before = count(parent)
    children = parent.fork(3)
    assert len({parent.id, *(c.id for c in children)}) == 4
    for i, child in enumerate(children):
        assert child.parent_id == parent.id
        assert child.exec("hostname").stdout.strip() == child.id
        assert count(child) >= before, "its memory is the parent's"
        assert child.files.read("/root/file") == "before"
        assert child.exec("echo $TEAM").stdout == "yard\n"
        child.files.write("/root/file", f"child {i}")
        assert child.process(process.id).info().running, "the same exec id, in the child"
    assert parent.files.read("/root/file") == "before"
    assert [c.files.read("/root/file") for c in children] == ["child 0", "child 1", "child 2"]
    first = count(children[0])
    time.sleep(0.5)
    assert count(children[0]) > first, "its processes run"
    randoms = {s.exec("head -c 16 /dev/urandom | od -An -tx1").stdout for s in [parent, *children]}
    assert len(randoms) == 4, "no random number twice"
    now = time.time()
    assert all(abs(float(c.exec("date +%s.%N").stdout) - now) < 60 for c in children)


def test_a_streaming_exec_loses_no_byte_and_gets_none_twice_in_parent_and_child(parent: Sandbox) -> None:
    process = parent.spawn("for i in $(seq 1 300); do echo line $i; sleep 0.01; done")
    got = b""
    children: list[Sandbox] = []
    for chunk in process.output():
        got += chunk.data
        if not children and b"line 50\n" in got:
            children = parent.fork(2)
    expected = "".join(f"line {i}\n" for i in range(1, 301))
    assert got.decode() == expected
    for child in children:
        assert b"".join(c.data for c in child.process(process.id).output()).decode() == expected


def test_forks_of_forks_and_of_killed_parents_live_on(parent: Sandbox) -> None:
    parent.exec("echo one > /dev/shm/a; echo one > /root/a")
    (child,) = parent.fork()
    child.exec("echo two > /dev/shm/b; echo two > /root/b")
    (grandchild,) = child.fork()
    parent.delete()
    child.delete()
    assert grandchild.exec("cat /dev/shm/a /root/a /dev/shm/b /root/b").stdout == "one\none\ntwo\ntwo\n"


def test_a_paused_sandbox_is_forked_from_its_sleep(fy: Forkyard, parent: Sandbox) -> None:
    parent.exec("echo kept > /dev/shm/memory")
    for durable in (False, True):
        parent.pause(durable=durable)
        (child,) = parent.fork()
        assert child.exec("cat /dev/shm/memory").stdout == "kept\n"
        assert fy.sandboxes.get(parent.id).info.state == "paused"
        parent.resume()
        assert parent.exec("cat /dev/shm/memory").stdout == "kept\n"
        child.delete()


def test_siblings_share_the_pages_of_the_fork_point(parent: Sandbox) -> None:
    parent.exec("head -c 100000000 /dev/urandom > /dev/shm/big", timeout_s=120).check()
    children = parent.fork(4)
    time.sleep(1)
    usage = [child.usage().pss_mib for child in children]
    assert sum(usage) / len(usage) < 90, f"four siblings with 100 MB each: {usage}"


def test_counts_that_make_no_sense_are_refused(parent: Sandbox) -> None:
    for bad in (0, -1, 1000):
        with pytest.raises(InvalidRequest):
            parent.fork(bad)
    parent.delete()
    with pytest.raises(SandboxEnded):
        parent.fork()


def test_lineage_can_be_drawn(daemon: Daemon, parent: Sandbox) -> None:
    (child,) = parent.fork()
    tree = daemon.cli("tree").stdout
    assert parent.id in tree
    assert child.id in tree
