"""What the network of one machine is made of. Values only; the parts that use them are beside this file.

A machine lives in a *slot*: a network namespace with a loopback and a tap, and no way out. Whatever the guest sends is
redirected to sockets that the daemon opened inside the slot (`Listeners`), and the `Door` of that machine decides.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import astuple, dataclass, field

from forkyard.guest.base import SocketOwner
from forkyard.models.network import EgressPolicy

#: The same in every sandbox: a snapshot has them baked in.
GUEST_ADDRESS = "10.177.0.2"
DOOR_ADDRESS = "10.177.0.1"
PREFIX_LENGTH = 30
GUEST_MAC = "02:fd:00:00:00:02"
#: Host names below this are Forkyard's own (hosted Git and the like), reachable under every policy that names them in
#: `Network.services`; they never go to DNS.
INTERNAL_DOMAIN = "forkyard.internal"
#: On every request to a service, put there by the door: the sandbox it comes from.
SANDBOX_HEADER = "X-Forkyard-Sandbox"


@dataclass(frozen=True)
class Injection:
    """A secret on its way out: what stands in the guest, and what is put in its place for these hosts."""

    placeholder: str = field(repr=False)
    value: str = field(repr=False)
    hosts: tuple[str, ...]  # domain patterns, as in `EgressRule.domain`
    header: str
    format: str


@dataclass(frozen=True)
class Header:
    """Of every request to these hosts, whatever the guest has sent under this name."""

    host: str  # a domain pattern
    name: str
    value: str = field(repr=False)
    hidden: tuple[str, ...] = field(default=(), repr=False)  # what of it must not come back


@dataclass(frozen=True)
class Service:
    """A name inside sandboxes that leads to something on this host."""

    address: str
    port: int
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # added to each request, replacing the guest's


@dataclass(frozen=True)
class Network:
    """What the door of one machine enforces. Without a policy of its own a machine reaches nothing."""

    egress: EgressPolicy = field(default_factory=lambda: EgressPolicy(preset="none"))
    injections: Mapping[str, Injection] = field(default_factory=dict, repr=False)  # by name of the variable
    services: Mapping[str, Service] = field(default_factory=dict)  # by host name
    headers: tuple[Header, ...] = field(default=(), repr=False)
    spent_bytes: int = 0  # of the byte budget, by earlier machines of this sandbox

    @property
    def intercepts(self) -> bool:
        """Whether it looks into TLS, and so its guest must trust our certificate authority."""
        return bool(self.injections or self.headers) or self.egress.record is not None or self.egress.replay is not None


@dataclass(frozen=True)
class Traffic:
    bytes_out: int = 0
    bytes_in: int = 0
    connections: int = 0
    denied: int = 0
    #: Of those who came from outside: previews, SSH, forwarded ports. `in` is into the sandbox.
    ingress_bytes_in: int = 0
    ingress_bytes_out: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(one - less for one, less in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Listeners:
    """Sockets inside a slot, bound and listening, owned by the door they are given to. The original destination of a
    TCP connection is its `SO_ORIGINAL_DST`."""

    tcp: socket.socket  # every TCP connection of the guest but those to port 53
    dns_udp: socket.socket  # every UDP packet to port 53, whatever its address
    dns_tcp: socket.socket


#: Asks the guest whose connection this is: protocol, source port, destination address and port.
OwnerOf = Callable[[str, int, str, int], Awaitable[SocketOwner | None]]
