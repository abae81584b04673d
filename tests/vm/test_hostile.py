"""Clients that vanish and guests that misbehave harm nobody else."""

import http.client
import json
import socket
import threading
import time

from forkyard import Forkyard, Sandbox

from .conftest import Daemon


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, daemon: Daemon) -> None:
        super().__init__("localhost")
        self._path = str(daemon.settings.api_socket)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)

    def vanish(self) -> None:
        self.sock.shutdown(socket.SHUT_RDWR)
        self.close()


def begin(daemon: Daemon, method: str, path: str, **headers: str) -> UnixConnection:
    connection = UnixConnection(daemon)
    connection.putrequest(method, f"/api/v1{path}")
    connection.putheader("X-API-Key", daemon.settings.key_file.read_text().strip())
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    return connection


def test_a_client_that_leaves_in_the_middle_of_an_exec(daemon: Daemon, sbx: Sandbox) -> None:
    body = json.dumps({"command": "yes | head -c 200000000; echo done > /root/done; sleep 600"}).encode()
    connection = begin(
        daemon, "POST", f"/sandboxes/{sbx.id}/exec", Content_Type="application/json", Content_Length=str(len(body))
    )
    connection.send(body)
    assert b"started" in connection.getresponse().readline()
    connection.vanish()
    deadline = time.monotonic() + 120
    while not sbx.files.exists("/root/done"):
        assert time.monotonic() < deadline, "a vanished reader holds the command back"
        time.sleep(0.5)
    assert any(p.running for p in sbx.execs())


def test_a_client_that_leaves_in_the_middle_of_an_upload(daemon: Daemon, sbx: Sandbox) -> None:
    sbx.files.write("/root/kept", "old")
    connection = begin(daemon, "PUT", f"/sandboxes/{sbx.id}/files?path=/root/kept", Content_Length="50000000")
    connection.send(bytes(10_000_000))
    connection.vanish()
    time.sleep(1)
    assert sbx.files.read("/root/kept") == "old", "a write is whole or not at all"
    assert sbx.exec("ls -A /root | grep -c kept").stdout.strip() == "1", "no temporary file is left"


def test_a_client_that_leaves_in_the_middle_of_a_create(daemon: Daemon, fy: Forkyard) -> None:
    body = b'{"name": "left-alone"}'
    connection = begin(daemon, "POST", "/sandboxes", Content_Type="application/json", Content_Length=str(len(body)))
    connection.send(body)
    time.sleep(0.03)
    connection.vanish()
    time.sleep(2)
    states = {s.info.state for s in fy.sandboxes.list(all=True) if s.info.name == "left-alone"}
    assert states <= {"running", "deleted", "failed"}, "nothing hangs half-made"


def test_garbage_on_the_agent_port_harms_only_its_own_sandbox(fy: Forkyard) -> None:
    with fy.sandboxes.create() as bad, fy.sandboxes.create() as good:
        process = bad.spawn(
            "systemctl stop forkyard-agent;"
            "while :; do head -c 100000 /dev/urandom; done > /dev/virtio-ports/forkyard.agent"
        )
        results = []

        def poke() -> None:
            try:
                bad.exec("true", timeout_s=5)
            except Exception as error:
                results.append(error)

        thread = threading.Thread(target=poke)
        thread.start()
        for _ in range(10):
            assert good.exec("echo fine").stdout == "fine\n"
        thread.join(90)
        assert not thread.is_alive()
        assert fy.health().status == "ok"
        del process
