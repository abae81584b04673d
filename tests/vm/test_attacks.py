"""Ways around the policy, tried from inside a guest as root. SECURITY.md lists them, with the names of these tests.

What counts is what reached whom, as the servers outside saw it (`internet.py`), and that the daemon and the sandbox next
door go on as if nothing were. Everything stays in namespaces of the test's own.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forkyard import Forkyard, Sandbox
from forkyard.models.network import EgressPolicy, EgressRule

from .conftest import remove_daemon
from .internet import EVIL, EVIL6, GOOD, HOST, METADATA, PRIVATE, Internet, InternetDaemon, Seen, internet

pytestmark = pytest.mark.timeout(600)

POLICY = EgressPolicy(
    preset="none",
    rules=[EgressRule(domain="good.test"), EgressRule(domain="*.good.test"), EgressRule(domain="*.wild.test")],
)
#: A guest is emulated and the machine is busy; what hangs takes longer than this.
PROMPT_S = 10.0


@dataclass
class Scene:
    net: Internet
    daemon: InternetDaemon
    fy: Forkyard
    attacker: Sandbox
    neighbour: Sandbox

    def attack(self, name: str, *arguments: object) -> Any:
        words = ["python3", "/root/attacker.py", name, *map(str, arguments)]
        done = self.attacker.exec(words, timeout_s=300)
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    def leaks(self) -> list[Seen]:
        """What should not have reached anybody."""
        seen = self.net.seen()
        return [
            one
            for one in seen
            if one.kind in ("udp", "packet")
            or (one.kind == "tcp" and one.to.removeprefix("::ffff:") != GOOD)
            or "evil" in one.data
            or (one.kind == "tcp" and one.data and "good.test" not in one.data and "hello" not in one.data)
        ]

    def is_prompt(self) -> float:
        """The longest that the daemon, or a command next door, took."""
        started = time.monotonic()
        assert self.fy.health().status == "ok"
        assert self.neighbour.exec("echo here").stdout == "here\n"
        return time.monotonic() - started

    def prompt_during(self, attack: Future[Any]) -> float:
        longest = 0.0
        while not attack.done():
            longest = max(longest, self.is_prompt())
        return longest


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with internet() as net:
        root = Path(tempfile.mkdtemp(prefix="fyt-", dir="/tmp"))
        root.chmod(0o711)
        daemon = InternetDaemon(root, internet=net)
        daemon.start()
        try:
            with daemon.client() as fy:
                attacker = fy.sandboxes.create(network=POLICY, idle_timeout_s=None)
                neighbour = fy.sandboxes.create(network=POLICY, idle_timeout_s=None)
                attacker.files.write("/root/attacker.py", Path(__file__).with_name("attacker.py").read_text())
                yield Scene(net, daemon, fy, attacker, neighbour)
                for sandbox in (attacker, neighbour):
                    sandbox.delete()
        finally:
            remove_daemon(daemon)


def api_port(scene: Scene) -> int:
    """Of the daemon, in its namespace."""
    line = next(line for line in scene.daemon.log.splitlines() if "serving " in line and "http://" in line)
    return int(line.partition("http://127.0.0.1:")[2].split()[0].strip("/"))


def test_names_are_not_forged_and_no_request_hides_behind_another(scene: Scene) -> None:
    scene.net.seen()
    found = scene.attack("names_and_hosts", GOOD, EVIL)
    assert f"this is outside {GOOD}" in found["allowed"]
    assert f"this is outside {GOOD}" in found["allowed tls"]
    for name in ("second request", "websocket, then another host"):
        assert found[name].count("200 OK") == 1, (name, found[name])
    for name in ("raw address", "raw address, opaque", "tls to a name that is not allowed", "first bytes late"):
        assert "this is outside" not in found[name], (name, found[name])
    assert "forkyard egress allow" in found["raw address"], "who is refused is told how to allow it"
    assert scene.leaks() == []
    denied = [record for record in scene.attacker.egress.list() if record.verdict == "denied"]
    assert {EVIL, GOOD} <= {record.address for record in denied}
    assert all(record.reason for record in denied)


def test_no_odd_byte_makes_a_request_something_else(scene: Scene) -> None:
    scene.net.seen()
    found = scene.attack("odd_bytes", GOOD)
    assert f"this is outside {GOOD}" in found.pop("still works")
    assert not [name for name, answer in found.items() if "this is outside" in answer and name != "two upgrades"], found
    assert scene.leaks() == []


def test_dns_has_one_server_and_gives_no_private_address(scene: Scene) -> None:
    scene.net.seen()
    found = scene.attack("dns_ways", GOOD, EVIL)
    answered = {"rcode": 0, "addresses": [GOOD]}
    assert found["door"] == found["other server"] == found["other server, tcp"] == answered
    for name in ("forbidden", "forbidden, other server", "forbidden, tcp", "txt", "any", "reverse"):
        assert found[name]["rcode"] != 0 and found[name]["addresses"] == [], (name, found[name])
    assert found["other port"] is None
    assert found["aaaa"] == {"rcode": 0, "addresses": []}
    for name in ("rebind", "loop", "host", "meta"):
        assert found[name]["addresses"] == [], (name, found[name])
    assert found["mixed"]["addresses"] == [GOOD]
    leaks = [one for one in scene.leaks() if one.kind != "dns"]
    assert leaks == []


def test_little_can_be_said_in_names(scene: Scene) -> None:
    scene.net.seen()
    assert scene.attack("dns_tunnel", "evil.test", 300) == 0
    assert [one for one in scene.net.seen() if one.kind == "dns"] == []
    started = time.monotonic()
    scene.attack("dns_tunnel", "wild.test", 1500)
    took_s = time.monotonic() - started
    said = {one.data for one in scene.net.seen() if one.kind == "dns"}
    assert len(said) <= 200 + 2 * took_s + 2
    assert scene.attack("dns_ways", GOOD, EVIL)["door"]["addresses"] == [GOOD], "names that rules spell out go on"


def test_little_can_be_said_in_names_that_are_claimed(scene: Scene) -> None:
    scene.net.seen()
    started = time.monotonic()
    scene.attack("name_tunnel", EVIL, "wild.test", 500)
    took_s = time.monotonic() - started
    said = {one.data for one in scene.net.seen() if one.kind == "dns"}
    assert len(said) <= 200 + 2 * took_s + 2 < 500, took_s


def test_a_denied_name_is_out_of_reach_where_the_rest_is_open(scene: Scene) -> None:
    scene.net.seen()
    scene.attacker.egress.set(EgressPolicy(preset="open", rules=[EgressRule(action="deny", domain="evil.test")]))
    try:
        found = scene.attack("denied_name", GOOD, EVIL)
    finally:
        scene.attacker.egress.set(POLICY)
    assert found["still open"] == "hello\n"
    assert not [name for name, answer in found.items() if f"this is outside {EVIL}" in answer], found
    assert [one for one in scene.net.seen() if one.kind == "tcp" and one.to.removeprefix("::ffff:") == EVIL] == []


def test_what_is_recorded_passes_the_eye_of_the_door(scene: Scene) -> None:
    scene.attacker.egress.set(POLICY.model_copy(update={"record": "attack"}))
    try:
        scene.net.seen()
        found = scene.attack("unseen", GOOD)
    finally:
        scene.attacker.egress.set(POLICY)
    assert f"this is outside {GOOD}" in found["recorded"]
    assert [one.data for one in scene.net.seen() if "unseen" in one.data] == []
    assert {one.url for one in scene.fy.recordings.show("attack")} == {"http://good.test/seen", "http://good.test/late"}
    scene.fy.recordings.delete("attack")


def test_the_host_its_networks_the_door_and_ipv6_are_out_of_reach(scene: Scene) -> None:
    scene.net.seen()
    found = scene.attack("places", GOOD, EVIL, PRIVATE, METADATA, HOST, EVIL6, api_port(scene))
    for name, answer in found.items():
        # A name that is allowed leads to its true owner, wherever the guest connected to.
        assert set(re.findall(r"this is (\w+ \S+)", answer)) <= {f"outside {GOOD}"}, (name, answer)
        assert '"status"' not in answer, (name, answer)
    assert scene.leaks() == []


def test_nothing_but_tcp_and_dns_leaves_whatever_its_form(scene: Scene) -> None:
    scene.net.seen()
    found = scene.attack("packets", GOOD, EVIL, HOST)
    assert found["sent"] > 2000
    assert f"this is outside {GOOD}" in found["still works"]
    assert {value for name, value in found.items() if name.startswith("udp")} == {"NoneNone"}
    assert scene.leaks() == []
    assert "this is outside" in scene.neighbour.exec("curl -s -m 20 http://good.test/").stdout


def test_floods_slow_down_nobody_else(scene: Scene) -> None:
    scene.net.seen()
    before = scene.is_prompt()
    with ThreadPoolExecutor() as pool:
        for attack in (
            ("many_connections", GOOD, 9000, 10_000, 60),
            ("many_connections", EVIL, 80, 10_000, 10),
            ("half_open", GOOD, 8),
            ("giant_dns", GOOD),
        ):
            running = pool.submit(scene.attack, *attack)
            longest = scene.prompt_during(running)
            print(attack[0], attack[1], running.result(), f"longest {longest:.2f} s, before {before:.2f} s")
            assert longest < PROMPT_S, attack
    assert "this is outside" in scene.neighbour.exec("curl -s -m 20 http://good.test/").stdout
    assert not [one for one in scene.leaks() if one.to == EVIL or one.kind in ("udp", "packet")]
