"""Times that a cron expression names."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkyard.builds.cron import Cron
from forkyard.errors import InvalidRequest


def after(text: str, at: str, zone: str = "UTC") -> str:
    found = Cron.parse(text, zone).after(datetime.fromisoformat(at).replace(tzinfo=UTC))
    return found.strftime("%Y-%m-%d %H:%M")


@pytest.mark.parametrize(
    ("text", "at", "expected"),
    [
        ("* * * * *", "2030-01-01T00:00:00", "2030-01-01 00:01"),
        ("* * * * *", "2030-01-01T00:00:59", "2030-01-01 00:01"),
        ("*/15 * * * *", "2030-01-01T00:44:00", "2030-01-01 00:45"),
        ("5,35 9-17 * * *", "2030-01-01T17:35:00", "2030-01-02 09:05"),
        ("0 0 1 jan *", "2030-01-01T00:00:00", "2031-01-01 00:00"),
        ("0 12 * * mon-fri", "2030-01-04T12:00:00", "2030-01-07 12:00"),  # a Friday
        ("0 0 * * 7", "2030-01-01T00:00:00", "2030-01-06 00:00"),  # a Sunday, as 0
        ("0 0 13 * 5", "2030-01-01T00:00:00", "2030-01-04 00:00"),  # the 13th, or a Friday
        ("0 0 29 2 *", "2030-01-01T00:00:00", "2032-02-29 00:00"),
        ("@hourly", "2030-01-01T10:30:00", "2030-01-01 11:00"),
        ("10/20 * * * *", "2030-01-01T00:31:00", "2030-01-01 00:50"),
    ],
)
def test_the_next_time_is_the_first_that_matches(text: str, at: str, expected: str) -> None:
    assert after(text, at) == expected


def test_hours_are_those_of_the_zone() -> None:
    assert after("0 12 * * *", "2030-01-01T00:00:00", "Europe/Berlin") == "2030-01-01 11:00"
    assert after("0 12 * * *", "2030-07-01T00:00:00", "Europe/Berlin") == "2030-07-01 10:00"


@pytest.mark.parametrize(
    "text",
    ["", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "5-1 * * * *", "x * * * *", "*/0 * * * *"],
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Cron.parse(text)


def test_a_day_that_never_comes_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no time"):
        Cron.parse("0 0 31 2 *").after(datetime(2030, 1, 1, tzinfo=UTC))


@given(st.text(max_size=30), st.text(max_size=10))
def test_no_text_breaks_it(text: str, zone: str) -> None:
    with contextlib.suppress(InvalidRequest):
        Cron.parse(text, zone)


@given(st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)), st.integers(1, 59))
def test_the_next_time_is_later_and_soon(at: datetime, step: int) -> None:
    instant = at.replace(tzinfo=UTC)
    found = Cron.parse(f"*/{step} * * * *").after(instant)
    assert 0 < (found - instant).total_seconds() <= 3600
