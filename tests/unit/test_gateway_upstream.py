"""What a guest sends instead of an answer, and what clients put into headers: bounded, and never an exception."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.errors import BadAnswer, OperationTimeout
from forkyard.gateway import access, headers, pages
from forkyard.gateway.headers import Visit
from forkyard.gateway.names import Target
from forkyard.gateway.upstream import MAX_HEAD_BYTES, WINDOW_BYTES, Connection, Hangup, Pool

pytestmark = pytest.mark.anyio
GOOD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"


class Wire:
    """A transport that goes nowhere."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.closed = False
        self.paused = False
        self.written = b""
        connection.connection_made(self)  # type: ignore[arg-type]

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            self._connection.connection_lost(None)

    close = abort

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


async def outcome(pieces: list[bytes], *, head_only: bool = False) -> str:
    """What comes of an answer in these pieces, after which the connection is closed."""
    connection = Connection()
    wire = Wire(connection)
    connection.start(b"GET / HTTP/1.1\r\n\r\n", head_only=head_only, timeout_s=1)
    for piece in pieces:
        if not wire.closed:
            connection.data_received(piece)
    if not wire.closed:
        connection.eof_received()
        connection.connection_lost(None)
    try:
        head = await connection.head()
        body, more = b"", True
        while more:
            piece, more = await connection.body()
            body += piece
        return f"{head.status} {body!r}"
    except (BadAnswer, Hangup) as error:
        return type(error).__name__


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(st.integers(0, 10**6), max_size=20))
def test_an_answer_is_the_same_however_it_is_cut(places: list[int]) -> None:
    assert asyncio.run(outcome(cut(GOOD, places))) == "200 b'hello'"


@given(st.binary(max_size=400), st.lists(st.integers(0, 10**6), max_size=5), st.booleans())
def test_garbage_is_no_answer(data: bytes, places: list[int], head_only: bool) -> None:
    asyncio.run(outcome(cut(data, places), head_only=head_only))


@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=8), st.booleans())
def test_a_spoiled_answer_is_an_answer_or_none(place: int, spoil: bytes, head_only: bool) -> None:
    asyncio.run(outcome([GOOD[:place] + spoil + GOOD[place + len(spoil) :]], head_only=head_only))


async def test_a_head_without_end_is_given_up() -> None:
    endless = [b"HTTP/1.1 200 OK\r\nX: "] + [b"a" * 65536] * (MAX_HEAD_BYTES // 65536 + 3)
    assert await outcome(endless) == "BadAnswer"


async def test_half_an_answer_is_none() -> None:
    assert await outcome([b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"]) == "Hangup"
    assert await outcome([b"HTTP/1.1 200 OK\r\nTransfer-Enc"]) == "Hangup"
    assert await outcome([b"HTTP/1.1 200 OK\r\n\r\nto the end"]) == "200 b'to the end'"


async def test_a_server_that_never_answers_is_given_up() -> None:
    connection = Connection()
    Wire(connection)
    connection.start(b"", head_only=False, timeout_s=0.01)
    with pytest.raises(OperationTimeout):
        await connection.head()


async def test_a_body_that_nobody_reads_stops_the_server() -> None:
    connection = Connection()
    wire = Wire(connection)
    connection.start(b"", head_only=False, timeout_s=1)
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (WINDOW_BYTES + 1))
    assert wire.paused
    await connection.body()
    assert not wire.paused


async def test_what_comes_unasked_ends_the_connection() -> None:
    connection = Connection()
    wire = Wire(connection)
    connection.start(b"", head_only=False, timeout_s=1)
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert connection.reusable
    pool = Pool()
    pool.take("s", 1, 80)
    pool.give("s", 1, 80, connection)
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\nforged")
    assert wire.closed
    assert pool.take("s", 1, 80) is None


def visit(**given: Any) -> Visit:
    defaults: dict[str, Any] = {
        "target": Target("a" * 20, 3000),
        "method": "GET",
        "path": b"/",
        "query": b"",
        "host": b"h",
        "headers": [],
        "client": "127.0.0.1",
        "secure": False,
    }
    return Visit(**{**defaults, **given})


NAMES = st.one_of(
    st.sampled_from([b"cookie", b"set-cookie", b"connection", b"location", b"origin", b"host", b"authorization"]),
    st.binary(max_size=20).map(bytes.lower),
)
HEADERS = st.lists(st.tuples(NAMES, st.binary(max_size=60)), max_size=8)


@given(HEADERS, st.binary(max_size=60), st.sampled_from([b"", b"/s/x/1"]))
def test_no_header_is_too_strange(sent: list[tuple[bytes, bytes]], query: bytes, prefix: bytes) -> None:
    seen = visit(headers=sent, query=query, prefix=prefix)
    to_guest = headers.for_guest(seen)
    assert [value for name, value in to_guest if name == b"x-forwarded-host"] == [b"h"]
    headers.for_client(seen, 200, sent)
    access.has_token(seen, "fyp_x")
    _, rest = access.split_link(query)
    assert not any(part.startswith(b"forkyard_link=") for part in rest.split(b"&"))


@given(st.text(max_size=200))
def test_no_message_is_markup(message: str) -> None:
    _, _, body = pages.answer(BadAnswer(message + "<script>`&"), html=True)
    assert b"<script>" not in body
