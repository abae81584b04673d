"""Who comes in by SSH, with the real OpenSSH client."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from forkyard import Forkyard, InvalidRequest, NotFound, Sandbox
from forkyard.gateway import ssh as gateway

from . import ssh_yard
from .ssh_yard import Client, SshDaemon

daemon, fy, sbx, ssh = ssh_yard.daemon, ssh_yard.fy, ssh_yard.sbx, ssh_yard.ssh


# ── login ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_registered_key_opens_a_sandbox_and_is_noted(ssh: Client, fy: Forkyard, sbx: Sandbox) -> None:
    done = ssh.run(sbx.id, "echo in; whoami")
    assert (done.returncode, done.stdout) == (0, b"in\nroot\n"), done.stderr
    (key,) = [key for key in fy.ssh.list_keys() if key.last_used_at]
    assert key.fingerprint.startswith("SHA256:")


def test_a_key_that_is_not_registered_opens_nothing(daemon: SshDaemon, sbx: Sandbox, tmp_path: Path) -> None:
    done = Client(daemon, tmp_path).run(sbx.id, "echo in")
    assert done.returncode == 255
    assert b"Permission denied" in done.stderr
    assert done.stdout == b""


def _ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, complaint = process.communicate(timeout=30)
    return process.returncode, complaint.decode()


def _session(client: Client, sandbox: Sandbox, *options: str) -> subprocess.Popen[bytes]:
    """A command that is under way."""
    command = client.command(sandbox.id, "echo in; sleep 100", options=options)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1)
    assert process.stdout is not None
    assert process.stdout.readline() == b"in\n"
    return process


def test_a_deleted_key_ends_what_was_opened_with_it_and_opens_nothing_more(
    daemon: SshDaemon, ssh: Client, fy: Forkyard, sbx: Sandbox, tmp_path: Path
) -> None:
    client = Client(daemon, tmp_path)
    added = fy.ssh.add_key(client.public_key, name="short")
    assert fy.ssh.add_key(client.public_key).id == added.id
    session, other = _session(client, sbx), _session(ssh, sbx)
    fy.ssh.delete_key(added.id)
    code, complaint = _ended(session)
    assert code == 255 and "not valid any more" in complaint
    assert b"Permission denied" in client.run(sbx.id, "true").stderr
    with pytest.raises(NotFound):
        fy.ssh.delete_key(added.id)
    assert other.poll() is None
    other.terminate()
    other.communicate()


def test_a_token_that_is_revoked_and_an_api_key_that_is_deleted_end_their_sessions(
    ssh: Client, daemon: SshDaemon, fy: Forkyard, sbx: Sandbox
) -> None:
    made = fy.keys.create("passing")
    with Forkyard(daemon.url, made.key) as other:
        password = other.sandboxes.get(sbx.id).ssh().password
    identity = fy.identities.create("leaving")
    token = fy.identities.create_token(identity.id)
    fy.identities.grant_sandbox(identity.id, sbx.id)
    sessions = []
    for word in (password, token.token):
        process = ssh.with_password_open(sbx.id, word, "echo in; sleep 100")
        assert process.stdout is not None and process.stdout.readline() == b"in\n"
        sessions.append(process)
    fy.keys.delete(made.id)
    fy.identities.revoke_token(identity.id, token.id)
    for process in sessions:
        code, complaint = _ended(process)
        assert code == 255 and "not valid any more" in complaint


def test_an_ssh_key_goes_with_the_api_key_that_added_it(daemon: SshDaemon, fy: Forkyard, tmp_path: Path) -> None:
    client = Client(daemon, tmp_path)
    made = fy.keys.create("passing")
    with Forkyard(daemon.url, made.key) as other:
        added = other.ssh.add_key(client.public_key)
    assert added.id in {key.id for key in fy.ssh.list_keys()}
    fy.keys.delete(made.id)
    assert added.id not in {key.id for key in fy.ssh.list_keys()}


def test_a_password_opens_its_own_sandbox_for_its_time(
    ssh: Client, daemon: SshDaemon, fy: Forkyard, sbx: Sandbox
) -> None:
    access = sbx.ssh()
    assert access.command == f"ssh -p {daemon.port_of_ssh} {sbx.id}@127.0.0.1"
    assert access.password not in repr(access)
    done = ssh.with_password(access.user, access.password, "echo in")
    assert (done.returncode, done.stdout) == (0, "in\n"), done.stderr
    with fy.sandboxes.create() as other:
        assert "Permission denied" in ssh.with_password(other.id, access.password, "true").stderr
    brief = sbx.ssh(ttl_s=0.001)
    assert "Permission denied" in ssh.with_password(sbx.id, brief.password, "true").stderr
    with pytest.raises(InvalidRequest, match="ttl_s"):
        sbx.ssh(ttl_s=0)


def test_an_api_key_is_a_password_too(ssh: Client, daemon: SshDaemon, sbx: Sandbox) -> None:
    assert ssh.with_password(sbx.id, daemon.key, "echo in").stdout == "in\n"
    assert "Permission denied" in ssh.with_password(sbx.id, daemon.key + "x", "true").stderr


def test_a_token_of_an_identity_opens_what_it_was_granted_as_whom_it_may_be(
    ssh: Client, fy: Forkyard, sbx: Sandbox
) -> None:
    identity = fy.identities.create("guest")
    token = fy.identities.create_token(identity.id).token
    assert "Permission denied" in ssh.with_password(f"{sbx.id}+daemon", token, "true").stderr
    fy.identities.grant_sandbox(identity.id, sbx.id, allowed_users=["daemon"])
    assert ssh.with_password(f"{sbx.id}+daemon", token, "whoami").stdout == "daemon\n"
    assert "Permission denied" in ssh.with_password(sbx.id, token, "true").stderr
    fy.identities.delete(identity.id)
    assert "Permission denied" in ssh.with_password(f"{sbx.id}+daemon", token, "true").stderr


@pytest.mark.parametrize("user", ["root", "a", "../../etc", "x" * 20 + "+" + "y" * 40, "X" * 20])
def test_a_user_name_that_is_no_sandbox_is_refused(ssh: Client, daemon: SshDaemon, user: str) -> None:
    assert "Permission denied" in ssh.with_password(user, daemon.key, "true").stderr


def test_a_sandbox_that_is_not_there_is_told_to_those_who_may_know(ssh: Client, fy: Forkyard) -> None:
    done = ssh.run("a" * 20, "true")
    assert done.returncode == 255
    assert b"forkyard: there is no sandbox" in done.stderr
    ended = fy.sandboxes.create()
    ended.delete()
    done = ssh.run(ended.id, "true")
    assert done.returncode == 255
    assert b"has ended" in done.stderr


@pytest.mark.parametrize(
    "text", ["", "ssh-ed25519", "ssh-ed25519 AAAA x", "-----BEGIN OPENSSH PRIVATE KEY-----", "a\nb"]
)
def test_what_is_no_public_key_is_refused_with_an_example(fy: Forkyard, text: str) -> None:
    with pytest.raises(InvalidRequest, match="public_key"):
        fy.ssh.add_key(text)


def test_a_weak_key_is_refused(fy: Forkyard, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "1024", "-N", "", "-f", str(tmp_path / "k")], check=True)
    with pytest.raises(InvalidRequest, match="too weak"):
        fy.ssh.add_key((tmp_path / "k.pub").read_text())


def test_failures_slow_an_address_down_and_are_forgotten() -> None:
    now = [0.0]
    strangers = gateway.Strangers(lambda: now[0])
    waits = [strangers.failed("192.0.2.1") for _ in range(40)]
    assert waits[: gateway.FREE_FAILURES] == [0.0] * gateway.FREE_FAILURES
    assert waits[-1] == gateway.MAX_DELAY_S
    assert strangers.failed("192.0.2.2") == 0.0
    now[0] = gateway.FORGET_S + 1
    assert strangers.failed("192.0.2.1") == 0.0


def test_strangers_are_few_per_address_and_make_room_when_they_leave() -> None:
    strangers = gateway.Strangers()
    assert [strangers.enter("192.0.2.1") for _ in range(gateway.MAX_STRANGERS_PER_ADDRESS + 1)][-2:] == [True, False]
    assert strangers.enter("192.0.2.2")
    strangers.leave("192.0.2.1")
    assert strangers.enter("192.0.2.1")


def test_connections_that_do_not_log_in_are_bounded_and_others_go_on(
    ssh: Client, daemon: SshDaemon, sbx: Sandbox
) -> None:
    with contextlib.ExitStack() as stack:
        held = [
            stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port_of_ssh)))
            for _ in range(gateway.MAX_STRANGERS_PER_ADDRESS)
        ]
        for one in held:
            assert one.recv(64).startswith(b"SSH-2.0-Forkyard")
        with socket.create_connection(("127.0.0.1", daemon.port_of_ssh)) as extra:
            extra.settimeout(10)
            rest = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := extra.recv(4096):
                    rest += piece
    for _ in range(100):
        if ssh.run(sbx.id, "true").returncode == 0:
            return
        time.sleep(0.05)
    raise AssertionError("nobody is let in any more")


def test_garbage_ends_only_its_own_connection(ssh: Client, daemon: SshDaemon, sbx: Sandbox) -> None:
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n" + os.urandom(5000), b"\0" * 70000, b"SSH-1.5-old\r\n"):
        with socket.create_connection(("127.0.0.1", daemon.port_of_ssh)) as one, contextlib.suppress(OSError):
            one.settimeout(10)
            one.sendall(junk)
            one.shutdown(socket.SHUT_WR)
            while one.recv(4096):
                pass
    assert ssh.run(sbx.id, "true").returncode == 0
