"""What the first bytes of a connection say about where it wants to go. Pure; all input is a guest's.

Knows a TLS ClientHello (over any number of records) and the head of an HTTP/1 request; the rest is opaque.
"""

from __future__ import annotations

from dataclasses import dataclass

from forkyard.net.policy import normal

#: More than any honest client sends before it is answered.
MOST_BYTES = 32 << 10
_TLS_HELLO_BYTES = 16 << 10
_FIRST_LINE_BYTES = 8 << 10


@dataclass(frozen=True)
class Tls:
    name: str | None
    alpn: tuple[str, ...] = ()


@dataclass(frozen=True)
class Http:
    """`head` ends with its empty line."""

    head: bytes


@dataclass(frozen=True)
class Opaque:
    """Neither TLS nor HTTP."""


@dataclass(frozen=True)
class Malformed:
    """It began like TLS or HTTP and is neither."""

    why: str


Sight = Tls | Http | Opaque | Malformed


def sniff(data: bytes) -> Sight | None:
    """What `data`, the first bytes of a connection, are. None: too early to tell."""
    if not data:
        return None
    if data[0] == 0x16:
        return _tls(data)
    return _http(data)


def _http(data: bytes) -> Sight | None:
    text = data.lstrip(b"\r\n\t ")  # some servers skip these before a request, so we must look behind them
    line, newline, _ = text.partition(b"\n")
    if any((byte < 0x20 and byte not in b"\r\t") or byte > 0x7E for byte in line[:256]):
        return Opaque()
    if not newline:
        return Malformed("a first line without end") if len(data) >= _FIRST_LINE_BYTES else None
    if b"HTTP/" not in line.upper():
        return Opaque()
    if text is not data and text != data:
        return Malformed("white space before the request")
    end = data.find(b"\r\n\r\n")
    if end >= 0:
        return Http(data[: end + 4])
    return Malformed("a request head of more than 32 KiB") if len(data) >= MOST_BYTES else None


class _Short(Exception):
    """More bytes are needed than there are."""


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise _Short
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width))

    def vector(self, width: int) -> bytes:
        return self.take(self.number(width))

    @property
    def done(self) -> bool:
        return self._at == len(self._data)


def _tls(data: bytes) -> Sight | None:
    handshake = bytearray()
    records = _Cursor(data)
    while len(handshake) < 4 or len(handshake) < 4 + int.from_bytes(handshake[1:4]):
        try:
            kind, major = records.take(2)
            records.take(1)
            if kind != 0x16 or major != 3:
                return Malformed("not a TLS handshake") if handshake else Opaque()
            size = records.number(2)
            if not 0 < size <= _TLS_HELLO_BYTES:
                return Malformed("a TLS record of a forbidden size")
            handshake += records.take(size)
        except _Short:
            return Malformed("a TLS hello of more than 16 KiB") if len(data) >= _TLS_HELLO_BYTES else None
        if handshake[0] != 1:
            return Malformed("a TLS handshake that does not begin with a hello")
        if len(handshake) >= 4 and int.from_bytes(handshake[1:4]) > _TLS_HELLO_BYTES:
            return Malformed("a TLS hello of more than 16 KiB")
    try:
        return _hello(bytes(handshake[4 : 4 + int.from_bytes(handshake[1:4])]))
    except (_Short, UnicodeDecodeError):
        return Malformed("a TLS hello that does not add up")


def _hello(body: bytes) -> Sight:
    hello = _Cursor(body)
    hello.take(2 + 32)  # version, random
    hello.vector(1)  # session
    hello.vector(2)  # ciphers
    hello.vector(1)  # compressions
    name: str | None = None
    alpn: tuple[str, ...] = ()
    seen: set[int] = set()
    extensions = _Cursor(b"" if hello.done else hello.vector(2))
    while not extensions.done:
        kind, value = extensions.number(2), _Cursor(extensions.vector(2))
        if kind in seen:
            return Malformed("a TLS hello with the same extension twice")
        seen.add(kind)
        if kind == 0:
            names = _Cursor(value.vector(2))
            if names.number(1) != 0:
                return Malformed("a server name of unknown kind")
            name = normal(names.vector(2).decode("ascii"))
            if name is None or not names.done or not value.done:
                return Malformed("a server name that is none")
        elif kind == 16:
            protocols = _Cursor(value.vector(2))
            found = []
            while not protocols.done:
                found.append(protocols.vector(1).decode("ascii", "replace"))
            alpn = tuple(found)
    return Tls(name, alpn)
