"""E2B's network settings as a policy of ours. Pure."""

from __future__ import annotations

import ipaddress
import re

from pydantic import ValidationError

from forkyard.compat.e2b.errors import Refused
from forkyard.compat.e2b.models import Network
from forkyard.models.network import (
    MAX_HEADERS,
    EgressHeader,
    EgressPolicy,
    EgressRule,
    IngressPolicy,
    NetworkPolicy,
)

_EVERYTHING = ("0.0.0.0/0", "::/0")
#: What `Secret.fill` makes.
_SECRET = re.compile(r"\$\{e2b\.secrets\.([^{}]{1,256})\}")


def policy_of(network: Network | None, allow_internet: bool | None) -> NetworkPolicy:
    """Theirs is open unless told otherwise, and an allowed destination wins over a denied one."""
    given = network or Network()
    for name, value in (
        ("egressProxy", given.egress_proxy),
        ("maskRequestHost", given.mask_request_host),
        ("httpsPorts", given.https_ports),
    ):
        if value:
            raise Refused(400, f"network.{name} is not served here yet; leave it out")
    shut = allow_internet is False or any(one in _EVERYTHING for one in given.deny_out)
    try:
        rules = [_rule("allow", one) for one in given.allow_out]
        # Names are looked up by the door, whichever server is asked; what else those do is allowed as it is there.
        if any(rule.domain is not None for rule in rules):
            rules += [_rule("allow", str(one)) for one in given.dns_servers or []]
        rules += [_rule("deny", one) for one in given.deny_out if one not in _EVERYTHING]
        egress = EgressPolicy(preset="none" if shut else "open", rules=rules, headers=_headers(given))
    except (ValidationError, ValueError):
        raise Refused(
            400, "network.allowOut and denyOut have addresses, networks, or names such as *.example.com"
        ) from None
    ingress = IngressPolicy(access="token" if given.allow_public is False else None)
    return NetworkPolicy(egress=egress, ingress=ingress)


def _headers(network: Network) -> list[EgressHeader]:
    """Of several rules that set one header the last counts."""
    made = []
    for host, rules in (network.rules or {}).items():
        if host.rpartition(".")[2].isdigit() or ":" in host or "/" in host:
            raise Refused(400, f"network.rules are for names such as api.example.com, not for {host[:80]!r}")
        for rule in rules:
            for name, value in rule.transform.headers.items():
                text = _SECRET.sub(r"${secrets.\1}", value)
                if "${e2b." in text:
                    raise Refused(
                        400, f"network.rules of {host[:253]}: ${{e2b.secrets.NAME}} is filled in, and nothing else"
                    )
                try:
                    made.append(EgressHeader(domain=host, name=name, value=text))
                except ValidationError as error:
                    why = error.errors(include_url=False, include_input=False, include_context=False)[0]["msg"]
                    raise Refused(400, f"network.rules of {host[:253]}, header {name[:80]!r}: {why}"[:500]) from None
    if len(made) > MAX_HEADERS:
        raise Refused(400, f"network.rules set at most {MAX_HEADERS} headers")
    return made


def _rule(action: str, destination: str) -> EgressRule:
    try:
        return EgressRule.model_validate(
            {"action": action, "cidr": str(ipaddress.ip_network(destination, strict=False))}
        )
    except ValueError:
        return EgressRule.model_validate({"action": action, "domain": destination})
