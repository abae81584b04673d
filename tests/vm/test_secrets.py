"""Secrets that never enter the guest, with real clients in real machines."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from forkyard import EgressPolicy, Forkyard, Sandbox, Secret

from .web import API, OTHER, REACHABLE, Web, WebDaemon, web_daemon

pytestmark = pytest.mark.timeout(900)

VALUE = "fy-test-value-5d1c0b7e9a42"
PYTHON = """
import json, os, urllib.request
request = urllib.request.Request("https://%s/headers", headers={"Authorization": "token " + os.environ["TOKEN"]})
print(urllib.request.urlopen(request).read().decode())
"""
NODE = """
fetch("https://%s/headers", {headers: {Authorization: process.env.TOKEN}}).then(r => r.text()).then(console.log)
"""


@dataclass
class Scene:
    web: Web
    daemon: WebDaemon
    fy: Forkyard
    sbx: Sandbox


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with web_daemon() as (web, daemon), daemon.client() as fy:
        secrets = {"TOKEN": Secret(hosts=[API], value=VALUE)}
        sandbox = fy.sandboxes.create(network=REACHABLE, secrets=secrets, idle_timeout_s=None)
        yield Scene(web, daemon, fy, sandbox)


def run(sandbox: Sandbox, command: str | list[str], **options: object) -> str:
    done = sandbox.exec(command, timeout_s=240, **options)  # type: ignore[arg-type]
    assert done.exit_code == 0, (done.stdout, done.stderr, sandbox.egress.list(tail=10))
    return done.stdout


def test_inside_there_is_only_a_placeholder(scene: Scene) -> None:
    inside = run(scene.sbx, "echo $TOKEN; cat /proc/*/environ | tr '\\0' '\\n' | grep TOKEN")
    assert inside.startswith("forkyard-secret-")
    assert VALUE not in inside
    assert scene.sbx.refresh().secret_names == ["TOKEN"]


def test_curl_reaches_the_named_host_with_the_value_and_is_not_told_it(scene: Scene) -> None:
    scene.web.authorizations()
    answer = run(scene.sbx, f'curl -sS -H "Authorization: Bearer $TOKEN" https://{API}/headers')
    assert scene.web.authorizations() == [f"Bearer {VALUE}"]
    assert VALUE not in answer
    assert json.loads(answer)["authorization"] == "Bearer " + "*" * len(VALUE)


def test_python_and_node_do_too(scene: Scene) -> None:
    scene.web.authorizations()
    assert VALUE not in run(scene.sbx, ["python3", "-c", PYTHON % API])
    assert scene.web.authorizations() == [f"token {VALUE}"]
    assert VALUE not in run(scene.sbx, ["/opt/node/bin/node", "-e", NODE % API])
    assert scene.web.authorizations() == [f"Bearer {VALUE}"]


def test_git_sends_the_value_as_a_password(scene: Scene) -> None:
    scene.web.authorizations()
    scene.sbx.exec(f"git ls-remote https://x-access-token:$TOKEN@{API}/repo.git", timeout_s=240)
    expected = "Basic " + base64.b64encode(f"x-access-token:{VALUE}".encode()).decode()
    assert expected in scene.web.authorizations()


def test_another_host_gets_the_placeholder(scene: Scene) -> None:
    scene.web.authorizations(OTHER)
    # It has the certificate of its own authority, which no guest knows: nobody looked into this connection.
    run(scene.sbx, f'curl -sSk -H "Authorization: Bearer $TOKEN" https://{OTHER}/headers')
    (sent,) = scene.web.authorizations(OTHER)
    assert sent.startswith("Bearer forkyard-secret-")


def test_the_named_host_under_another_name_gets_nothing(scene: Scene) -> None:
    scene.web.authorizations()
    done = scene.sbx.exec(
        f'curl -sSk -H "Authorization: Bearer $TOKEN" -H "Host: {OTHER}" https://{API}/headers', timeout_s=240
    )
    assert "421" in done.stdout or "Forkyard" in done.stdout
    assert scene.web.authorizations(OTHER) == []
    assert scene.web.authorizations() == []


def test_a_fork_has_the_same_and_the_same_placeholder(scene: Scene) -> None:
    (child,) = scene.sbx.fork()
    with child:
        assert run(child, "echo $TOKEN") == run(scene.sbx, "echo $TOKEN")
        scene.web.authorizations()
        run(child, f'curl -sS -H "Authorization: Bearer $TOKEN" https://{API}/headers')
        assert scene.web.authorizations() == [f"Bearer {VALUE}"]


def test_the_value_is_nowhere_on_disk_and_in_no_log(scene: Scene) -> None:
    run(scene.sbx, f'curl -sS -H "Authorization: Bearer $TOKEN" https://{API}/headers')
    snapshot = scene.sbx.snapshot()
    scene.sbx.pause(durable=True)
    needle = VALUE.encode()
    held = [
        path
        for path in scene.daemon.root.rglob("*")
        if path.is_file() and not path.is_symlink() and contains(path, needle)
    ]
    assert held == []
    assert VALUE not in scene.daemon.log
    assert VALUE not in json.dumps([event.model_dump(mode="json") for event in scene.fy.events.list()])
    with scene.fy.sandboxes.create(snapshot=snapshot) as other:
        assert other.info.secret_names == []
        scene.web.authorizations()
        other.exec(f'curl -sSk -H "Authorization: Bearer $TOKEN" https://{API}/headers', timeout_s=240)
        assert VALUE not in str(scene.web.authorizations())
    snapshot.delete()
    scene.sbx.resume()
    scene.web.authorizations()
    run(scene.sbx, f'curl -sS -H "Authorization: Bearer $TOKEN" https://{API}/headers')
    assert scene.web.authorizations() == [f"Bearer {VALUE}"]


def contains(path: object, needle: bytes) -> bool:
    """Of a file of any size; sparse ones are mostly holes and read quickly."""
    with open(str(path), "rb") as file:  # noqa: PTH123
        tail = b""
        while piece := file.read(1 << 24):
            if needle in tail + piece:
                return True
            tail = piece[-len(needle) :]
    return False


def test_only_sandboxes_that_need_it_trust_the_authority(scene: Scene) -> None:
    look = "grep -c Forkyard /usr/local/share/ca-certificates/forkyard.crt; openssl version"
    bundle = "cat /etc/ssl/certs/ca-certificates.crt"
    ours = scene.fy.ca().strip()
    assert ours in run(scene.sbx, bundle)
    with scene.fy.sandboxes.create(network=REACHABLE) as plain:
        assert ours not in run(plain, bundle)
        assert plain.exec(look).exit_code is not None
        plain.egress.set(EgressPolicy(preset="none", record="trust"))
        assert ours in run(plain, bundle)
        plain.egress.set(REACHABLE)
        assert ours not in run(plain, bundle)


def test_a_stored_secret_changes_for_those_that_run(scene: Scene) -> None:
    scene.fy.secrets.set("STORED", "first-value")
    with scene.fy.sandboxes.create(network=REACHABLE, secrets={"STORED": Secret(hosts=[API])}) as sandbox:
        command = f'curl -sS -H "Authorization: Bearer $STORED" https://{API}/headers'
        scene.web.authorizations()
        run(sandbox, command)
        scene.fy.secrets.set("STORED", "second-value")
        run(sandbox, command)
        assert scene.web.authorizations() == ["Bearer first-value", "Bearer second-value"]
    scene.fy.secrets.delete("STORED")


def test_after_a_restart_of_the_daemon_secrets_are_back(scene: Scene) -> None:
    scene.daemon.kill()
    scene.daemon.start()
    scene.web.authorizations()
    run(scene.sbx, f'curl -sS -H "Authorization: Bearer $TOKEN" https://{API}/headers')
    assert scene.web.authorizations() == [f"Bearer {VALUE}"]
