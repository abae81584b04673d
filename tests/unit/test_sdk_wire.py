"""The HTTP side of the wire."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.errors import (
    DaemonUnreachable,
    ForkyardError,
    GuestDiskFull,
    InternalError,
    OperationTimeout,
)
from forkyard.models import FileInfo
from forkyard.sdk import wire

documents = st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3) | st.none(), max_size=8)


@given(documents, st.lists(st.integers(1, 30), min_size=1, max_size=50))
def test_lines_come_out_whole_however_the_bytes_are_cut(wanted: list[dict[str, str] | None], cuts: list[int]) -> None:
    data = b"".join(b"\n" if item is None else json.dumps(item).encode() + b"\n" for item in wanted)
    lines, found = wire.Lines(), []
    index = 0
    while data:
        size = cuts[index % len(cuts)]
        found += list(lines.feed(data[:size]))
        data, index = data[size:], index + 1
    assert found == wanted


def test_half_a_line_at_the_end_is_not_delivered() -> None:
    lines = wire.Lines()
    assert list(lines.feed(b'{"a":1}\n{"b"')) == [{"a": 1}]


@pytest.mark.parametrize("garbage", [b"<html>\n", b"[1]\n", b"\xff\n"])
def test_a_line_that_is_no_json_object_is_our_own_error(garbage: bytes) -> None:
    with pytest.raises(InternalError, match="no JSON object"):
        list(wire.Lines().feed(garbage))


def test_a_problem_becomes_the_class_it_was_raised_as() -> None:
    body = json.dumps(GuestDiskFull("disk of x is full", path="/a").to_problem()).encode()
    error = wire.error_of(507, body, "here")
    assert type(error) is GuestDiskFull
    assert (error.message, error.details) == ("disk of x is full", {"path": "/a"})


def test_a_code_of_a_newer_daemon_is_still_a_forkyard_error() -> None:
    error = wire.error_of(418, b'{"code":"teapot","detail":"short and stout"}', "here")
    assert type(error) is ForkyardError
    assert error.message == "short and stout"


def test_an_answer_of_something_else_than_a_daemon_says_so() -> None:
    error = wire.error_of(502, b"<html>Bad Gateway</html>", "http://proxy:80")
    assert isinstance(error, InternalError)
    assert "http://proxy:80" in error.message
    assert "502" in error.message


def test_only_a_connection_that_was_never_made_counts_as_never_sent() -> None:
    assert wire.never_sent(httpx.ConnectError("refused"))
    assert not wire.never_sent(httpx.ReadError("reset"))
    assert not wire.never_sent(httpx.RemoteProtocolError("cut"))
    assert isinstance(wire.broken(httpx.ConnectError("refused"), "x"), DaemonUnreachable)
    assert isinstance(wire.broken(httpx.ReadTimeout("slow"), "x"), OperationTimeout)


def test_patience_ends_after_its_limit_and_starts_anew_after_a_success() -> None:
    patience = wire.Patience(0.2)
    pauses = [patience.next_pause_s(), patience.next_pause_s(), patience.next_pause_s()]
    assert pauses == [0.05, 0.1, None]
    patience.reset()
    assert patience.next_pause_s() == 0.05


def test_a_query_leaves_out_what_is_absent_and_keeps_names_that_are_no_utf8() -> None:
    params = {"path": "/a b\udcff", "recursive": True, "length": None, "label": ["a=1", "b=2"], "offset": 0}
    assert wire.path_with_query("/f", params) == "/f?path=%2Fa+b%FF&recursive=true&label=a%3D1&label=b%3D2&offset=0"


def test_an_id_with_a_slash_stays_one_segment_of_the_path() -> None:
    assert wire.segment("../keys") == "..%2Fkeys"


def test_names_of_files_that_are_no_utf8_survive_parsing() -> None:
    fields = {
        "name": "caf\udce9",
        "path": "/root/caf\udce9",
        "type": "file",
        "size": 1,
        "mode": 420,
        "owner": "root",
        "group": "root",
        "modified_at": "2026-01-01T00:00:00Z",
    }
    assert wire.parse(FileInfo, json.dumps(fields).encode()).name == "caf\udce9"


def test_an_answer_that_does_not_fit_its_type_is_our_own_error() -> None:
    with pytest.raises(InternalError, match="version"):
        wire.parse(FileInfo, b'{"name": 1}')
