"""DNS packets: what can be read, what is sent back, and that nothing makes us fail."""

from __future__ import annotations

import dns.flags
import dns.message
import dns.rcode
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.net.dns import Answer, encode, parse

QUERY = dns.message.make_query("www.example.com", "A", use_edns=True).to_wire()


@given(st.binary(max_size=1400))
def test_garbage_is_not_a_question(data: bytes) -> None:
    parse(data)


@given(st.lists(st.tuples(st.integers(0, len(QUERY) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_question_is_read_and_answered_or_dropped(damage: list[tuple[int, int]]) -> None:
    data = bytearray(QUERY)
    for at, value in damage:
        data[at] = value
    query = parse(bytes(data))
    if query is not None:
        assert len(encode(query, Answer(dns.rcode.NXDOMAIN, reason="no"), tcp=False)) <= 1232


@pytest.mark.parametrize("edns", [False, True])
def test_an_answer_fits_its_packet_or_says_that_it_does_not(edns: bool) -> None:
    query = dns.message.make_query("www.example.com", "A", use_edns=edns, payload=1232 if edns else None)
    found = Answer(dns.rcode.NOERROR, tuple(f"1.2.3.{number}" for number in range(60)))
    packet = encode(query, found, tcp=False)
    assert len(packet) <= (1232 if edns else 512)
    answer = dns.message.from_wire(packet)
    assert edns == (not answer.flags & dns.flags.TC)
    assert len(dns.message.from_wire(encode(query, found, tcp=True)).answer[0]) == 60


def test_an_answer_is_not_a_question() -> None:
    answer = dns.message.make_response(dns.message.make_query("www.example.com", "A"))
    assert parse(answer.to_wire()) is None


def test_one_question_at_a_time() -> None:
    query = dns.message.make_query("www.example.com", "A")
    query.question.append(dns.message.make_query("www.example.org", "A").question[0])
    assert parse(query.to_wire()) is None


def test_other_classes_and_operations_are_dropped() -> None:
    assert parse(dns.message.make_query("version.bind", "TXT", "CH").to_wire()) is None
    update = bytearray(QUERY)
    update[2] |= 5 << 3
    assert parse(bytes(update)) is None
