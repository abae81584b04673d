"""First bytes: what they say, however they are cut, and that nothing makes us fail."""

from __future__ import annotations

import contextlib
import ssl
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.net.requests import BadRequest, parse_head
from forkyard.net.sniff import Http, Malformed, Opaque, Tls, sniff

REQUEST = b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n"


def hello(name: str | None, alpn: list[str] | None = None) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    if alpn:
        context.set_alpn_protocols(alpn)
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def in_records(data: bytes, size: int) -> bytes:
    """The same handshake in small records."""
    body = data[5:]
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"\x16\x03\x01" + struct.pack("!H", len(part)) + part for part in parts)


HELLO = hello("a.example", ["h2", "http/1.1"])


def test_a_hello_names_its_server() -> None:
    assert sniff(HELLO) == Tls("a.example", ("h2", "http/1.1"))
    assert sniff(hello(None)) == Tls(None)
    assert sniff(hello("A.Example")) == Tls("a.example")


@pytest.mark.parametrize("size", [1, 3, 5, 100])
def test_a_hello_may_be_cut_into_records(size: int) -> None:
    assert sniff(in_records(HELLO, size)) == Tls("a.example", ("h2", "http/1.1"))


@given(st.integers(0, len(HELLO) - 1))
def test_part_of_a_hello_is_too_early_to_tell(cut: int) -> None:
    assert sniff(HELLO[:cut]) is None


@given(st.integers(0, len(REQUEST) - 1))
def test_part_of_a_request_is_too_early_to_tell(cut: int) -> None:
    assert sniff(REQUEST[:cut]) is None


def test_what_follows_does_not_matter() -> None:
    assert sniff(HELLO + b"more") == Tls("a.example", ("h2", "http/1.1"))
    assert sniff(REQUEST + b"more") == Http(REQUEST)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
        b"EHLO me\r\n",
        b"PING\r\n",
        b"*1\r\n$4\r\nPING\r\n",  # Redis
        b"get key\r\n",  # memcached
        b"CONNECT {}\r\n",  # NATS
        b"\0\0\0\x08\x04\xd2\x16\x2f",  # PostgreSQL
        b"\0\0\0\x17\0\x03\0\0user\0postgres\0\0",
        b"\x10\x0c\0\x04MQTT\x04\2\0<\0\0",
        b"\x16\1\0\0\7\0\0\0\0\0\0\0\xdd\7\0\0",  # MongoDB: the length of a message, its number
        b"\x15\1\0\0\2\0\0\0\0\0\0\0\xdd\7\0\0",
        b"AMQP\0\0\x09\x01",
        b"\x80\1\0\1\0\0\0\4ping",  # Thrift
        b"\x0bMSH|^~\\&|A|B",  # HL7
        b"0032git-upload-pack /project.git\0host=a.example\0",
        b"OPTIONS rtsp://a.example/x RTSP/1.0\r\n",
        b"@RSYNCD: 31.0\n",
        b"( 2 ( edit-pipeline ) 21:svn://a.example/trunk\n",
    ],
)
def test_the_rest_is_opaque(data: bytes) -> None:
    assert sniff(data) == Opaque()


@pytest.mark.parametrize(
    "data",
    [
        b"GET /\xc3\xa9 HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"GET /\x01 HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"0GET /\xff HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"GET h\xff HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"GET\xa0/\xa0HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"GET\x1c/ HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"\x0bGET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"\r\n\x0cGET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"\x85\xa0GET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"GET /\r\n",
        b"get\t/x\r\n",
        b"GET /\r\nGET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"GET http://b.example/\r\n",
        b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\nGET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12) + b"GET / HTTP/1.1\r\nHost: b.example\r\n\r\n",
        b"\x15\3\1\0\2\1\x64" + hello("b.example"),  # an alert first, which servers drop
        b"\x15\3\1\0\1\1",
        b"\x16\2\0" + hello("b.example")[3:],  # a version that does not matter to all
        b"\x80\x2e\1\3\1",  # a hello as SSL 2 had it
        b"\x80\x2e\1\0\2",
    ],
)
def test_what_a_lenient_server_would_understand_is_never_opaque_however_it_is_cut(data: bytes) -> None:
    for cut in range(len(data) + 1):
        assert not isinstance(sniff(data[:cut]), Opaque), cut
        if isinstance(sight := sniff(data[:cut]), Http):
            with pytest.raises(BadRequest):
                parse_head(sight.head)
    assert sniff(data) is not None


@pytest.mark.parametrize("first", [b"\0\r\n", b"nothing\r\n"])
def test_a_request_behind_a_line_of_another_kind_is_malformed(first: bytes) -> None:
    assert isinstance(sniff(first + REQUEST), Malformed | Http)
    assert sniff(first) == Opaque()


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\nGET / HTTP/1.1\r\n\r\n",
        b" GET / HTTP/1.1\r\n\r\n",
        b"a" * 9000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 6000,
        b"\x16\x03\x01\0\0",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\0\x04\x02\0\0\0",
        b"\x16\x03\x01\0\x04\x01\xff\xff\xff",
        HELLO[:60] + b"\xff" * (len(HELLO) - 60),
        HELLO.replace(b"a.example", b"127.0.0.1"),
        HELLO.replace(b"a.example", b"a\0example"),
    ],
)
def test_what_only_began_well_is_malformed(data: bytes) -> None:
    assert isinstance(sniff(data), Malformed)


def test_two_server_names_are_one_too_many() -> None:
    extension = struct.pack("!HHHBH", 0, 14, 12, 0, 9) + b"a.example"
    extensions = extension * 2
    body = b"\3\3" + bytes(32) + b"\0" + b"\0\2\x13\x01" + b"\1\0" + struct.pack("!H", len(extensions)) + extensions
    handshake = b"\1" + len(body).to_bytes(3) + body
    assert isinstance(sniff(b"\x16\3\1" + struct.pack("!H", len(handshake)) + handshake), Malformed)


@given(st.binary(max_size=2000))
def test_nothing_makes_it_fail(data: bytes) -> None:
    for start in (b"", b"\x16\x03\x01", b"GET "):
        sniff(start + data)


@given(st.lists(st.tuples(st.integers(0, len(HELLO) - 1), st.integers(0, 255)), max_size=8))
def test_a_damaged_hello_never_makes_it_fail(damage: list[tuple[int, int]]) -> None:
    data = bytearray(HELLO)
    for at, value in damage:
        data[at] = value
    sniff(bytes(data))
