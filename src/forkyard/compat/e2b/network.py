"""E2B's network settings as a policy of ours. Pure."""

from __future__ import annotations

import ipaddress

from pydantic import ValidationError

from forkyard.compat.e2b.errors import Refused
from forkyard.compat.e2b.models import Network
from forkyard.models.network import EgressPolicy, EgressRule, IngressPolicy, NetworkPolicy

_EVERYTHING = ("0.0.0.0/0", "::/0")


def policy_of(network: Network | None, allow_internet: bool | None) -> NetworkPolicy:
    """Theirs is open unless told otherwise, and an allowed destination wins over a denied one."""
    given = network or Network()
    for name, value in (
        ("rules", given.rules),
        ("egressProxy", given.egress_proxy),
        ("dnsServers", given.dns_servers),
        ("maskRequestHost", given.mask_request_host),
        ("httpsPorts", given.https_ports),
    ):
        if value:
            raise Refused(400, f"network.{name} is not served here yet; leave it out")
    shut = allow_internet is False or any(one in _EVERYTHING for one in given.deny_out)
    try:
        rules = [_rule("allow", one) for one in given.allow_out]
        rules += [_rule("deny", one) for one in given.deny_out if one not in _EVERYTHING]
        egress = EgressPolicy(preset="none" if shut else "open", rules=rules)
    except (ValidationError, ValueError):
        raise Refused(
            400, "network.allowOut and denyOut have addresses, networks, or names such as *.example.com"
        ) from None
    ingress = IngressPolicy(access="token" if given.allow_public is False else None)
    return NetworkPolicy(egress=egress, ingress=ingress)


def _rule(action: str, destination: str) -> EgressRule:
    try:
        return EgressRule.model_validate(
            {"action": action, "cidr": str(ipaddress.ip_network(destination, strict=False))}
        )
    except ValueError:
        return EgressRule.model_validate({"action": action, "domain": destination})
