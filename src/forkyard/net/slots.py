"""Slots: a network namespace per machine, with a tap and no way out.

Owns: the namespaces `/run/netns/forkyard-<scope>-<number>`, what is in them, and the few that are kept ready. A slot
is used by one machine and then removed; the number is the machine's own (it also decides its user id), so whoever knows
the machine knows its slot, after a crash too.
Never does: looking at traffic. The rules below lead all of it to the sockets of the machine's door, and refuse the rest.

The guest has the same addresses in every slot, on both levels: a machine that is restored in another slot does not
notice. `lo` stays down, so 127.0.0.1 is no address of the slot, and a route leads it to the guest: that is how a server
that listens on the guest's own loopback is reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

import structlog

from forkyard.errors import HostFailure
from forkyard.net import namespace
from forkyard.net.base import DOOR_ADDRESS, GUEST_ADDRESS, GUEST_MAC, PREFIX_LENGTH, Listeners

log = structlog.get_logger(__name__)

DIRECTORY = Path("/run/netns")
TAP = "tap0"
DOOR_PORT = 4400
DNS_PORT = 53
BACKLOG = 1024
#: Connections of one guest that the kernel keeps track of: each costs memory of the host.
MOST_CONNECTIONS = 8192
COMMAND_TIMEOUT_S = 30.0
RETRY_S = 5.0
QUIET_S = 0.25

_LINKS = f"""\
tuntap add {TAP} mode tap vnet_hdr
link set {TAP} address 02:fd:00:00:00:01 up
addr add {DOOR_ADDRESS}/{PREFIX_LENGTH} dev {TAP}
neigh add {GUEST_ADDRESS} lladdr {GUEST_MAC} dev {TAP} nud permanent
route add 127.0.0.1/32 via {GUEST_ADDRESS} dev {TAP} src {DOOR_ADDRESS}
"""

# What is not redirected is refused at once, where it comes in: a guest need not wait for what will never be answered. A
# packet of a connection that nobody here knows (it was open when the guest was copied) is refused too.
_RULES = f"""\
table inet slot {{
  chain to_the_door {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname "{TAP}" ip saddr {GUEST_ADDRESS} meta l4proto {{ tcp, udp }} th dport 53 redirect to :{DNS_PORT}
    iifname "{TAP}" ip saddr {GUEST_ADDRESS} meta l4proto tcp redirect to :{DOOR_PORT}
  }}
  chain or_nowhere {{
    type filter hook prerouting priority dstnat + 10; policy drop;
    meta nfproto ipv6 drop
    ct state established,related accept
    meta l4proto tcp ct state new ct count over {MOST_CONNECTIONS} reject with tcp reset
    meta l4proto udp ct state new ct count over {MOST_CONNECTIONS} drop
    ct state new ip saddr {GUEST_ADDRESS} ip daddr {DOOR_ADDRESS} tcp dport {{ {DNS_PORT}, {DOOR_PORT} }} accept
    ct state new ip saddr {GUEST_ADDRESS} ip daddr {DOOR_ADDRESS} udp dport {DNS_PORT} accept
    meta l4proto tcp reject with tcp reset
    limit rate 100/second reject with icmp admin-prohibited
  }}
  chain never_through {{
    type filter hook forward priority filter; policy drop;
  }}
}}
"""

_SYSCTLS = {
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
    f"ipv4/conf/{TAP}/route_localnet": "1",
    f"ipv4/conf/{TAP}/accept_redirects": "0",
    # A connection is only one if its beginning was seen: see above.
    "netfilter/nf_conntrack_tcp_loose": "0",
    # One DNS query is one of these.
    "netfilter/nf_conntrack_udp_timeout": "5",
}


class Slots:
    def __init__(self, scope: str, *, spare: int, most: int) -> None:
        """`scope` names this daemon among those of the machine; `spare` are kept ready, of at most `most`."""
        self._prefix = f"forkyard-{scope}-"
        self._spare = spare
        self._most = most
        self._ready: set[int] = set()
        self._making: dict[int, asyncio.Task[None]] = {}
        self._claimed: set[int] = set()
        self._wanted = asyncio.Event()
        self._refiller: asyncio.Task[None] | None = None

    def path(self, number: int) -> Path:
        return DIRECTORY / f"{self._prefix}{number}"

    async def start(self, in_use: Mapping[int, int], reserved: Collection[int] = ()) -> None:
        """Remove what an earlier daemon left, but for the slots of machines that live on: `in_use` has the pid of each.
        `reserved` numbers belong to somebody without a slot."""
        self._claimed |= {*in_use, *reserved}
        await asyncio.to_thread(self._take_over, in_use)
        if self._spare:
            self._refiller = asyncio.create_task(self._refill(), name="refill slots")

    async def stop(self) -> None:
        """Remove those that nobody uses. The rest goes on: machines outlive the daemon."""
        if self._refiller is not None:
            self._refiller.cancel()
            await asyncio.wait({self._refiller})
        for number in list(self._ready):
            self._ready.discard(number)
            await asyncio.to_thread(namespace.remove, self.path(number))

    def claim(self, taken: Collection[int]) -> int | None:
        """A number that is in nobody's hands, if possible with a slot that is ready. None if there is none."""
        self._wanted.set()
        taken = {*taken, *self._claimed}
        ready = (number for number in sorted(self._ready) if number not in taken)
        number = next(ready, None)
        if number is None:
            number = self._unused(taken)
        if number is not None:
            self._claimed.add(number)
        return number

    async def prepare(self, number: int) -> Path:
        """The slot of this number, made now if it is not ready."""
        if number in self._making:
            await asyncio.wait({self._making[number]})
        if number in self._ready:
            self._ready.discard(number)
        else:
            await self._make(number)
        return self.path(number)

    async def release(self, number: int) -> None:
        """Called when nothing of its machine runs any more. Idempotent."""
        if number in self._claimed:
            self._ready.discard(number)
            await asyncio.to_thread(namespace.remove, self.path(number))
            self._claimed.discard(number)

    async def check(self) -> None:
        """Raises `HostFailure` if this host cannot make slots."""
        path = DIRECTORY / f"{self._prefix}check"
        namespace.remove(path)
        await self._create(path)
        await asyncio.to_thread(namespace.remove, path)

    def _unused(self, taken: Collection[int]) -> int | None:
        """Whatever exists is somebody's, if not ours then of a program beside the daemon."""
        return next((n for n in range(self._most) if n not in taken and not self.path(n).exists()), None)

    async def _refill(self) -> None:
        while True:
            number = self._unused(self._claimed)
            if len(self._ready - self._claimed) >= self._spare or number is None:
                self._wanted.clear()
                await self._wanted.wait()
                continue
            await asyncio.sleep(QUIET_S)  # whoever has just taken one needs the CPU more
            if number in self._claimed:
                continue
            task = self._making[number] = asyncio.create_task(self._make_spare(number))
            try:
                await task
            except HostFailure as error:
                log.warning("no slot could be made ready", error=error.message)
                await asyncio.sleep(RETRY_S)
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.wait({task})
                self._making.pop(number, None)

    async def _make_spare(self, number: int) -> None:
        await self._make(number)
        self._ready.add(number)

    async def _make(self, number: int) -> None:
        await self._create(self.path(number))

    async def _create(self, path: Path) -> None:
        try:
            await namespace.create(path, _furnish)
        except OSError as error:
            raise HostFailure(f"no network slot could be made: {error}; `forkyard doctor` may tell why") from error

    def _take_over(self, in_use: Mapping[int, int]) -> None:
        kept = {self.path(number): pid for number, pid in in_use.items()}
        for path in DIRECTORY.glob(f"{self._prefix}*"):
            if path not in kept:
                namespace.remove(path)
        for path, pid in kept.items():
            try:
                namespace.keep(path, pid)
            except OSError as error:
                log.error("a machine has lost its network", slot=path.name, error=str(error))


