"""Ports and sockets of a sandbox by SSH, `forkyard ssh`, `forkyard port`, and `forward` of the SDK."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forkyard import Conflict, Forkyard, PortClosed, Sandbox

from . import ssh_yard
from .ssh_yard import Client, SshDaemon, exchange, free_port, listens, tunnel, until

daemon, fy, sbx, ssh = ssh_yard.daemon, ssh_yard.fy, ssh_yard.sbx, ssh_yard.ssh
echo = ssh_yard.echo


def test_local_forwarding_carries_bytes_both_ways_at_once(ssh: Client, sbx: Sandbox, echo: int) -> None:
    local, data = free_port(), os.urandom(4_000_000)
    with tunnel(ssh, sbx, "-L", f"{local}:localhost:{echo}"):
        until(lambda: listens(local))
        assert exchange(local, data) == data
        assert exchange(local, b"again") == b"again"


def test_an_editor_s_way_a_script_by_standard_input_and_a_socks_proxy_beside_it(
    ssh: Client, sbx: Sandbox, echo: int
) -> None:
    local = free_port()
    process = subprocess.Popen(ssh.command(sbx.id, "bash", options=("-T", "-D", str(local))), stdin=-1, stdout=-1)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"echo started on $(uname -s)\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"started on Linux\n"
    with socket.create_connection(("127.0.0.1", local), timeout=20) as one:
        one.sendall(b"\5\1\0")
        assert one.recv(2) == b"\5\0"
        one.sendall(b"\5\1\0\1\x7f\0\0\1" + echo.to_bytes(2, "big"))
        assert one.recv(10)[:2] == b"\5\0"
        one.sendall(b"through")
        assert one.recv(7) == b"through"
    assert process.communicate(b"exit 6\n", timeout=20) == (b"", None)
    assert process.returncode == 6


def test_what_comes_in_by_ssh_is_counted(ssh: Client, fy: Forkyard, echo: int) -> None:
    with fy.sandboxes.create() as sandbox:
        assert ssh.run(sandbox.id, "cat", input=bytes(30_000)).stdout == bytes(30_000)
        used = sandbox.usage()
        assert (used.ingress_bytes_in, used.ingress_bytes_out) == (30_000, 30_000)
        local = free_port()
        with tunnel(ssh, sandbox, "-L", f"{local}:localhost:{echo}"):
            until(lambda: listens(local))
            assert exchange(local, bytes(20_000)) == bytes(20_000)
        used = sandbox.usage()
        assert (used.ingress_bytes_in, used.ingress_bytes_out) == (50_000, 50_000)


def test_only_ports_of_the_sandbox_itself_are_forwarded(ssh: Client, sbx: Sandbox, echo: int) -> None:
    done = ssh.run(sbx.id, options=("-W", f"192.0.2.1:{echo}"))
    assert b"only ports of the sandbox itself" in done.stderr
    done = ssh.run(sbx.id, options=("-W", f"localhost:{free_port()}"))
    assert b"nothing listens" in done.stderr


def test_remote_forwarding_carries_bytes_both_ways_at_once(ssh: Client, sbx: Sandbox, echo: int) -> None:
    inside, data = free_port(), os.urandom(4_000_000)
    with tunnel(ssh, sbx, "-R", f"{inside}:localhost:{echo}"):
        until(lambda: listens(inside))
        assert exchange(inside, data) == data
        with ThreadPoolExecutor(20) as pool:
            assert list(pool.map(lambda n: exchange(inside, b"%d" % n), range(20))) == [b"%d" % n for n in range(20)]
        with socket.create_connection(("127.0.0.1", inside), timeout=20) as held:
            held.sendall(b"one")
            assert held.recv(3) == b"one"
            assert exchange(inside, b"beside it") == b"beside it"
    until(lambda: not listens(inside))


def test_a_port_that_nobody_serves_at_the_client_closes_what_comes(ssh: Client, sbx: Sandbox) -> None:
    inside = free_port()
    with tunnel(ssh, sbx, "-R", f"{inside}:localhost:{free_port()}"):
        until(lambda: listens(inside))
        for _ in range(20):  # more than may wait
            with (
                contextlib.suppress(ConnectionError),
                socket.create_connection(("127.0.0.1", inside), timeout=20) as one,
            ):
                assert one.recv(1) == b""


def test_a_free_port_is_chosen_and_one_that_is_taken_is_said_so(ssh: Client, sbx: Sandbox, echo: int) -> None:
    with tunnel(ssh, sbx, "-R", f"0:localhost:{echo}") as process:
        assert process.stderr is not None
        found = re.search(rb"Allocated port (\d+) for remote forward", process.stderr.readline())
        assert found is not None
        assert exchange(int(found[1]), b"hello") == b"hello"
    done = ssh.run(sbx.id, "echo on", options=("-v", "-R", f"{echo}:localhost:1"))
    assert done.stdout == b"on\n"
    assert b"remote port forwarding failed" in done.stderr
    assert done.stderr.count(b"(-R): Address already in use") == 2  # one only for `-v`


def test_one_connection_forwards_so_many_ports_to_its_client(ssh: Client, sbx: Sandbox) -> None:
    ports = [free_port() for _ in range(9)]
    done = ssh.run(sbx.id, "true", options=tuple(word for port in ports for word in ("-R", f"{port}:localhost:1")))
    assert done.stderr.count(b"remote port forwarding failed") == 1
    assert b"at most 8 ports" in done.stderr
    until(lambda: not any(listens(port) for port in ports))


def test_what_listened_for_a_client_that_went_while_its_sandbox_slept_is_cleared_away(
    ssh: Client, fy: Forkyard, echo: int
) -> None:
    inside = free_port()
    with fy.sandboxes.create() as sandbox:
        with tunnel(ssh, sandbox, "-R", f"{inside}:localhost:{echo}"):
            until(lambda: listens(inside))
            assert exchange(inside, b"hello") == b"hello"
            # That connection and the knock of `listens` are over: what is left of them would wake it.
            until(lambda: [one.running for one in sandbox.execs()].count(True) == 1)
            sandbox.pause()
        assert sandbox.refresh().state == "paused"

        def answers() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", inside), timeout=1) as one:
                one.sendall(b"hello")
                return one.recv(5) == b"hello"
            return False

        assert not answers()  # it listens still
        with tunnel(ssh, sandbox, "-R", f"{inside}:localhost:{echo}"):
            until(answers)


def test_unix_sockets_to_the_client_and_agents_are_refused(ssh: Client, sbx: Sandbox, tmp_path: Path) -> None:
    done = ssh.run(sbx.id, "echo ${SSH_AUTH_SOCK-none}", options=("-v", "-A", "-R", f"{tmp_path}/s:localhost:1"))
    assert b"remote port forwarding failed" in done.stderr
    assert done.stdout == b"none\n"
    assert (
        done.stderr.count(b"unix sockets of a sandbox are not forwarded to the client (-R)") == 2
    )  # one only for `-v`


def test_a_unix_socket_of_the_guest_is_forwarded(ssh: Client, sbx: Sandbox, tmp_path: Path) -> None:
    path, local = tmp_path / "s", free_port()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with tunnel(ssh, sbx, "-L", f"{local}:{path}"):
            until(lambda: listens(local))
            server.settimeout(10)
            server.accept()[0].close()  # the knock of `listens`
            with socket.create_connection(("127.0.0.1", local), timeout=20) as near:
                far = server.accept()[0]
                with far:
                    near.sendall(b"hello")
                    assert far.recv(5) == b"hello"
                    far.sendall(b"bye")
                assert near.recv(3) == b"bye"
                assert near.recv(1) == b""


def test_a_server_at_a_unix_socket_that_speaks_first_is_heard(ssh: Client, sbx: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def greet() -> None:
            with server.accept()[0] as one:
                one.sendall(b"hello")

        with ThreadPoolExecutor() as pool:
            for _ in range(5):
                greeted = pool.submit(greet)
                local = free_port()
                with tunnel(ssh, sbx, "-L", f"{local}:{path}") as process:
                    assert process.poll() is None
                    until(lambda port=local: _heard(port) == b"hello")
                    greeted.result(10)


def _heard(port: int) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as one:
            return one.recv(5)
    except ConnectionRefusedError:  # the client is not there yet
        return b""


# ── `forkyard ssh`, `forkyard port`, SDK ─────────────────────────────────────────────────────────────────────────


def test_forkyard_ssh_needs_nothing_set_up(daemon: SshDaemon, sbx: Sandbox, tmp_path: Path) -> None:
    env = {**daemon.env, "XDG_CONFIG_HOME": str(tmp_path)}

    def cli(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "forkyard.cli", *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)

    done = cli("ssh", "ssh", "--", "echo", "a | b", "$HOME")
    assert (done.returncode, done.stdout) == (0, "a | b $HOME\n"), done.stderr
    assert cli("ssh", sbx.id[:8], "exit 4").returncode == 4
    (tmp_path / "config").write_text(cli("ssh", sbx.id, "--config").stdout)
    words = ["ssh", "-F", str(tmp_path / "config"), "ssh", "echo via config"]
    assert subprocess.run(words, capture_output=True, text=True, timeout=30).stdout == "via config\n"
    shown = json.loads(cli("ssh", sbx.id, "--json").stdout)
    assert (shown["user"], shown["port"]) == (sbx.id, daemon.port_of_ssh)
    (key,) = [
        key for key in json.loads(cli("ssh-keys", "ls", "--json").stdout) if key["name"].startswith("forkyard ssh")
    ]
    assert cli("ssh-keys", "rm", key["id"]).returncode == 0
    assert key["id"] not in cli("ssh-keys", "ls").stdout
    added = cli("ssh-keys", "add", str(tmp_path / "forkyard" / "ssh" / "id_ed25519.pub"))
    assert added.stdout.strip() in cli("ssh-keys", "ls").stdout


def test_forkyard_port_forwards_until_it_is_ended(daemon: SshDaemon, sbx: Sandbox, echo: int) -> None:
    command = [sys.executable, "-m", "forkyard.cli", "--url", daemon.url, "--api-key", daemon.key, "port", sbx.id]
    process = subprocess.Popen([*command, str(echo), "--json"], stdout=-1, text=True)
    assert process.stdout is not None
    shown = json.loads(process.stdout.readline())
    assert shown["guest_port"] == echo
    data = os.urandom(3_000_000)
    assert exchange(shown["port"], data) == data
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    process.stdout.close()
    refused = subprocess.run([*command, "70000"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "PORT:LOCAL" in refused.stderr


def test_forward_of_the_sdk(fy: Forkyard, sbx: Sandbox, echo: int) -> None:
    with sbx.forward(echo) as forward:
        assert exchange(forward.port, b"hello") == b"hello"
        with pytest.raises(Conflict, match="another local port"):
            sbx.forward(echo, local_port=forward.port).open()
    assert not listens(forward.port if forward._listener else 1)
    with sbx.forward(free_port()) as closed:
        assert exchange(closed.port, b"hello") == b""
        until(lambda: isinstance(closed.error, PortClosed))


def test_forward_of_the_async_sdk_wakes_and_outlives_a_hot_pause(daemon: SshDaemon, echo: int) -> None:
    from forkyard import AsyncForkyard

    async def session() -> None:
        async with (
            AsyncForkyard(socket=daemon.socket, key_file=daemon.key_file) as fy,
            await fy.sandboxes.create() as sandbox,
            sandbox.forward(echo) as forward,
        ):
            await sandbox.pause()
            reader, writer = await asyncio.open_connection("127.0.0.1", forward.port)
            writer.write(b"one")
            assert await reader.readexactly(3) == b"one"
            await sandbox.pause()
            writer.write(b"two")
            assert await reader.readexactly(3) == b"two"
            assert (await sandbox.refresh()).state == "running"
            writer.close()
            await writer.wait_closed()

    asyncio.run(asyncio.wait_for(session(), 60))


@pytest.mark.parametrize("port", ["0", "70000", "x", "-1", "١"])
def test_a_port_that_is_none_is_refused_by_name(daemon: SshDaemon, sbx: Sandbox, port: str) -> None:
    from urllib.parse import quote

    from websockets.sync.client import connect

    url = f"ws://127.0.0.1:{daemon.port}/api/v1/sandboxes/{sbx.id}/ports/{quote(port)}?key={daemon.key}"
    with connect(url) as one:
        problem = json.loads(one.recv())["problem"]
    assert problem["code"] == "invalid_request"
    assert "1 to 65535" in problem["detail"]
