"""Every sandbox that ends says why, and harms nobody else."""

import signal
import time
from pathlib import Path

import pytest

from forkyard import Forkyard, Sandbox
from forkyard.errors import NotFound, SandboxEnded

from .conftest import Daemon


def wait_for_end(fy: Forkyard, sandbox: Sandbox, seconds: float = 30) -> Sandbox:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        now = fy.sandboxes.get(sandbox.id)
        if now.info.state in ("failed", "stopped"):
            return now
        time.sleep(0.1)
    raise AssertionError(f"still {now.info.state}")


def vm_pid(daemon: Daemon, sandbox: Sandbox) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        command = (process / "cmdline").read_bytes() if (process / "cmdline").exists() else b""
        if b"qemu-system" in command and f"{daemon.root}/vms/{sandbox.id}-".encode() in command:
            return int(process.name)
    raise AssertionError("no VM process")


def test_a_guest_that_panics(fy: Forkyard) -> None:
    victim, other = fy.sandboxes.create(), fy.sandboxes.create()
    victim.spawn("echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger")
    ended = wait_for_end(fy, victim)
    assert ended.info.cause == "guest_panic"
    with pytest.raises(SandboxEnded, match="panic"):
        ended.exec("true")
    assert other.exec("echo unharmed").stdout == "unharmed\n"
    assert any(e.cause == "guest_panic" for e in fy.events.list(sandbox_id=victim.id))


def test_a_guest_that_powers_off(fy: Forkyard) -> None:
    sandbox = fy.sandboxes.create()
    sandbox.spawn("systemctl poweroff -ff")
    ended = wait_for_end(fy, sandbox)
    assert (ended.info.state, ended.info.cause) == ("stopped", "guest_shutdown")


def test_a_hypervisor_that_is_killed(fy: Forkyard, daemon: Daemon) -> None:
    sandbox = fy.sandboxes.create()
    import os

    os.kill(vm_pid(daemon, sandbox), signal.SIGKILL)
    ended = wait_for_end(fy, sandbox)
    assert ended.info.cause == "vm_crashed"
    assert "SIGKILL" in (ended.info.cause_detail or "")


def test_a_guest_that_kills_its_agent_is_reachable_again(fy: Forkyard) -> None:
    with fy.sandboxes.create() as sandbox:
        sandbox.spawn("sleep 0.2; systemctl kill -s KILL forkyard-agent")
        time.sleep(1)
        deadline = time.monotonic() + 60
        while True:
            try:
                assert sandbox.exec("echo back", timeout_s=20).stdout == "back\n"
                break
            except Exception:
                assert time.monotonic() < deadline, "the agent did not come back"
                time.sleep(0.5)


def test_a_deleted_sandbox_stays_known_as_deleted(fy: Forkyard) -> None:
    sandbox = fy.sandboxes.create()
    sandbox.delete()
    sandbox.delete()
    assert fy.sandboxes.get(sandbox.id).info.cause == "deleted_by_user"
    assert sandbox.id not in {s.id for s in fy.sandboxes.list()}
    assert sandbox.id in {s.id for s in fy.sandboxes.list(all=True)}
    with pytest.raises(SandboxEnded):
        sandbox.exec("true")


def test_unknown_ids_are_not_found(fy: Forkyard) -> None:
    for unknown in ("a" * 16, "zzz", "../../etc", "x" * 5000):
        with pytest.raises(NotFound):
            fy.sandboxes.get(unknown)
