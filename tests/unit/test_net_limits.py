"""Counting: rates, budgets, on a clock that the test turns."""

from __future__ import annotations

import pytest

from forkyard.net.limits import Allowance, Bucket, Meter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_fills_at_its_rate_and_not_beyond_its_burst() -> None:
    clock = Clock()
    bucket = Bucket(10, 20, clock)
    assert bucket.take(20) and not bucket.take(1)
    clock.now += 0.5
    assert bucket.take(5) and not bucket.take(1)
    clock.now += 1000
    assert bucket.available() == 20


def test_an_overdrawn_bucket_says_how_long_to_wait() -> None:
    clock = Clock()
    bucket = Bucket(10, 20, clock)
    bucket.spend(30)
    assert bucket.wait_s(5) == pytest.approx(1.5)
    clock.now += 1.5
    assert bucket.take(5)


def test_a_meter_without_limits_lets_all_pass() -> None:
    meter = Meter(Clock())
    assert meter.room(1 << 20) == 1 << 20 and not meter.spent() and meter.connect()


def test_a_meter_keeps_a_rate_over_time() -> None:
    clock = Clock()
    meter = Meter(clock)
    meter.limit(Allowance(bytes_per_s=100_000), 0)
    passed = 0
    while clock.now < 110:
        if room := meter.room(65536):
            meter.passed(bytes_in=room)
            passed += room
        else:
            clock.now += meter.wait_s()
    assert 1_000_000 <= passed <= 1_030_000


def test_a_budget_counts_both_ways_and_what_was_spent_before() -> None:
    meter = Meter(Clock())
    meter.limit(Allowance(byte_budget=100), 50)
    meter.passed(bytes_out=20, bytes_in=20)
    assert not meter.spent()
    meter.passed(bytes_in=10)
    assert meter.spent()
    meter.limit(Allowance(byte_budget=1000), 50)
    assert not meter.spent()


def test_saying_the_same_limits_again_does_not_fill_the_bucket() -> None:
    meter = Meter(Clock())
    for _ in range(3):
        meter.limit(Allowance(connections_per_minute=2), 0)
        meter.connect()
    assert not meter.connect()
    assert meter.connections == 2
