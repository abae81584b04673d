"""First bytes: what they say, however they are cut, and that nothing makes us fail."""

from __future__ import annotations

import contextlib
import ssl
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    [b"SSH-2.0-OpenSSH\r\n", b"EHLO me\r\n", b"PING\r\n", b"\0\0\0\x08\x04\xd2\x16\x2f", b"\x80\x2e\x01", b"GET /\r\n"],
)
def test_the_rest_is_opaque(data: bytes) -> None:
    assert sniff(data) == Opaque()


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
