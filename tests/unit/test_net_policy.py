"""What a policy allows: pure decisions."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.models.network import EgressPolicy, EgressRule
from forkyard.net.policy import Gate, is_special, matches, normal
from forkyard.net.presets import Presets

PUBLIC, PRIVATE = IPv4Address("1.2.3.4"), IPv4Address("10.1.2.3")
PRESETS = Presets(frozenset({"mirror.example"}))


def gate(*rules: EgressRule, preset: str = "none", **more: object) -> Gate:
    policy = EgressPolicy.model_validate({"preset": preset, "rules": list(rules), **more})
    return Gate("sbx_1", policy, PRESETS)


def allow(destination: str | None = None, *ports: int, cidr: str | None = None) -> EgressRule:
    return EgressRule(domain=destination, cidr=cidr, ports=list(ports))


def deny(destination: str | None = None, *ports: int, cidr: str | None = None) -> EgressRule:
    return EgressRule(action="deny", domain=destination, cidr=cidr, ports=list(ports))


@pytest.mark.parametrize(
    ("pattern", "name", "matched"),
    [
        ("example.com", "example.com", True),
        ("example.com", "www.example.com", False),
        ("*.example.com", "www.example.com", True),
        ("*.example.com", "a.b.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.example.com", "evilexample.com", False),
        ("*.example.com", ".example.com", False),
        ("example.com", "example.com.evil.org", False),
        ("*", "anything.at.all", True),
    ],
)
def test_patterns_mean_what_they_say(pattern: str, name: str, matched: bool) -> None:
    assert matches(pattern, name) is matched


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Example.COM.", "example.com"),
        ("_dmarc.example.com", "_dmarc.example.com"),
        ("127.0.0.1", None),
        ("2130706433", None),
        ("a..b", None),
        ("-a.example", None),
        ("exa mple.com", None),
        ("", None),
        ("a" * 64 + ".com", None),
        ("example.com\0.evil.org", None),
        ("example.com\n", None),
    ],
)
def test_a_name_is_a_host_name_or_none(given: str, name: str | None) -> None:
    assert normal(given) == name


def test_the_first_rule_that_matches_decides() -> None:
    assert not gate(deny("a.example"), allow("*.example")).connection("a.example", PUBLIC, 443).allowed
    assert gate(allow("a.example"), deny("*.example")).connection("a.example", PUBLIC, 443).allowed
    assert not gate(deny(cidr="1.2.0.0/16"), allow("a.example")).connection("a.example", PUBLIC, 443).allowed
    assert gate(deny("a.example", 80), allow("a.example")).connection("a.example", PUBLIC, 443).allowed
    assert not gate(allow("a.example", 443)).connection("a.example", PUBLIC, 80).allowed
    assert not gate(deny(), preset="open").connection("a.example", PUBLIC, 443).allowed


def test_a_denied_name_is_denied_under_open_too() -> None:
    assert not gate(deny("*.evil.example"), preset="open").connection("x.evil.example", PUBLIC, 443).allowed
    assert not gate(deny("*.evil.example"), preset="open").name("x.evil.example").allowed


def test_a_name_can_be_looked_up_if_any_of_its_ports_can_be_reached() -> None:
    assert gate(allow("a.example", 443)).name("a.example").allowed
    assert gate(deny("a.example", 80), preset="open").name("a.example").allowed
    assert not gate(allow(cidr="0.0.0.0/0")).name("a.example").allowed


@pytest.mark.parametrize(
    ("preset", "git", "registry", "other", "raw"),
    [
        ("coding", True, True, False, False),
        ("research", True, True, True, True),
        ("autonomous", True, True, True, True),
        ("open", True, True, True, True),
        ("evaluation", False, False, False, False),
        ("none", False, False, False, False),
    ],
)
def test_presets_open_what_they_promise(preset: str, git: bool, registry: bool, other: bool, raw: bool) -> None:
    found = gate(preset=preset)
    names = ("github.com", "mirror.example", "other.example", None)
    assert [found.connection(name, PUBLIC, 443).allowed for name in names] == [git, registry, other, raw]


def test_research_is_limited_unless_the_policy_says_how_much() -> None:
    assert gate(preset="research").allowance.bytes_per_s == PRESETS.research_bytes_per_s
    assert gate(preset="research", bytes_per_s=2048).allowance.bytes_per_s == 2048
    assert gate(preset="open").allowance.bytes_per_s is None


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1", "192.168.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1"],
)
def test_special_networks_need_a_rule_that_names_them(address: str) -> None:
    parsed = IPv4Address(address)
    for wide in (gate(preset="open"), gate(allow()), gate(allow("a.example")), gate(allow(cidr="0.0.0.0/0"))):
        assert not wide.connection("a.example", parsed, 80).allowed
        assert not wide.answers("a.example", parsed)
    named = gate(allow(cidr=f"{address}/32"))
    assert named.connection(None, parsed, 80).allowed and named.answers("a.example", parsed)


def test_a_name_and_a_network_together_open_a_private_server() -> None:
    found = gate(allow("wiki.example", 443), allow(cidr="10.0.0.0/8"))
    assert found.name("wiki.example").allowed and found.answers("wiki.example", PRIVATE)
    assert found.connection("wiki.example", PRIVATE, 443).allowed


def test_this_host_is_opened_only_by_its_own_address() -> None:
    for rule in (allow(cidr="10.0.0.0/8"), allow(cidr="10.1.2.0/24"), allow()):
        assert not gate(rule).connection(None, PRIVATE, 80, own=True).allowed
    assert not gate(preset="open").connection(None, PUBLIC, 80, own=True).allowed
    assert not gate(allow(cidr="1.2.0.0/16")).connection(None, PUBLIC, 80, own=True).allowed
    assert gate(allow(cidr="1.2.3.4")).connection(None, PUBLIC, 80, own=True).allowed


def test_a_registry_may_be_private_but_not_this_host_or_its_metadata() -> None:
    found = gate(preset="coding")
    assert found.connection("mirror.example", PRIVATE, 443).allowed
    assert not found.connection("mirror.example", PRIVATE, 443, own=True).allowed
    for address in ("127.0.0.1", "169.254.169.254", "0.0.0.0"):
        assert not found.connection("mirror.example", IPv4Address(address), 443).allowed
        assert not found.answers("mirror.example", IPv4Address(address))
    assert not found.connection("github.com", PRIVATE, 443).allowed


def test_a_rule_of_ipv6_matches_nothing_here() -> None:
    assert not gate(allow(cidr="::/0")).connection(None, PUBLIC, 80).allowed


def test_a_denial_says_what_to_do() -> None:
    assert "`forkyard egress allow sbx_1 a.example`" in gate().connection("a.example", PUBLIC, 80).reason
    assert "`forkyard egress allow sbx_1 --cidr 1.2.3.4`" in gate().connection(None, PUBLIC, 80).reason
    assert (
        "`forkyard egress allow sbx_1 --cidr 10.1.2.3`"
        in gate(preset="open").connection("a.example", PRIVATE, 80).reason
    )
    assert "`deny *.example`" in gate(deny("*.example")).connection("a.example", PUBLIC, 80).reason


@given(st.integers(0, 2**32 - 1).map(IPv4Address))
def test_nothing_that_python_knows_to_be_local_is_public_to_us(address: IPv4Address) -> None:
    if address.is_loopback or address.is_link_local or address.is_multicast or address.is_private:
        assert is_special(address)


def test_a_registry_may_be_known_by_its_address() -> None:
    gate = Gate("sbx_1", EgressPolicy(preset="coding"), Presets(frozenset({"10.1.2.3", "127.0.0.1", "mirror"})))
    assert gate.connection(None, IPv4Address("10.1.2.3"), 80).allowed
    assert gate.connection("mirror", IPv4Address("10.1.2.4"), 80).allowed
    assert not gate.connection(None, IPv4Address("10.1.2.4"), 80).allowed
    assert not gate.connection("evil.example", IPv4Address("10.1.2.3"), 80).allowed
    assert not gate.connection(None, IPv4Address("127.0.0.1"), 80).allowed
    assert not gate.connection(None, IPv4Address("10.1.2.3"), 80, own=True).allowed
