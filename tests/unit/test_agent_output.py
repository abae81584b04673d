"""What an agent keeps of an exec's output, and what a reader gets of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forkyard.guest_agent.output import Cursor, Output

writes = st.lists(st.tuples(st.integers(0, 1), st.binary(min_size=1, max_size=6000)), max_size=30)


def read_all(output: Output, cursor: Cursor, limit: int = 1000) -> list[bytes]:
    got = [b"", b""]
    while (piece := output.read(cursor, limit)) is not None:
        stream, data = piece
        assert 0 < len(data) <= limit
        got[stream] += data
    return got


@given(writes, st.integers(1, 10_000))
def test_a_reader_from_the_start_gets_every_byte_of_each_stream(written: list[tuple[int, bytes]], limit: int) -> None:
    output = Output()
    cursor, lost = output.cursor(0, 0)
    assert lost == []
    got = [b"", b""]
    for stream, data in written:
        output.add(stream, data)
        output.trim(5000, cursor.position)
        if len(data) % 2:
            for index, more in enumerate(read_all(output, cursor, limit)):
                got[index] += more
    for index, more in enumerate(read_all(output, cursor, limit)):
        got[index] += more
    assert got == [b"".join(data for stream, data in written if stream == wanted) for wanted in (0, 1)]


@given(writes, st.integers(0, 50_000), st.integers(0, 50_000), st.integers(100, 50_000))
def test_a_late_reader_gets_what_is_kept_and_is_told_exactly_what_is_not(
    written: list[tuple[int, bytes]], stdout_offset: int, stderr_offset: int, limit: int
) -> None:
    output = Output()
    whole = [b"", b""]
    for stream, data in written:
        output.add(stream, data)
        output.trim(limit, output.position)
        whole[stream] += data
    wanted = [min(stdout_offset, len(whole[0])), min(stderr_offset, len(whole[1]))]
    cursor, lost = output.cursor(*wanted)
    got = read_all(output, cursor)
    start = list(wanted)
    for stream, offset, count in lost:
        assert offset == wanted[stream]
        start[stream] += count
    assert got == [whole[stream][start[stream] :] for stream in (0, 1)]


@given(writes)
def test_memory_stays_below_the_limit_and_one_piece(written: list[tuple[int, bytes]]) -> None:
    output = Output()
    for stream, data in written:
        output.add(stream, data)
        output.trim(10_000, output.position)
        assert output.size <= 10_000


def test_tiny_alternating_writes_count_for_what_they_cost() -> None:
    output = Output()
    for index in range(10_000):
        output.add(index % 2, b"x")
        output.trim(64_000, output.position)
    assert len(output._pieces) <= 500
