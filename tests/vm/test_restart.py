"""VMs outlive the daemon."""

import contextlib
import threading
import time

import pytest

from forkyard.errors import ForkyardError

from .conftest import Daemon, belongings

pytestmark = pytest.mark.timeout(300)


def test_a_killed_daemon_loses_no_sandbox_and_no_exec(own_daemon: Daemon) -> None:
    with own_daemon.client() as fy:
        sbx = fy.sandboxes.create(labels={"kept": "yes"})
        sbx.files.write("/root/file", "before")
        counter = sbx.spawn("for i in $(seq 1 1000); do echo $i; sleep 0.05; done")
        time.sleep(0.5)
        own_daemon.kill()
        own_daemon.start()
        again = fy.sandboxes.get(sbx.id)
        assert again.info.state == "running"
        assert again.info.labels == {"kept": "yes"}
        assert again.files.read("/root/file") == "before"
        assert again.exec("echo alive").stdout == "alive\n"
        process = again.process(counter.id)
        assert process.info().running
        lines = b""
        for chunk in process.output():
            lines += chunk.data
            if lines.count(b"\n") > 30:
                break
        numbers = [int(n) for n in lines.split(b"\n")[:30]]
        assert numbers == list(range(1, 31)), "nothing lost, nothing twice"
        again.delete()


def test_an_exec_that_streams_goes_on_over_a_kill_without_loss(own_daemon: Daemon) -> None:
    with own_daemon.client() as fy:
        sbx = fy.sandboxes.create()
        got: list[bytes] = []

        def follow() -> None:
            got.extend(c.data for c in sbx.exec_stream("for i in $(seq 1 60); do echo line $i; sleep 0.1; done"))

        reader = threading.Thread(target=follow)
        reader.start()
        while not got:
            time.sleep(0.05)
        own_daemon.kill()
        own_daemon.start()
        reader.join(60)
        assert not reader.is_alive()
        assert b"".join(got).decode().splitlines() == [f"line {i}" for i in range(1, 61)]
        sbx.delete()


def test_a_normal_stop_leaves_machines_running(own_daemon: Daemon) -> None:
    with own_daemon.client() as fy:
        sbx = fy.sandboxes.create()
        sbx.exec("echo kept > /dev/shm/memory")
        own_daemon.stop()
        assert any("process" in item for item in belongings(own_daemon))
        own_daemon.start()
        assert fy.sandboxes.get(sbx.id).exec("cat /dev/shm/memory").stdout == "kept\n"
        sbx.delete()


def test_a_daemon_killed_in_the_middle_of_a_create_leaves_nothing_half_made(own_daemon: Daemon) -> None:
    with own_daemon.client() as fy:
        fy.sandboxes.create().delete()  # the template is loaded

        def attempt() -> None:
            with contextlib.suppress(ForkyardError):  # whether it is made or fails is a matter of milliseconds
                fy.sandboxes.create()

        for delay_ms in (5, 20, 40, 60, 80, 110, 150, 200):
            thread = threading.Thread(target=attempt, daemon=True)
            thread.start()
            time.sleep(delay_ms / 1000)
            own_daemon.kill()
            own_daemon.start()
            thread.join(60)
            known = {s.id for s in fy.sandboxes.list()}
            directories = (item for item in belongings(own_daemon) if item.startswith("vms"))
            assert {d.split("/")[-1].rsplit("-", 1)[0] for d in directories} <= known, "a machine that no sandbox knows"
            for sandbox in fy.sandboxes.list():
                assert sandbox.info.state == "running"
                assert sandbox.exec("echo ok").stdout == "ok\n"
                sandbox.delete()
