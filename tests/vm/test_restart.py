"""VMs outlive the daemon."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest

from forkyard.errors import ForkyardError
from forkyard.models.network import EgressPolicy, EgressRule

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


class Feed:
    """A server of this host that sends without end, and knows how its client went and who came."""

    def __init__(self) -> None:
        self.address = own_address()
        self._listener = socket.create_server((self.address, 0))
        self.port = self._listener.getsockname()[1]
        self.came: list[bytes] = []
        self.ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._feed, args=(client,), daemon=True).start()

    def _feed(self, client: socket.socket) -> None:
        with client:
            self.came.append(client.recv(100))
            with contextlib.suppress(OSError):
                while self.came[-1].startswith(b"feed"):
                    client.sendall(bytes(65536))
                    time.sleep(0.05)
        self.ended.set()

    def close(self) -> None:
        self._listener.close()


def test_a_download_ends_with_its_daemon_and_the_policy_is_back_before_a_packet_leaves(own_daemon: Daemon) -> None:
    feed, other = Feed(), Feed()
    allowed = EgressRule(cidr=f"{feed.address}/32", ports=[feed.port])
    with contextlib.closing(feed), contextlib.closing(other), own_daemon.client() as fy:
        sbx = fy.sandboxes.create(network=EgressPolicy(preset="none", rules=[allowed]), idle_timeout_s=None)
        sbx.files.write("/root/tries.py", TRIES)
        download = sbx.spawn(["python3", "/root/tries.py", "download", feed.address, str(feed.port)])
        tries = sbx.spawn(["python3", "/root/tries.py", "try", feed.address, str(other.port), str(feed.port)])
        wait_until(lambda: any(came.startswith(b"feed") for came in feed.came))
        own_daemon.kill()
        assert feed.ended.wait(30), "the connection ends with the daemon"
        own_daemon.start()
        again = fy.sandboxes.get(sbx.id)
        assert again.exec("echo alive").stdout == "alive\n"
        before = len(feed.came)
        wait_until(lambda: len(feed.came) > before)  # what is allowed is allowed again
        assert again.process(download.id).wait(timeout_s=60).exit_code == 7, "the guest saw its connection break"
        assert other.came == [], "what is not allowed was not, at any moment"
        again.process(tries.id).kill()
        again.delete()


def wait_until(true: Callable[[], bool], timeout_s: float = 60) -> None:
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


#: In the guest: a download that says by its exit code that it was broken off; tries of a forbidden port and an allowed one.
TRIES = """
import socket, sys
what, address, ports = sys.argv[1], sys.argv[2], [int(word) for word in sys.argv[3:]]
if what == "download":
    with socket.create_connection((address, ports[0])) as one:
        one.sendall(b"feed")
        try:
            while one.recv(65536):
                pass
        except OSError:
            sys.exit(7)
        sys.exit(7)
while True:
    for port in ports:
        try:
            with socket.create_connection((address, port), timeout=1) as one:
                one.sendall(b"try")
                one.recv(1)
        except OSError:
            pass
"""


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
