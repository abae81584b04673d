"""The command line against a real daemon and real machines."""

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

from forkyard import Forkyard

from .conftest import Daemon


def test_a_session_from_create_to_rm(daemon: Daemon, fy: Forkyard, tmp_path: Path) -> None:
    created = json.loads(daemon.cli("create", "--name", "cli", "--label", "a=b", "--json").stdout)
    sandbox = created["id"]
    assert created["state"] == "running"
    assert sandbox in daemon.cli("ls").stdout
    assert [s["id"] for s in json.loads(daemon.cli("ls", "--label", "a=b", "--json").stdout)] == [sandbox]

    ran = daemon.cli("exec", sandbox, "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (ran.stdout, ran.stderr, ran.returncode) == ("out\n", "err\n", 3)
    assert daemon.cli("exec", "cli", "--", "cat", input="piped").stdout == "piped"
    assert daemon.cli("exec", sandbox[:8], "--", "echo a | tr a b").stdout == "b\n"
    assert daemon.cli("exec", "--timeout", "1", sandbox, "--", "sleep", "100").returncode == 124

    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "file").write_text("content")
    assert daemon.cli("cp", str(tmp_path / "up"), f"{sandbox}:/root/up").returncode == 0
    assert daemon.cli("exec", sandbox, "--", "cat", "/root/up/file").stdout == "content"
    assert daemon.cli("cp", f"{sandbox}:/root/up/file", str(tmp_path / "down")).returncode == 0
    assert (tmp_path / "down").read_text() == "content"

    assert "sshd" in daemon.cli("logs", sandbox).stdout
    kinds = [
        json.loads(line)["kind"] for line in daemon.cli("events", "--sandbox", sandbox, "--json").stdout.splitlines()
    ]
    assert "sandbox.running" in kinds or "sandbox.running" in str(kinds)
    assert daemon.cli("rm", sandbox).returncode == 0
    assert sandbox not in daemon.cli("ls").stdout
    assert "deleted_by_user" in daemon.cli("ls", "--all", "--json").stdout


def test_errors_say_what_to_do_and_are_json_when_asked(daemon: Daemon, fy: Forkyard) -> None:
    plain = daemon.cli("exec", "nosuchsandbox", "--", "true")
    assert plain.returncode == 1
    assert "nosuchsandbox" in plain.stderr
    assert "Traceback" not in plain.stderr
    problem = json.loads(daemon.cli("exec", "--json", "nosuchsandbox", "--", "true").stderr)
    assert problem["code"] == "sandbox_not_found"


def test_doctor_explains_the_accelerator(daemon: Daemon, fy: Forkyard) -> None:
    checks = {c["name"]: c for c in json.loads(daemon.cli("doctor", "--json").stdout)}
    assert checks["accelerator"]["status"] in ("ok", "warning")
    assert "kvm" in checks["accelerator"]["summary"].lower()


def test_shell_is_a_real_terminal(daemon: Daemon, fy: Forkyard) -> None:
    with fy.sandboxes.create() as sandbox:
        main, worker = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "forkyard.cli", "shell", sandbox.id],
            env={**daemon.env, "TERM": "xterm-256color"},
            stdin=worker,
            stdout=worker,
            stderr=worker,
        )
        os.close(worker)
        os.set_blocking(main, False)
        seen = b""

        def wait_for(text: bytes, seconds: float = 60) -> None:
            nonlocal seen
            deadline = time.monotonic() + seconds
            while text not in seen:
                assert time.monotonic() < deadline, seen
                try:
                    seen += os.read(main, 65536)
                except BlockingIOError:
                    time.sleep(0.05)

        wait_for(b"#")
        os.write(main, b"echo $((40+2)) $(tput colors)\n")
        wait_for(b"42 256")
        os.write(main, b"sleep 1000\n")
        time.sleep(1)
        os.write(main, b"\x03")
        os.write(main, b"echo code $?; exit 5\n")
        wait_for(b"code 130")
        assert process.wait(30) == 5
        os.close(main)
