"""Decides where a sandbox may go, and the daemon itself for a caller. Pure: no sockets, no clock.

A destination is a name (by DNS answer, SNI or Host), an address and a port. The first rule that matches decides, then
the preset; what nothing allows is denied. Addresses that lead into private networks, to this host or to the metadata
service of a cloud need a rule of their own (`cidr`), whatever name led there.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network
from typing import Protocol

from forkyard.models.network import EgressPolicy, EgressRule
from forkyard.net.limits import Allowance
from forkyard.net.presets import Presets

#: What the public Internet does not route, or what means "here". Python's `is_global` says the same of most, but changes
#: with its version.
_SPECIAL = tuple(
    IPv4Network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
    )
)
#: Of these, what is never a package registry, even if the host's own configuration leads there.
_NEVER_A_REGISTRY = tuple(
    IPv4Network(network) for network in ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4")
)
_EVERYTHING_PUBLIC = ("research", "autonomous", "open")
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*")


@dataclass(frozen=True)
class Decision:
    allowed: bool
    reason: str  # what allowed it; or why not, and how to allow it
    #: Under some name a rule would have denied it: whoever names something is to be taken at his word.
    unless_named: bool = False


def normal(name: str) -> str | None:
    """A host name as rules have it; None if it is none. An address is no name."""
    name = name.lower().rstrip(".")
    if not _NAME.fullmatch(name) or name.rpartition(".")[2].isdigit():
        return None
    return name


def address_of(text: str) -> IPv4Address | None:
    try:
        return IPv4Address(text)
    except ValueError:
        return None


def matches(pattern: str, name: str) -> bool:
    """`example.com` is itself, `*.example.com` is all below it, `*` is all."""
    if pattern == "*":
        return True
    if pattern.startswith("*."):
        return name.endswith(pattern[1:]) and len(name) > len(pattern) - 1
    return name == pattern


def is_special(address: IPv4Address) -> bool:
    return any(address in network for network in _SPECIAL)


class Decider(Protocol):
    """Says whether a name may be looked up, and a connection be opened."""

    @property
    def sandbox_id(self) -> str: ...

    def name(self, name: str) -> Decision: ...

    def connection(self, name: str | None, address: IPv4Address, port: int, *, own: bool = False) -> Decision: ...


@dataclass(frozen=True)
class Abroad:
    """For what this daemon fetches or posts because a caller said so, and not for a sandbox: everything public, the rest
    if `private` is allowed. `how` says what allows it."""

    how: str
    private: bool = False
    sandbox_id: str = ""

    def name(self, name: str) -> Decision:
        return Decision(True, f"{name}: any name")

    def connection(self, name: str | None, address: IPv4Address, port: int, *, own: bool = False) -> Decision:
        if self.private or not (own or is_special(address)):
            return Decision(True, "private addresses are allowed" if self.private else "it is public")
        shown = f"{name} ({address})" if name else str(address)
        return Decision(False, f"{shown}{f' port {port}' if port else ''} is {_where(own)}; {self.how}")

    def host(self, host: str) -> Decision:
        """What can be said before it is looked up."""
        if host == "localhost" or host.endswith(".localhost"):
            return self.connection(host, IPv4Address("127.0.0.1"), 0, own=True)
        address = address_of(host)
        return Decision(True, "a name") if address is None else self.connection(None, address, 0)


@dataclass(frozen=True)
class Gate:
    """One policy, as it stands for one sandbox."""

    sandbox_id: str
    policy: EgressPolicy
    presets: Presets = field(default_factory=Presets)

    @cached_property
    def allowance(self) -> Allowance:
        policy, presets = self.policy, self.presets
        research = policy.preset == "research"
        return Allowance(
            policy.bytes_per_s or (presets.research_bytes_per_s if research else None),
            policy.connections_per_minute or (presets.research_connections_per_minute if research else None),
            policy.byte_budget,
        )

    @cached_property
    def _rules(self) -> tuple[tuple[EgressRule, IPv4Network | None], ...]:
        return tuple((rule, _network(rule)) for rule in self.policy.rules)

    def name(self, name: str) -> Decision:
        """Whether a name may be looked up: whether any port of it can be reached."""
        for rule, _ in self._rules:
            if rule.cidr is None and (rule.domain is None or matches(rule.domain, name)):
                if rule.action == "allow":
                    return Decision(True, f"rule: {_text(rule)}")
                if not rule.ports:
                    return Decision(False, f"{name} is denied by the rule `{_text(rule)}`")
        return self._by_preset(name, name)

    def exactly(self, name: str) -> bool:
        """Whether a rule or preset names it in full. Other names may carry whatever a guest puts into them."""
        named = {rule.domain for rule in self.policy.rules} | self.presets.registries | self.presets.git_hosts
        return name in named

    def connection(self, name: str | None, address: IPv4Address, port: int, *, own: bool = False) -> Decision:
        """Whether a connection may be opened. `own`: the address is one of this host's."""
        shown = f"{name} ({address})" if name else str(address)
        decision = self._first_match(name, address, port, shown)
        if not decision.allowed or not (own or is_special(address)) or self._opened(address, port, own):
            return decision
        if (name or str(address)) in self.presets.registries and not own and not _never_a_registry(address):
            return decision
        return Decision(False, f"{shown} is {_where(own)}; {self.how(str(address))}")

    def answers(self, name: str, address: IPv4Address, *, own: bool = False) -> bool:
        """Whether an address may stand in the answer to a question for this name."""
        if not (own or is_special(address)):
            return True
        if name in self.presets.registries and not own and not _never_a_registry(address):
            return True
        return self._opened(address, None, own)

    def _first_match(self, name: str | None, address: IPv4Address, port: int, shown: str) -> Decision:
        passed = False
        for rule, network in self._rules:
            if rule.ports and port not in rule.ports:
                continue
            if rule.domain is not None and (name is None or not matches(rule.domain, name)):
                passed = passed or (name is None and rule.action == "deny")
                continue
            if rule.cidr is not None and (network is None or address not in network):
                continue
            if rule.action == "allow":
                # Who names a network means it, whatever it is called.
                return Decision(True, f"rule: {_text(rule)}", passed and not (network and network.prefixlen))
            return Decision(False, f"{shown} port {port} is denied by the rule `{_text(rule)}`")
        decision = self._by_preset(name or str(address), shown, port)
        return replace(decision, unless_named=True) if passed and decision.allowed else decision

    @cached_property
    def denied_names(self) -> frozenset[str]:
        """Those that rules spell out."""
        rules = self.policy.rules
        return frozenset(
            rule.domain for rule in rules if rule.action == "deny" and rule.domain and "*" not in rule.domain
        )

    def _by_preset(self, name: str, shown: str, port: int | None = None) -> Decision:
        preset = self.policy.preset
        if preset in _EVERYTHING_PUBLIC:
            return Decision(True, f"preset: {preset}")
        if preset == "coding" and (
            name in self.presets.registries or any(matches(pattern, name) for pattern in self.presets.git_hosts)
        ):
            return Decision(True, f"preset: {preset}")
        destination = f"{shown} port {port}" if port is not None else shown
        how = self.how(name)
        return Decision(False, f"{destination} is not allowed by the preset `{preset}`; {how}")

    def _opened(self, address: IPv4Address, port: int | None, own: bool) -> bool:
        """Whether a rule speaks of this address: `0.0.0.0/0` does not mean private networks, and only the address of this
        host itself means its services."""
        for rule, network in self._rules:
            if network is None or address not in network or (port and rule.ports and port not in rule.ports):
                continue
            if rule.action == "deny":
                return False
            if network.prefixlen == 32 or (not own and any(network.subnet_of(special) for special in _SPECIAL)):
                return True
        return False

    def how(self, destination: str) -> str:
        what = destination if address_of(destination) is None else f"--cidr {destination}"
        return f"allow it with `forkyard egress allow {self.sandbox_id} {what}`"


def _never_a_registry(address: IPv4Address) -> bool:
    return any(address in network for network in _NEVER_A_REGISTRY)


def _where(own: bool) -> str:
    return "this host itself" if own else "in a private or reserved network"


def _network(rule: EgressRule) -> IPv4Network | None:
    if rule.cidr is None:
        return None
    network = ipaddress.ip_network(rule.cidr, strict=False)
    return network if isinstance(network, IPv4Network) else None


def _text(rule: EgressRule) -> str:
    ports = f" ports {','.join(map(str, rule.ports))}" if rule.ports else ""
    return f"{rule.action} {rule.domain or rule.cidr or 'everything'}{ports}"
