"""What leaves a real guest: what is allowed passes, what is not fails at once and says why, and each has its owner.

The world is `internet.py`; only the test of the package managers goes to the registries of this host.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest

from forkyard import Forkyard, Sandbox
from forkyard.models.network import EgressPolicy, EgressRecord, EgressRule

from .conftest import make_daemon, remove_daemon
from .internet import EVIL, GOOD, PRIVATE, Internet, InternetDaemon, internet

pytestmark = pytest.mark.timeout(600)

#: A guest is emulated and the machine is busy; what hangs takes longer than this.
PROMPT_S = 8.0


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    with internet() as made:
        yield made


@pytest.fixture(scope="module")
def outer(net: Internet) -> Iterator[Forkyard]:
    daemon = InternetDaemon(make_daemon().root, internet=net)
    daemon.start()
    try:
        with daemon.client() as fy:
            yield fy
            for sandbox in fy.sandboxes.list():
                sandbox.delete()
    finally:
        remove_daemon(daemon)


@pytest.fixture
def guest(outer: Forkyard) -> Iterator[Sandbox]:
    policy = EgressPolicy(preset="none", rules=[EgressRule(domain="good.test")])
    with outer.sandboxes.create(network=policy) as sandbox:
        yield sandbox


def records(sandbox: Sandbox, count: int, **which: str) -> list[EgressRecord]:
    """At least so many: the last may still be on their way."""
    deadline = time.monotonic() + 10
    while True:
        found = sandbox.egress.list(**which)  # type: ignore[arg-type]
        if len(found) >= count or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def test_what_is_allowed_passes_and_its_record_names_the_exec(guest: Sandbox) -> None:
    done = guest.exec("curl -sS http://good.test/", trace_id="trace-7")
    assert done.stdout == f"this is outside {GOOD}\n", done.stderr
    (connection,) = records(guest, 1, kind="tcp")
    assert (connection.verdict, connection.name, connection.address, connection.port) == (
        "allowed",
        "good.test",
        GOOD,
        80,
    )
    assert (connection.exec_id, connection.trace_id) == (done.exec_id, "trace-7")
    assert (connection.process or "").startswith("curl (")
    assert connection.bytes_out > 0 and connection.bytes_in > 0
    (question,) = records(guest, 1, kind="dns")
    assert (question.verdict, question.name, question.address) == ("allowed", "good.test", GOOD)
    assert question.exec_id == done.exec_id


@pytest.mark.parametrize(
    ("command", "says", "name"),
    [
        ("curl -sS http://evil.test/", "Could not resolve host: evil.test", "evil.test"),
        (f"curl -sS http://{EVIL}/", "forkyard egress allow", None),
        (f"curl -sS --resolve evil.test:80:{EVIL} http://evil.test/", "forkyard egress allow", "evil.test"),
        (f"curl -sSk --resolve evil.test:443:{EVIL} https://evil.test/", "access denied", "evil.test"),
        (f"curl -sSk https://{EVIL}/", "access denied", None),
        (f"bash -c 'exec 3<>/dev/tcp/{EVIL}/22; echo SSH-2.0-x >&3; read -u 3'; echo ended", "ended", None),
        (f"curl -sS http://{PRIVATE}/", "forkyard egress allow", None),
    ],
)
def test_what_is_not_allowed_fails_at_once_and_says_why(
    net: Internet, guest: Sandbox, command: str, says: str, name: str | None
) -> None:
    net.seen()
    started_s = time.monotonic()
    done = guest.exec(command, timeout_s=60)
    assert time.monotonic() - started_s < PROMPT_S
    assert says in done.stdout + done.stderr
    denied = records(guest, 1, verdict="denied")
    assert {record.name for record in denied} == {name}
    assert all(record.exec_id == done.exec_id for record in denied)
    assert any(f"forkyard egress allow {guest.id}" in (record.reason or "") for record in denied)
    assert net.seen() == []


def test_a_policy_can_be_changed_while_it_runs_and_a_fork_has_it(guest: Sandbox) -> None:
    assert guest.exec("curl -sS http://evil.test/").exit_code == 6
    guest.egress.allow("evil.test")
    assert guest.exec("curl -sS http://evil.test/").stdout == f"this is outside {EVIL}\n"
    (child,) = guest.fork()
    with child:
        assert child.exec("curl -sS http://evil.test/").stdout == f"this is outside {EVIL}\n"
        assert {record.sandbox_id for record in records(child, 2)} == {child.id}
        guest.egress.set("none")
        assert guest.exec("curl -sS http://evil.test/").exit_code == 6
        assert child.exec("curl -sS http://evil.test/").exit_code == 0


def test_a_connection_ends_when_it_is_no_longer_allowed(guest: Sandbox) -> None:
    script = "exec 3<>/dev/tcp/good.test/9000; echo hello >&3; read -u 3 x; echo $x; read -t 60 -u 3 y"
    talk = guest.exec_stream(["bash", "-c", script])
    output = iter(talk)
    assert next(output).data == b"hello\n"
    guest.egress.set("none")
    started_s = time.monotonic()
    assert b"reset by peer" in b"".join(chunk.data for chunk in output)
    assert time.monotonic() - started_s < PROMPT_S
    (ended,) = records(guest, 1, kind="tcp")
    assert (ended.verdict, ended.name) == ("denied", "good.test")


def test_everyone_at_once_is_told_apart(guest: Sandbox) -> None:
    """Twenty connections of four execs at the same time."""
    loop = "for i in 1 2 3 4 5; do curl -sS -o /dev/null http://good.test/$EXEC & done; wait"
    running = [guest.spawn(["bash", "-c", loop], env={"EXEC": str(number)}) for number in range(4)]
    for process in running:
        process.wait()
    found = records(guest, 20, kind="tcp")
    owners = [record.exec_id for record in found]
    assert {owners.count(process.id) for process in running} == {5}


def test_package_managers_work_under_the_default_policy(create: Callable[..., Sandbox]) -> None:
    with create() as sandbox:
        done = sandbox.exec("apt-get update", timeout_s=300)
        refused = [record.reason for record in sandbox.egress.list() if record.verdict != "allowed"]
        assert done.exit_code == 0, f"{done.stderr}\n{refused}"
        done = sandbox.exec("pip download --no-deps -d /tmp/p six", timeout_s=120)
        assert done.exit_code == 0, done.stderr
        done = sandbox.exec("npm view --json left-pad name", timeout_s=120)
        assert json.loads(done.stdout) == "left-pad", done.stderr
        assert {record.verdict for record in sandbox.egress.list()} == {"allowed"}
