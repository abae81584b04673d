"""The requests of one plain HTTP connection, checked one by one. Pure; all input is a guest's.

Owns: finding where each request ends, so that no second request can hide behind the first, and replacing headers. It is
strict where a server might be lenient: what could be read in two ways is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forkyard.net.policy import address_of, normal
from forkyard.net.sniff import MOST_BYTES

_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e]{1,16384}) HTTP/1\.([01])\r\n")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}):[ \t]*([\x20-\x7e\x80-\xff\t]*)\r\n")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})((?:;[\x20-\x7e\t]{0,1024})?)\r\n")
_HOST = re.compile(r"([A-Za-z0-9._-]{1,255})(?::([0-9]{1,5}))?")


class BadRequest(Exception):
    """It cannot be told for sure what this request asks, and of whom."""


@dataclass(frozen=True)
class Head:
    method: str
    target: str
    host: str  # without port; a name in lower case, or an address
    headers: tuple[tuple[bytes, bytes], ...]
    minor_version: int

    @property
    def upgrade(self) -> str | None:
        """All of them: a server may choose."""
        asked = [value.decode("latin-1").strip().lower() for name, value in self.headers if name.lower() == b"upgrade"]
        return ", ".join(asked) if asked else None

    def encode(self, replaced: Mapping[str, str]) -> bytes:
        """As it goes on: with these headers instead of the guest's. Of upgrades only WebSocket goes on, because in any
        other protocol we would no longer see whom the guest talks to."""
        dropped = {name.lower().encode() for name in replaced}
        if self.upgrade not in (None, "websocket"):
            dropped |= {b"upgrade", b"http2-settings"}
        lines = [f"{self.method} {self.target} HTTP/1.{self.minor_version}\r\n".encode()]
        lines += [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name.lower() not in dropped]
        lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in replaced.items()]
        return b"".join(lines) + b"\r\n"


def parse_head(raw: bytes) -> tuple[Head, int | None]:
    """A request head that ends with its empty line, and the size of the body; None: it comes in chunks."""
    line = _REQUEST_LINE.match(raw)
    if line is None:
        raise BadRequest("this is not an HTTP/1 request")
    method, target, minor = line[1].decode(), line[2].decode(), int(line[3])
    headers: list[tuple[bytes, bytes]] = []
    at = line.end()
    while raw[at : at + 2] != b"\r\n" or at + 2 != len(raw):
        header = _HEADER.match(raw, at)
        if header is None:
            raise BadRequest("a header line is malformed")
        headers.append((header[1], header[2].rstrip(b" \t")))
        at = header.end()
    if method == "CONNECT":
        raise BadRequest("there is no proxy here; connect directly")
    host = _host(headers, target, minor)
    return Head(method, target, host, tuple(headers), minor), _body_size(headers, minor)


def _values(headers: list[tuple[bytes, bytes]], wanted: bytes) -> list[bytes]:
    return [value for name, value in headers if name.lower() == wanted]


def _host(headers: list[tuple[bytes, bytes]], target: str, minor: int) -> str:
    hosts = _values(headers, b"host")
    if len(hosts) != 1:
        raise BadRequest("a request must have one Host header" if minor else "a request must have a Host header")
    found = _HOST.fullmatch(hosts[0].decode("latin-1"))
    if found is None:
        raise BadRequest("the Host header is no host name")
    host = normal(found[1]) or str(address_of(found[1]) or "")
    if not host:
        raise BadRequest("the Host header is no host name")
    if target.startswith("/"):
        return host
    if "://" in target.partition("?")[0]:
        authority = target.partition("://")[2].partition("/")[0].partition("?")[0]
        named = _HOST.fullmatch(authority)
        if named is None or (normal(named[1]) or named[1]) != host:
            raise BadRequest("the address of the request and its Host header differ")
    elif target != "*":
        raise BadRequest("the address of the request is malformed")
    return host


def _body_size(headers: list[tuple[bytes, bytes]], minor: int) -> int | None:
    codings, lengths = _values(headers, b"transfer-encoding"), _values(headers, b"content-length")
    if codings:
        if lengths or len(codings) != 1 or codings[0].lower() != b"chunked" or minor == 0:
            raise BadRequest("the size of the request is ambiguous")
        return None
    if not lengths:
        return 0
    if len(lengths) != 1 or not re.fullmatch(rb"[0-9]{1,18}", lengths[0]):
        raise BadRequest("the size of the request is ambiguous")
    return int(lengths[0])


class Requests:
    """Feed it what the guest sends; it returns what may go on. `check` sees each head, returns the headers to replace,
    and raises what it likes to stop the connection."""

    def __init__(self, check: Callable[[Head], Mapping[str, str]]) -> None:
        self._check = check
        self._buffer = bytearray()
        self._state = self._at_head
        self._left = 0
        self.seen = 0
        #: A WebSocket was asked for: nothing more goes on until the answer is known (`upgraded`).
        self.waiting = False

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes | memoryview) -> bytes:
        self._buffer += data
        passed: list[bytes] = []
        while not self.waiting and (step := self._state()) is not None:
            passed.append(step)
        if len(self._buffer) > MOST_BYTES and not self.waiting:
            raise BadRequest("a request head of more than 32 KiB")
        return b"".join(passed)

    def upgraded(self, accepted: bool) -> bytes:
        """The answer to a request for a WebSocket has come. Returns what waited."""
        self.waiting = False
        if accepted:
            self._state = self._at_anything
        return self.feed(b"")

    def _take(self, count: int) -> bytes:
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    def _at_head(self) -> bytes | None:
        end = self._buffer.find(b"\r\n\r\n", 0, MOST_BYTES)
        if end < 0:
            if len(self._buffer) >= MOST_BYTES:
                raise BadRequest("a request head of more than 32 KiB")
            return None
        head, size = parse_head(self._take(end + 4))
        replaced = self._check(head)
        self.seen += 1
        if head.upgrade == "websocket":
            if size != 0 or self.seen > 1:
                raise BadRequest("a WebSocket needs a connection of its own")
            self.waiting = True
        elif size is None:
            self._state = self._at_chunk
        elif size:
            self._left, self._state = size, self._in_body
        return head.encode(replaced)

    def _in_body(self) -> bytes | None:
        if not self._buffer:
            return None
        part = self._take(self._left)
        self._left -= len(part)
        if not self._left:
            self._state = self._at_head
        return part

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n", 0, 2048)
        if end < 0:
            if len(self._buffer) >= 2048:
                raise BadRequest("a chunk is malformed")
            return None
        return self._take(end + 2)

    def _at_chunk(self) -> bytes | None:
        if (line := self._line()) is None:
            return None
        found = _CHUNK.fullmatch(line)
        if found is None:
            raise BadRequest("a chunk is malformed")
        size = int(found[1], 16)
        self._left, self._state = (size + 2, self._in_chunk) if size else (0, self._at_trailer)
        return b"%x\r\n" % size  # without its extensions

    def _in_chunk(self) -> bytes | None:
        if not self._buffer:
            return None
        part = self._take(max(self._left - 2, 0))
        self._left -= len(part)
        if self._left > 2 or len(self._buffer) < 2:
            return part or None
        if self._take(2) != b"\r\n":
            raise BadRequest("a chunk is malformed")
        self._state = self._at_chunk
        return part + b"\r\n"

    def _at_trailer(self) -> bytes | None:
        line = self._line()
        if line is None:
            return None
        if line != b"\r\n":
            raise BadRequest("trailers are not passed on")
        self._state = self._at_head
        return line

    def _at_anything(self) -> bytes | None:
        return self._take(len(self._buffer)) or None
