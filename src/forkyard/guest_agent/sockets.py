"""The guest's sockets, asked of the kernel by netlink (sock_diag): whose one is, and which connections lead outside.

Owns: one netlink socket. A question is about one socket and the kernel finds it by its addresses, so it costs the same
with a thousand others open.
"""

from __future__ import annotations

import os
import socket
import struct

from .cgroups import Cgroups
from .execs import Execs
from .failures import Failure
from .loop import log
from .network import ADDRESS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY, _SOCK_DESTROY = 20, 21
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_DUMP = 1, 4, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_CGROUP_ID = 21
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI")
#: Ports and addresses in network order, then interface and cookie. As opaque bytes it names one socket for good.
_ID = struct.Struct("!HH16s16s4s8s")
_MESSAGE = struct.Struct("=BBBB")  # family, state, timer, retransmits; then the id, and five numbers
_INODE_AT = _MESSAGE.size + _ID.size + 16
_ATTRIBUTES_AT = _INODE_AT + 4
_ANY = b"\xff" * 8
#: Established or being closed. One that is still being made will find the new door by itself.
_CONNECTED = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11
_MAPPED = bytes(10) + b"\xff\xff"
MOST_CONNECTIONS = 4096
_MOST_PROCESSES = 64
_MOST_FILES = 1024
_MOST_CGROUPS = 256
_WAIT_S = 2.0


class Sockets:
    def __init__(self, cgroups: Cgroups, execs: Execs) -> None:
        self._cgroups = cgroups
        self._execs = execs
        self._netlink: socket.socket | None = None

    def owner(self, protocol: str, address: str, source_port: int, port: int) -> dict[str, Any] | None:
        """Whose socket it is that sends from `source_port` to this address; None if there is none."""
        number = socket.IPPROTO_TCP if protocol == "tcp" else socket.IPPROTO_UDP
        found = self._find(number, source_port, address, port)
        if found is None:
            return None
        inode, cgroup_id = found
        cgroup = self._cgroup(cgroup_id)
        if cgroup is None:
            return {"exec_id": None, "trace_id": None, "pid": None, "process": None}
        exec_id, path = cgroup
        pid = _holder(path, inode)
        return {
            "exec_id": exec_id,
            "trace_id": self._execs.trace_id(exec_id),
            "pid": pid,
            "process": None if pid is None else _name(pid),
        }

    def connections(self) -> list[str]:
        """Names of the TCP connections whose other end is not in this machine, in hexadecimal."""
        found = []
        for family in (socket.AF_INET, socket.AF_INET6):
            request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _CONNECTED) + bytes(_ID.size)
            for answer in self._ask(_SOCK_DIAG_BY_FAMILY, _NLM_F_DUMP, request):
                name = answer[_MESSAGE.size : _MESSAGE.size + _ID.size]
                if not _inside(family, _ID.unpack(name)[3]):
                    found.append(bytes([family]).hex() + name.hex())
        return found[:MOST_CONNECTIONS]

    def disconnect(self, names: list[str]) -> int:
        """End these, as if the other end had: whoever waits for them is told at once."""
        ended = 0
        for text in names:
            raw = bytes.fromhex(text)
            if len(raw) != 1 + _ID.size:
                raise Failure("invalid_request", f"{text!r:.80} names no connection")
            request = _REQUEST.pack(raw[0], socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + raw[1:]
            try:
                for _ in self._ask(_SOCK_DESTROY, _NLM_F_ACK, request):
                    pass
                ended += 1
            except FileNotFoundError:
                pass  # it ended by itself
        return ended

    def _find(self, protocol: int, source_port: int, address: str, port: int) -> tuple[int, int] | None:
        there = socket.inet_aton(address)
        here = socket.inet_aton(ADDRESS)
        # A program that speaks IPv6 reaches IPv4 by mapped addresses; the kernel finds those only if asked so.
        for family, prefix in ((socket.AF_INET, b""), (socket.AF_INET6, _MAPPED)):
            ends = ((source_port, prefix + here), (port, prefix + there))
            if protocol == socket.IPPROTO_UDP:
                ends = ends[::-1]  # it has them the other way round there, and always had
            (one_port, one), (other_port, other) = ends
            name = _ID.pack(one_port, other_port, one, other, bytes(4), _ANY)
            request = _REQUEST.pack(family, protocol, 0, 0xFFFFFFFF) + name
            try:
                for answer in self._ask(_SOCK_DIAG_BY_FAMILY, 0, request):
                    return struct.unpack_from("=I", answer, _INODE_AT)[0], _cgroup_id(answer)
            except FileNotFoundError:
                pass
        return None

    def _cgroup(self, cgroup_id: int) -> tuple[str, str] | None:
        """The exec a cgroup is of, or is inside of, and its path. The number is that of the directory."""
        parent, left = self._cgroups.parent, _MOST_CGROUPS
        try:
            with os.scandir(parent) as entries:
                execs = [entry for entry in entries if entry.name.startswith("exec-")]
        except OSError:
            return None
        for entry in execs:
            if entry.inode() == cgroup_id:
                return entry.name.removeprefix("exec-"), entry.path
        for entry in execs:  # a program may have made cgroups of its own below
            for path, directories, _ in os.walk(entry.path):
                for name in directories:
                    left -= 1
                    if left < 0:
                        return None
                    below = f"{path}/{name}"
                    try:
                        if os.stat(below).st_ino == cgroup_id:
                            return entry.name.removeprefix("exec-"), below
                    except OSError:
                        pass
        return None

    def _ask(self, kind: int, flags: int, request: bytes) -> Iterator[bytes]:
        """Raises `OSError` as the kernel says."""
        if self._netlink is None:
            self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)
            self._netlink.settimeout(_WAIT_S)
        netlink = self._netlink
        try:
            netlink.send(_HEADER.pack(_HEADER.size + len(request), kind, _NLM_F_REQUEST | flags, 1, 0) + request)
            while True:
                data = netlink.recv(1 << 16)
                while data:
                    length, message, _, _, _ = _HEADER.unpack_from(data)
                    body = data[_HEADER.size : length]
                    if message == _NLMSG_ERROR:
                        (number,) = struct.unpack_from("=i", body)
                        if number:
                            raise OSError(-number, os.strerror(-number))
                        return
                    if message == _NLMSG_DONE:
                        return
                    yield body
                    if not flags:
                        return
                    data = data[length + 3 & ~3 :]
        except TimeoutError:
            # What comes late must not be taken for the answer to another question.
            netlink.close()
            self._netlink = None
            raise


