"""What doors share: names, the host's resolver, and what package managers say."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from forkyard.net import presets
from forkyard.net.presets import apt_hosts, hosts_of, npm_hosts, pip_hosts
from forkyard.net.resolver import HostResolver
from forkyard.net.watch import Names, is_own

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_registries_are_read_from_what_the_tools_print() -> None:
    assert apt_hosts("http://one.example/debian\nhttps://two.example:8443/security\n") == {"one.example", "two.example"}
    printed = "global.index-url='https://user:secret@pip.example/simple/'\n:env:.extra-index-url='http://a.example b'\n"
    assert pip_hosts(printed) == {"pip.example", "a.example"}
    config = {"registry": "https://npm.example/", "@me:registry": "https://mine.example/x", "editor": "vi", "cache": 1}
    assert npm_hosts(json.dumps(config)) == {"npm.example", "mine.example"}


OWN = frozenset({"pip.example", "files.example"})


@pytest.mark.parametrize(
    ("printed", "hosts"),
    [
        ("", OWN),
        ("global.index-url='https://pip.example/simple'", OWN),
        ("global.index-url='https://mirror.example/simple'", {"mirror.example"}),
        ("global.index-url='http://mirror:3141/simple'", {"mirror"}),
        ("global.index-url='http://10.1.2.3/simple'", {"10.1.2.3"}),
        ("global.extra-index-url='https://more.example/simple'", {"more.example", *OWN}),
        ("global.index-url='https://me:word@mirror.example/simple'", {"mirror.example", *OWN}),
    ],
)
def test_pips_own_index_is_open_where_guests_use_it(printed: str, hosts: set[str]) -> None:
    assert pip_hosts(printed, OWN) == hosts


async def test_a_list_of_downloads_opens_its_host_and_those_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps({"a": {"url": "https://files.example/a.tar.gz"}, "b": {"url": "http://localhost/b"}}))
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: listed.open("rb"))
    urls = ["https://list.example/list.json", "https://mirror.example/python"]
    (tmp_path / "kept").write_text('["kept.example"]')
    found = await presets.read_presets(tmp_path / "kept", urls)
    assert found.registries == {"kept.example", "list.example", "files.example", "mirror.example"}


def test_this_machine_is_not_a_registry() -> None:
    assert hosts_of(["http://localhost:4873/", "http://x.localhost/", "file:///srv", "http://[::1", "cdrom:x"]) == set()


async def test_a_name_is_looked_up_once_for_all_who_ask() -> None:
    asked: list[str] = []
    go = threading.Event()

    def lookup(name: str) -> list[str]:
        asked.append(name)
        assert go.wait(5)
        return ["1.2.3.4"]

    resolver = HostResolver(lookup)
    questions = [asyncio.create_task(resolver.resolve("a.example")) for _ in range(5)]
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(*questions) == [["1.2.3.4"]] * 5
    assert await resolver.resolve("a.example") == ["1.2.3.4"]
    assert asked == ["a.example"]
    resolver.close()


async def test_a_resolver_that_does_not_answer_is_a_time_out_and_a_failure_is_not_kept() -> None:
    go = threading.Event()
    answers: list[object] = [socket.gaierror(socket.EAI_AGAIN, "later"), ["1.2.3.4"]]

    def lookup(name: str) -> list[str]:
        if name == "slow.example":
            go.wait(5)
            return []
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]

    resolver = HostResolver(lookup, timeout_s=0.05)
    with pytest.raises(TimeoutError):
        await resolver.resolve("slow.example")
    go.set()
    with pytest.raises(OSError):
        await resolver.resolve("a.example")
    assert await resolver.resolve("a.example") == ["1.2.3.4"]
    resolver.close()


async def test_the_host_knows_itself() -> None:
    resolver = HostResolver()
    assert await resolver.resolve("localhost") == ["127.0.0.1"]
    resolver.close()
    assert is_own(IPv4Address("127.0.0.1")) and is_own(IPv4Address("127.9.9.9"))
    assert not is_own(IPv4Address("1.2.3.4"))


def test_an_address_remembers_its_latest_names() -> None:
    now = 0.0
    names = Names(lambda: now)
    names.learn("a.example", ["1.2.3.4"])
    names.learn("b.example", ["1.2.3.4"])
    assert names.of("1.2.3.4") == ["b.example", "a.example"]
    now = 5 * 3600.0
    names.learn("a.example", ["1.2.3.4"])
    now = 7 * 3600.0
    assert names.of("1.2.3.4") == ["a.example"]
    assert names.of("4.3.2.1") == []


def test_a_guest_cannot_make_the_memory_grow() -> None:
    names = Names()
    for number in range(10_000):
        names.learn(f"n{number}.example", [f"1.0.{number // 256}.{number % 256}", "9.9.9.9"])
        names.make_up(f"m{number}.example")
    assert len(names.of("9.9.9.9")) <= 16
    assert len(names._names) <= 4096 and len(names._made_up) <= 4096


def test_a_made_up_address_stays_and_is_known_by_its_name() -> None:
    names = Names()
    address = names.make_up("a.example")
    assert names.make_up("a.example") == address != names.make_up("b.example")
    assert names.of(address) == ["a.example"]


async def test_what_package_managers_said_is_taken_for_a_while_and_asked_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def registry() -> frozenset[str]:
        nonlocal asked
        asked += 1
        return frozenset({"packages.example.test"})

    for name in ("_apt", "_pip", "_npm", "_cargo"):
        monkeypatch.setattr(presets, name, registry)
    kept = tmp_path / "registries.json"
    assert (await presets.read_presets(kept)).registries == {"packages.example.test"}
    assert (await presets.read_presets(kept)).registries == {"packages.example.test"}
    assert asked == 4
    os.utime(kept, (0, 0))
    await presets.read_presets(kept)
    assert asked == 8
    kept.write_text("{")
    await presets.read_presets(kept)
    assert asked == 12