async def open_listeners(slot: Path) -> Listeners:
    """The sockets that a slot's rules lead to."""
    try:
        return await namespace.inside(slot, _listeners)
    except OSError as error:
        raise HostFailure(f"the door of {slot.name} could not be opened: {error}") from error


def _listeners() -> Listeners:
    with contextlib.ExitStack() as undo:

        def bound(kind: socket.SocketKind, port: int) -> socket.socket:
            made = undo.enter_context(socket.socket(socket.AF_INET, kind))
            made.setblocking(False)
            if kind is socket.SOCK_STREAM:
                # Connections of an earlier daemon may still be closing.
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((DOOR_ADDRESS, port))
            if kind is socket.SOCK_STREAM:
                made.listen(BACKLOG)
            return made

        listeners = Listeners(
            tcp=bound(socket.SOCK_STREAM, DOOR_PORT),
            dns_udp=bound(socket.SOCK_DGRAM, DNS_PORT),
            dns_tcp=bound(socket.SOCK_STREAM, DNS_PORT),
        )
        undo.pop_all()
        return listeners


async def open_socket(slot: Path) -> socket.socket:
    """A TCP socket inside a slot, for a connection to its guest."""

    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.setblocking(False)
        return made

    return await namespace.inside(slot, make)


def _furnish() -> None:
    _run(["ip", "-batch", "-"], _LINKS)
    _run(["nft", "-f", "-"], _RULES)
    for name, value in _SYSCTLS.items():
        path = Path("/proc/sys/net", name)
        if path.exists():  # a kernel without IPv6 has nothing to turn off
            path.write_text(value)


def _run(command: list[str], script: str) -> None:
    """In the namespace of the calling thread."""
    try:
        done = subprocess.run(
            command, input=script.encode(), capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise OSError(f"{command[0]}: {error} (it is in the Debian packages iproute2 and nftables)") from error
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.decode(errors='replace').strip()[:500]}")
