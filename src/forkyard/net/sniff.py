"""What the first bytes of a connection say about where it wants to go. Pure; all input is a guest's.

Knows a TLS ClientHello (over any number of records) and the head of an HTTP/1 request; the rest is opaque. What a server
more lenient than we are could take for one of the two is malformed, never opaque: it would be carried without a look.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forkyard.net.policy import normal

#: More than any honest client sends before it is answered.
MOST_BYTES = 32 << 10
_TLS_HELLO_BYTES = 16 << 10
_FIRST_LINE_BYTES = 8 << 10

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
#: What some server takes for a space, as ASCII or Latin-1 have it; before a request some skip line feeds, too.
_SPACE = b"\t\v\f\r \x1c\x1d\x1e\x1f\x85\xa0"
_SKIPPED = _SPACE + b"\n"
#: Servers read this as a request, whatever follows, and without a version too (HTTP/0.9).
_REQUEST = re.compile(rb"%b{1,64}[%b]+(?:[/*]|[A-Za-z][A-Za-z0-9+.-]{0,15}://)" % (_TOKEN, _SPACE))
#: What may yet become one.
_REQUEST_BEGUN = re.compile(rb"%b{0,64}(?:[%b][^\0\n]*)?" % (_TOKEN, _SPACE))
#: Begin alike, and are none: git's own protocol, and protocols with versions of their own (RTSP, SIP).
_OTHERS = re.compile(rb"[0-9a-f]{4}git-[a-z-]{1,32} [^\0\n]*\0|[^\n]* (?!HTTP)[A-Z]{2,8}/[0-9]\.[0-9]\r?\n")
_REQUEST_BEHIND = re.compile(rb"HTTP/[0-9.]{1,3}[ \t]*\r?\n", re.IGNORECASE)
#: Tells a server behind a load balancer that what follows comes from somebody else.
_PROXIED = (b"PROXY ", b"\r\n\r\n\0\r\nQUIT\n")
_TLS_ALERT, _TLS_HANDSHAKE = 0x15, 0x16


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
    if data[0] == _TLS_HANDSHAKE:
        return _tls(data)
    if data[0] == _TLS_ALERT or data[0] & 0x80:
        # Servers drop an alert before the hello; one as SSL 2 had it is understood by many. No client sends these first.
        expected = _ALERT if data[0] == _TLS_ALERT else _OLD_HELLO
        if all(data[at] in values for at, values in expected if at < len(data)):
            return (
                Malformed("a TLS handshake that does not begin with a hello") if len(data) > expected[-1][0] else None
            )
    return _http(data)


_ALERT = ((1, range(16)), (3, (0,)), (4, range(1, 17)), (5, (1, 2)))
_OLD_HELLO = ((2, (1,)), (3, (0, 2, 3)), (4, range(6)))


def _http(data: bytes) -> Sight | None:
    if data.startswith(_PROXIED):
        return Malformed("a header of the PROXY protocol")
    if any(header.startswith(data) for header in _PROXIED):
        return None
    text = data.lstrip(_SKIPPED)
    line, newline, _ = text.partition(b"\n")
    versioned = b"HTTP/" in line.upper()
    if not versioned and (not _REQUEST.match(text) or _OTHERS.match(text)):
        if newline or (_is_binary(data.lstrip(b"\r\n\t ")) and not _REQUEST_BEGUN.fullmatch(text)):
            return Malformed("a request behind something else") if _REQUEST_BEHIND.search(data) else Opaque()
    elif newline and text != data:
        return Malformed("white space before the request")
    elif newline and not versioned:
        return Malformed("a request without a version")
    if not newline:
        return Malformed("a first line without end") if len(data) >= _FIRST_LINE_BYTES else None
    end = data.find(b"\r\n\r\n")
    if end >= 0:
        return Http(data[: end + 4])
    return Malformed("a request head of more than 32 KiB") if len(data) >= MOST_BYTES else None


def _is_binary(text: bytes) -> bool:
    line = text.partition(b"\n")[0][:256]
    return any((byte < 0x20 and byte not in b"\r\t") or byte > 0x7E for byte in line)


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
    usual = True
    while len(handshake) < 4 or len(handshake) < 4 + int.from_bytes(handshake[1:4]):
        try:
            kind, major = records.take(2)
            records.take(1)
            usual = usual and major == 3  # to some servers the first may have any that is small
            if kind != _TLS_HANDSHAKE or major > 15:
                return Malformed("not a TLS handshake") if handshake else Opaque()
            size = records.number(2)
            if not 0 < size <= _TLS_HELLO_BYTES:
                return Malformed("a TLS record of a forbidden size") if handshake or usual else Opaque()
            handshake += records.take(size)
        except _Short:
            return Malformed("a TLS hello of more than 16 KiB") if len(data) >= _TLS_HELLO_BYTES else None
        if handshake[0] != 1:
            return Malformed("a TLS handshake that does not begin with a hello") if usual else Opaque()
        if len(handshake) >= 4 and int.from_bytes(handshake[1:4]) > _TLS_HELLO_BYTES:
            return Malformed("a TLS hello of more than 16 KiB")
    if not usual:
        return Malformed("a TLS record of an unknown version")
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
    if not hello.done:
        return Malformed("a TLS hello with something behind it")
    return Tls(name, alpn)
