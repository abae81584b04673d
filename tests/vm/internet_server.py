"""The servers of `internet.py`, all in one process: `internet_server.py ROLE LOG CONFIG`. Writes what reaches it to LOG."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import sys
import tempfile
from pathlib import Path

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

role, log_file, config = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])


def note(kind: str, to: str, port: int, data: bytes, source: str = "") -> None:
    line = {"kind": kind, "to": to, "port": port, "data": data[:500].decode("latin-1"), "source": source}
    with log_file.open("a") as log:
        log.write(json.dumps(line) + "\n")


def certificate() -> ssl.SSLContext:
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("wb") as file:
        file.write(made.public_bytes(serialization.Encoding.PEM))
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        file.flush()
        context.load_cert_chain(file.name)
    return context


async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers each request with who it is; other bytes come back as they are. A connection alone is noted too."""
    to, port = writer.get_extra_info("sockname")[:2]
    note("tcp", to, port, b"", str(writer.get_extra_info("peername")[0]))
    try:
        while data := await reader.read(65536):
            note("tcp", to, port, data)
            if b" HTTP/1." in data:
                body = f"this is {role} {to}\n".encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            elif b"BULK " in data:
                left = int(data.split()[1])
                while left > 0:
                    writer.write(b"x" * min(left, 1 << 20))
                    await writer.drain()
                    left -= 1 << 20
                return
            else:
                writer.write(data)
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


class Datagrams(asyncio.DatagramProtocol):
    def __init__(self, port: int) -> None:
        self._port = port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        if self._port != 53:
            note("udp", "", self._port, data, peer[0])
            self._transport.sendto(data, peer)  # type: ignore[attr-defined]
            return
        query = dns.message.from_wire(data)
        name = query.question[0].name.to_text(omit_final_dot=True).lower()
        note("dns", "", 53, name.encode(), peer[0])
        answer = dns.message.make_response(query)
        addresses = config["zone"].get(name, [config["wild"][1]] if name.endswith(config["wild"][0]) else [])
        if not addresses:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif query.question[0].rdtype == dns.rdatatype.A:
            answer.answer.append(dns.rrset.from_text(query.question[0].name, 1, "IN", "A", *addresses))
        self._transport.sendto(answer.to_wire(), peer)  # type: ignore[attr-defined]


def sniff() -> None:
    """Each kind of packet that comes over the cable, once: what is neither TCP nor DNS should not be there at all."""
    listener = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    listener.bind(("cable", 0))
    listener.setblocking(False)
    known: set[tuple[int, str, int]] = set()

    def packet() -> None:
        frame, (_, protocol, kind, *_rest) = listener.recvfrom(2048)
        if kind == socket.PACKET_OUTGOING:
            return
        source, number, to = frame[6:12].hex(), -1, ""
        if protocol == 0x0800 and len(frame) >= 34:
            source, to, number = socket.inet_ntoa(frame[26:30]), socket.inet_ntoa(frame[30:34]), frame[23]
            if number == 6 and source == "11.0.0.1":
                return
            if number == 17 and source == "11.0.0.1" and struct.unpack("!H", frame[36:38])[0] == 53:
                return
        elif protocol == 0x86DD and len(frame) >= 55:
            source, to = (socket.inet_ntop(socket.AF_INET6, frame[at : at + 16]) for at in (22, 38))
            number = frame[20]
            if to.startswith("ff02:") or (number == 58 and 133 <= frame[54] <= 137):
                return  # what a kernel says by itself
        elif protocol == 0x0806:
            return
        if (protocol, source, number) not in known:
            known.add((protocol, source, number))
            note("packet", to, number, frame[:64], source)

    asyncio.get_running_loop().add_reader(listener.fileno(), packet)


async def main() -> None:
    secure = certificate()
    for port in config["tcp"]:
        await asyncio.start_server(connection, None, port, ssl=secure if port == 443 else None, backlog=1024)
    loop = asyncio.get_running_loop()
    if role == "outside":
        sniff()
        for port in config["udp"]:
            await loop.create_datagram_endpoint(lambda port=port: Datagrams(port), ("0.0.0.0", port))  # type: ignore[misc]
    print("ready", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
