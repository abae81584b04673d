"""Output pieces become results: nothing twice, gaps named, memory bounded."""

from __future__ import annotations

import random

import pytest

from forkyard.models import ExecExit
from forkyard.sdk.results import Collector, CommandFailed, ExecResult, Offsets, OutputChunk, TextDecoder


def result_of(collector: Collector, **end: object) -> ExecResult:
    fields = {"exit_code": 0, "duration_ms": 1.5, **end}
    return collector.result("e1", ExecExit.model_validate(fields))


def test_a_replay_after_a_break_delivers_every_byte_exactly_once() -> None:
    text = bytes(range(256)) * 40
    random.seed(7)
    offsets, delivered = Offsets(), b""
    for _ in range(200):
        start = random.randint(0, max(0, len(delivered)))
        piece = text[start : start + random.randint(1, 300)]
        for chunk in offsets.output("stdout", start, piece):
            assert chunk.lost_bytes == 0
            assert chunk.offset == len(delivered)
            delivered += chunk.data
    assert delivered == text[: len(delivered)]
    assert offsets.params() == {"stdout_offset": len(delivered), "stderr_offset": 0}


def test_output_that_starts_later_than_expected_is_preceded_by_a_gap() -> None:
    offsets = Offsets()
    assert offsets.output("stderr", 10, b"late") == [
        OutputChunk("stderr", b"", 0, lost_bytes=10),
        OutputChunk("stderr", b"late", 10),
    ]


def test_a_lost_event_that_ends_before_what_was_delivered_is_no_gap() -> None:
    offsets = Offsets()
    offsets.output("stdout", 0, b"0123456789")
    assert offsets.gap("stdout", 5) == []


def test_the_head_of_each_stream_is_kept_and_the_rest_is_counted_as_truncated() -> None:
    collector = Collector(max_output_bytes=4)
    collector.add(OutputChunk("stdout", b"123456", 0))
    collector.add(OutputChunk("stdout", b"789", 6))
    collector.add(OutputChunk("stderr", b"ab", 0))
    result = result_of(collector)
    assert (result.stdout, result.stderr, result.truncated) == ("1234", "ab", True)


def test_output_of_exactly_the_limit_is_not_truncated() -> None:
    collector = Collector(max_output_bytes=4)
    collector.add(OutputChunk("stdout", b"1234", 0))
    assert result_of(collector).truncated is False


def test_a_gap_marks_the_result_as_truncated() -> None:
    collector = Collector()
    collector.add(OutputChunk("stdout", b"", 0, lost_bytes=5))
    assert result_of(collector).truncated is True


def test_bytes_that_are_no_utf8_are_kept_beside_the_text() -> None:
    collector = Collector()
    collector.add(OutputChunk("stdout", b"a\xff\n", 0))
    result = result_of(collector)
    assert (result.stdout, result.stdout_bytes) == ("a\ufffd\n", b"a\xff\n")


def test_a_character_cut_by_the_end_of_a_chunk_comes_whole_with_the_next() -> None:
    decode = TextDecoder()
    first, second = decode(OutputChunk("stdout", b"gr\xc3", 0)), decode(OutputChunk("stdout", b"\xbc\xc3\x9fe", 3))
    assert (first.text, second.text) == ("gr", "üße")
    assert decode(OutputChunk("stderr", b"x", 0)).text == "x"


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ({"exit_code": 3}, "exit code 3"),
        ({"exit_code": None, "signal": 11}, "signal 11"),
        ({"exit_code": None, "signal": 9, "timed_out": True}, "timeout"),
    ],
)
def test_check_raises_with_how_it_ended_and_the_end_of_its_output(end: dict[str, object], says: str) -> None:
    collector = Collector()
    collector.add(OutputChunk("stderr", b"no such table", 0))
    result = result_of(collector, **end)
    with pytest.raises(CommandFailed, match=says) as caught:
        result.check()
    assert "no such table" in caught.value.message
    assert caught.value.result is result


def test_check_returns_the_result_when_all_is_well() -> None:
    result = result_of(Collector())
    assert result.check() is result
