"""Requests on one connection: where each ends, whatever a client tries."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.net.requests import BadRequest, Head, Requests, parse_head


def request(*headers: str, method: str = "GET", target: str = "/", body: bytes = b"", host: str = "a.example") -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode() + body


class Hosts:
    """Remembers whom the requests were to."""

    def __init__(self, replaced: Mapping[str, str] | None = None) -> None:
        self.seen: list[str] = []
        self._replaced = replaced or {}

    def __call__(self, head: Head) -> Mapping[str, str]:
        self.seen.append(f"{head.method} {head.host}")
        return self._replaced


STREAM = (
    request()
    + request("Content-Length: 30", method="POST", body=b"GET / HTTP/1.1\r\nHost: evil\r\n\r\n")
    + request("Transfer-Encoding: chunked", method="PUT", body=b"5;x=y\r\nhello\r\n1\r\n!\r\n0\r\n\r\n")
    + request(host="b.example:8080")
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_bodies_are_not_requests_however_the_stream_is_cut(cuts: list[int]) -> None:
    points = sorted({0, len(STREAM), *cuts})
    hosts = Hosts()
    requests = Requests(hosts)
    passed = b"".join(requests.feed(STREAM[a:b]) for a, b in itertools.pairwise(points))
    assert hosts.seen == ["GET a.example", "POST a.example", "PUT a.example", "GET b.example"]
    assert passed == STREAM.replace(b";x=y", b"")
    assert requests.buffered == 0


def test_headers_are_replaced_whatever_their_case() -> None:
    requests = Requests(Hosts({"Authorization": "Bearer ours"}))
    passed = requests.feed(request("AUTHORIZATION: theirs", "X-Other: kept", "authorization: theirs too"))
    assert passed == request("X-Other: kept", "Authorization: Bearer ours")


def test_an_upgrade_to_anything_but_a_web_socket_is_not_passed_on() -> None:
    passed = Requests(Hosts()).feed(request("Upgrade: h2c", "HTTP2-Settings: x", "Connection: Upgrade"))
    assert b"h2c" not in passed and b"Settings" not in passed


@pytest.mark.parametrize("asked", [("Upgrade: websocket", "Upgrade: h2c"), ("Upgrade: websocket, h2c",)])
def test_of_several_upgrades_none_is_passed_on(asked: tuple[str, ...]) -> None:
    requests = Requests(Hosts())
    passed = requests.feed(request(*asked, "HTTP2-Settings: x", "Connection: Upgrade"))
    assert b"Upgrade:" not in passed and b"Settings" not in passed
    assert not requests.waiting


def test_a_path_may_have_an_address_in_it() -> None:
    hosts = Hosts()
    Requests(hosts).feed(request(target="/web/2020/http://b.example/"))
    assert hosts.seen == ["GET a.example"]


def test_nothing_follows_a_web_socket_until_the_server_agrees() -> None:
    asked = request("Upgrade: websocket", "Connection: Upgrade")
    requests = Requests(Hosts())
    assert requests.feed(asked + b"frames") == asked
    assert requests.waiting and requests.buffered == 6
    assert requests.upgraded(True) == b"frames"
    assert requests.feed(b"\0more\r\n\r\n") == b"\0more\r\n\r\n"


def test_a_refused_web_socket_is_followed_by_requests() -> None:
    requests = Requests(Hosts())
    requests.feed(request("Upgrade: websocket") + b"frames\r\n\r\n")
    with pytest.raises(BadRequest):
        requests.upgraded(False)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: a.example\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"GET / HTTP/1.1 \r\nHost: a.example\r\n\r\n",
        request("Host: b.example"),
        request("host: a.example"),
        request(host="a.example, b.example"),
        request(host="a.example@b.example"),
        request(host="[::1]"),
        request(host="a..example"),
        request("Content-Length: 1", "Content-Length: 1"),
        request("Content-Length: +1"),
        request("Content-Length: 1, 1"),
        request("Content-Length: 0x1"),
        request("Content-Length: 1", "Transfer-Encoding: chunked"),
        request("Transfer-Encoding: gzip, chunked"),
        request("Transfer-Encoding: xchunked"),
        request("Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
        request("Transfer-Encoding : chunked"),
        request("X: y\n Host: b.example"),
        request("X: y\rHost: b.example"),
        request("X: \0"),
        request(target="http://b.example/"),
        request(target="b.example:443", method="CONNECT"),
        request(target="evil.example"),
        request("X" * 40_000 + ": y"),
        request("Transfer-Encoding: chunked", body=b"1\r\nab\r\n0\r\n\r\n"),
        request("Transfer-Encoding: chunked", body=b"-1\r\n"),
        request("Transfer-Encoding: chunked", body=b"1 \r\na\r\n"),
        request("Transfer-Encoding: chunked", body=b"0\r\nHost: b.example\r\n\r\n"),
        request("Transfer-Encoding: chunked", body=b"1" * 3000),
        request() + request("Upgrade: websocket"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        Requests(Hosts()).feed(raw)


@given(st.binary(max_size=500))
def test_nothing_else_makes_it_fail(data: bytes) -> None:
    for start in (b"", request("Transfer-Encoding: chunked"), b"POST / HTTP/1.1\r\nHost: a.example\r\n"):
        requests = Requests(Hosts())
        try:
            requests.feed(start + data)
            requests.feed(b"\r\n\r\n" + data)
        except BadRequest:
            continue


tokens = st.sampled_from(
    [
        *("GET", "POST", " ", "/", "HTTP/1.1", "\r\n", "\r\n\r\n", "Host:", "a.example", "b.example"),
        *("Content-Length:", "Transfer-Encoding:", "chunked", "5", "0", "x", "hello", "\t", ",", "\n", "\r"),
    ]
)


@given(st.lists(tokens, max_size=25).map(lambda parts: "".join(parts).encode()))
def test_what_passes_is_read_by_others_as_we_read_it(data: bytes) -> None:
    """Another parser finds the same requests in what we let through."""
    hosts = Hosts()
    requests = Requests(hosts)
    try:
        passed = requests.feed(b"POST / HTTP/1.1\r\nHost: a.example\r\n" + data)
    except BadRequest:
        passed = b""
    if not passed:  # to the other parser, nothing is the end
        return
    other = h11.Connection(h11.SERVER)
    other.receive_data(passed)
    found = []
    while (event := other.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
        if isinstance(event, h11.Request):
            found.append(f"{event.method.decode()} {dict(event.headers)[b'host'].decode()}")
        elif isinstance(event, h11.EndOfMessage):
            other.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
            other.send(h11.EndOfMessage())
            if other.our_state is h11.MUST_CLOSE:
                break
            other.start_next_cycle()
    assert found == hosts.seen


def test_a_head_says_how_long_its_body_is() -> None:
    assert parse_head(request("Content-Length: 7"))[1] == 7
    assert parse_head(request("Transfer-Encoding: Chunked"))[1] is None
    assert parse_head(request())[1] == 0
