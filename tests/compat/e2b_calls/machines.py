"""What only a machine has: memory that sleeps or does not, and ports that others open."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from typing import Any

from registry import Yard, call, until

_BOOT = "cat /proc/sys/kernel/random/boot_id"


def _boot(sbx: Any) -> str:
    return str(sbx.commands.run(_BOOT).stdout)


@call("sandbox.pause, connect: memory is kept", "2.20")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(timeout=300)
    boot = _boot(made)
    pid = made.commands.run("sleep 1000", background=True).pid
    made.pause() if hasattr(made, "pause") else made.beta_pause()
    again = y.e2b.Sandbox.connect(made.sandbox_id, timeout=300)
    assert _boot(again) == boot
    assert pid in [one.pid for one in again.commands.list()]
    assert again.kill()


@call("sandbox.pause: mode=filesystem", "2.63")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(timeout=300)
    made.files.write("/home/user/kept.txt", "kept")
    boot = _boot(made)
    made.pause(mode="filesystem")
    again = y.e2b.Sandbox.connect(made.sandbox_id, timeout=300)
    assert again.sandbox_id == made.sandbox_id
    assert made.files.read("/home/user/kept.txt") == "kept", "the token is another"
    assert _boot(again) != boot
    assert again.kill()


@call("sandbox.fork: memory", "2.63")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(timeout=300)
    pid = made.commands.run("sleep 1000", background=True).pid
    made.files.write("/home/user/both.txt", "both")
    (child,) = made.fork()
    assert pid in [one.pid for one in child.commands.list()]
    assert child.files.read("/home/user/both.txt") == "both"
    child.files.write("/home/user/both.txt", "mine")
    assert made.files.read("/home/user/both.txt") == "both"
    assert child.kill()
    assert made.kill()


@call("sandbox.get_metrics: what is done shows", "2.20")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(timeout=300)
    before = made.get_metrics()[-1]
    busy = made.commands.run("head -c 100M /dev/zero > /dev/shm/much; while :; do :; done", background=True)

    def shows() -> bool:
        now = made.get_metrics()[-1]
        return bool(now.cpu_used_pct > 30 and now.mem_used - before.mem_used > 60 * 2**20)

    until(shows, 90)
    until(lambda: len(made.get_metrics()) >= 3, 90)
    times = [one.timestamp for one in made.get_metrics()]
    assert times == sorted(times)
    busy.kill()
    made.pause() if hasattr(made, "pause") else made.beta_pause()
    assert [one.timestamp for one in made.get_metrics()][:2] == times[:2]
    assert made.get_info().state.value == "paused", "asking wakes nobody"
    assert made.kill()


@call("pty: a terminal goes on in a fork", "2.63")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(timeout=300)
    terminal = made.pty.create(y.e2b.PtySize(rows=24, cols=80), envs={"HISTFILE": "/dev/null"})
    made.pty.send_stdin(terminal.pid, b"mark=before\n")
    (child,) = made.fork()
    for sandbox, name in ((child, "child"), (made, "parent")):
        handle = sandbox.pty.connect(terminal.pid)
        sandbox.pty.send_stdin(terminal.pid, f"echo {name}-$mark; exit\n".encode())
        seen: list[bytes] = []
        handle.wait(on_pty=seen.append)
        text = b"".join(seen).decode()
        assert f"{name}-before" in text, text
        assert sandbox.pty.kill(terminal.pid) is False
    assert child.kill()
    assert made.kill()


def _get(host: str, headers: dict[str, str]) -> int:
    asked = urllib.request.Request(os.environ["E2B_API_URL"], headers={"Host": host, **headers})
    try:
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@call("sandbox.traffic_access_token", "2.63")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(timeout=300, network={"allow_public_traffic": False})
    made.commands.run("python3 -m http.server 8000 --bind 127.0.0.1", background=True)
    host, token = f"8000-{made.sandbox_id}.localhost", {"e2b-traffic-access-token": made.traffic_access_token}
    until(lambda: _get(host, token) == 200, 60)
    assert _get(host, {}) in (401, 403)
    assert _get(host, {"e2b-traffic-access-token": "x"}) in (401, 403)
    assert made.kill()