def warm_up(sockets: Sockets) -> None:
    """The kernel loads this part of itself at the first question. That takes long, so it is asked before anybody waits."""
    for protocol in ("tcp", "udp"):
        try:
            sockets.owner(protocol, "10.177.0.1", 1, 1)
        except OSError as error:
            log(f"sock_diag ({protocol}): {error}")


def _inside(family: int, peer: bytes) -> bool:
    if family == socket.AF_INET:
        return peer[0] == 127
    return peer[12] == 127 if peer.startswith(_MAPPED) else peer == bytes(15) + b"\1"


def _cgroup_id(answer: bytes) -> int:
    at = _ATTRIBUTES_AT
    while at + 4 <= len(answer):
        length, kind = struct.unpack_from("=HH", answer, at)
        if kind == _CGROUP_ID and length == 12:
            return int(struct.unpack_from("=Q", answer, at + 4)[0])
        at += max(4, length + 3 & ~3)
    return 0


def _holder(cgroup: str, inode: int) -> int | None:
    """Of the processes of a cgroup, the newest that has this socket open."""
    try:
        with open(f"{cgroup}/cgroup.procs") as file:
            pids = [int(line) for line in file][-_MOST_PROCESSES:]
    except OSError:
        return None
    wanted, left = f"socket:[{inode}]", _MOST_FILES
    for pid in reversed(pids):
        directory = f"/proc/{pid}/fd"
        try:
            names = os.listdir(directory)
        except OSError:
            continue
        for name in reversed(names):
            left -= 1
            if left < 0:
                return None
            try:
                if os.readlink(f"{directory}/{name}") == wanted:
                    return pid
            except OSError:
                pass
    return None


def _name(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as file:
            return file.read(64).strip()
    except OSError:
        return None
