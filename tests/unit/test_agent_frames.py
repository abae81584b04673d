"""Both codecs of the channel: they agree, they find the thread again after any cut, and nothing makes them fail."""

from __future__ import annotations

import secrets
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkyard.guest import frames as host
from forkyard.guest_agent import frames as agent

EPOCH, NONCE = 0xC0FFEE, b"n" * 16
HELLO = host.encode_hello(EPOCH, NONCE, b"{}")
ACK = agent.encode(agent.HELLO_ACK, 0, 0, NONCE + b'{"version":1}', EPOCH)

bodies = st.binary(max_size=300)
some_frames = st.lists(
    st.tuples(st.integers(3, 12), st.integers(0, 255), st.integers(0, 2**32 - 1), bodies), max_size=8
)


def connected_agent() -> agent.Parser:
    parser = agent.Parser()
    assert parser.feed(HELLO) == [(agent.HELLO, 0, 0, HELLO[12:-4])]
    return parser


def connected_host() -> host.Parser:
    parser = host.Parser(EPOCH, NONCE)
    assert [frame.kind for frame in parser.feed(ACK)] == [host.Kind.HELLO_ACK]
    return parser


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    points = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(points)]


def test_both_sides_have_the_same_constants() -> None:
    for name in ("MORE", "BYTES", "STDERR", "LINES", "MAX_BODY", "OVERHEAD", "CHUNK"):
        assert getattr(host, name) == getattr(agent, name)
    for kind in host.Kind:
        assert getattr(agent, kind.name) == kind


@given(st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**32 - 1), bodies, st.integers(1, 2**32 - 1))
def test_both_sides_write_a_frame_the_same_way(kind: int, flags: int, stream: int, body: bytes, epoch: int) -> None:
    assert host.encode(kind, flags, stream, body, epoch) == agent.encode(kind, flags, stream, body, epoch)


@given(some_frames, st.lists(st.integers(0, 3000), max_size=20))
def test_frames_arrive_whole_however_the_bytes_are_cut_into_pieces(
    sent: list[tuple[int, int, int, bytes]], cuts: list[int]
) -> None:
    data = b"".join(agent.encode(*frame, EPOCH) for frame in sent)
    for parser in (connected_agent(), connected_host()):
        got = [tuple(frame) for piece in in_pieces(data, cuts) for frame in parser.feed(piece)]
        assert got == sent


@settings(deadline=None)
@given(some_frames, st.integers(0, 4000), st.booleans())
def test_after_a_cut_at_any_byte_the_agent_takes_the_next_hello_and_nothing_half(
    sent: list[tuple[int, int, int, bytes]], cut: int, flood: bool
) -> None:
    parser = connected_agent()
    data = b"".join(agent.encode(*frame, EPOCH) for frame in sent)[:cut]
    if flood:
        data += agent.encode(agent.DATA, 0, 1, bytes(agent.MAX_BODY), EPOCH)[: cut + 1]
    parser.feed(data)
    hello = host.encode_hello(EPOCH + 1, NONCE, b"{}")
    request = host.encode(host.Kind.REQUEST, 0, 1, b"{}", EPOCH + 1)
    assert parser.feed(host.PREAMBLE + hello + request) == [
        (agent.HELLO, 0, 0, hello[12:-4]),
        (agent.REQUEST, 0, 1, b"{}"),
    ]
    assert parser.epoch == EPOCH + 1
    assert not parser.lost


def test_a_cut_at_each_byte_of_a_session_is_survived() -> None:
    session = b"".join(
        [
            host.encode(host.Kind.REQUEST, 0, 7, b'{"op":"write"}', EPOCH),
            host.encode(host.Kind.DATA, 0, 7, HELLO * 2, EPOCH),  # data that looks like a HELLO
            host.encode(host.Kind.END, 0, 7, b"", EPOCH),
        ]
    )
    for cut in range(len(session) + 1):
        parser = connected_agent()
        parser.feed(session[:cut])
        epoch = secrets.randbelow(2**32 - 1) + 1
        hello = host.encode_hello(epoch, NONCE, b"{}")
        assert parser.feed(host.PREAMBLE + hello)[-1] == (agent.HELLO, 0, 0, hello[12:-4])
        assert parser.epoch == epoch


@given(st.binary(max_size=2000), st.lists(st.integers(0, 2000), max_size=10))
def test_no_bytes_make_the_agents_parser_fail_or_keep_it_from_the_next_hello(junk: bytes, cuts: list[int]) -> None:
    for parser in (agent.Parser(), connected_agent()):
        for piece in in_pieces(junk, cuts):
            parser.feed(piece)
        assert parser.feed(host.PREAMBLE + HELLO)[-1] == (agent.HELLO, 0, 0, HELLO[12:-4])


@given(st.binary(max_size=3000), st.lists(st.integers(0, 3000), max_size=10))
def test_the_host_finds_its_ack_behind_any_leftovers(junk: bytes, cuts: list[int]) -> None:
    parser = host.Parser(EPOCH, NONCE)
    old = agent.encode(agent.HELLO_ACK, 0, 0, b"o" * 16 + b"{}", EPOCH)
    # A HELLO_ACK of another nonce whose end is missing may swallow as much as it claims to have.
    got = [frame for piece in in_pieces(junk + old, cuts) for frame in parser.feed(piece)]
    got += parser.feed(bytes(2000) + ACK)
    assert [(frame.kind, frame.body) for frame in got] == [(host.Kind.HELLO_ACK, b'{"version":1}')]


@given(st.binary(min_size=1, max_size=500))
def test_a_connected_host_gets_frames_or_a_violation_from_any_bytes(junk: bytes) -> None:
    parser = connected_host()
    try:
        got = parser.feed(junk)
    except host.Violation:
        return
    assert got == []


@pytest.mark.parametrize(
    "bad",
    [
        agent.encode(agent.DATA, 0, 1, b"x", EPOCH + 1),
        b"FY\x05\x00\x00\x00\x00\x01\x00\x01\x00\x01" + bytes(70000),
        bytes(16),
        b"XX" + bytes(14),
    ],
    ids=["another epoch", "too long", "padding", "wrong magic"],
)
def test_a_connected_host_ends_the_connection_over(bad: bytes) -> None:
    with pytest.raises(host.Violation):
        connected_host().feed(bad)


def test_a_lost_agent_keeps_no_memory_of_what_it_drops() -> None:
    parser = agent.Parser()
    for _ in range(64):
        assert parser.feed(secrets.token_bytes(65_536)) == []
    assert len(parser._buffer) <= 2048


def test_zero_bytes_between_frames_are_padding_to_the_agent() -> None:
    parser = connected_agent()
    ping = host.encode(host.Kind.REQUEST, 0, 1, b"{}", EPOCH)
    assert len(parser.feed(bytes(5) + ping + host.PREAMBLE + ping)) == 2
    assert not parser.lost
