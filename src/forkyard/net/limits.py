"""How much one machine may send and receive. Counting only: no clocks of its own, no sockets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]


class Bucket:
    """Lets `rate` units pass per second, and a burst of `burst` after a pause. It may be overdrawn once."""

    def __init__(self, rate: float, burst: float, clock: Clock = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._level = burst
        self._at = clock()

    def available(self) -> float:
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        return self._level

    def spend(self, units: float) -> None:
        self._level -= units

    def take(self, units: float = 1.0) -> bool:
        """Spend if there is enough."""
        if self.available() < units:
            return False
        self._level -= units
        return True

    def wait_s(self, units: float) -> float:
        """How long until `units` are available."""
        return max(0.0, (units - self.available()) / self._rate)


@dataclass(frozen=True)
class Allowance:
    """The limits of one policy, as its preset completes them. None: no limit."""

    bytes_per_s: int | None = None
    connections_per_minute: int | None = None
    byte_budget: int | None = None


class Meter:
    """Counts what passes one door, against its allowance. The counts outlive a change of the allowance."""

    #: Less than this is not worth a wake-up.
    QUANTUM_BYTES = 4096

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self.bytes_out = 0
        self.bytes_in = 0
        self.connections = 0
        self.denied = 0
        self._spent_before = 0
        self._allowance = Allowance()
        self._rate: Bucket | None = None
        self._connects: Bucket | None = None

    def limit(self, allowance: Allowance, spent_before_bytes: int) -> None:
        self._spent_before = spent_before_bytes
        if allowance == self._allowance:
            return  # a bucket that is empty stays so
        self._allowance = allowance
        if (rate := allowance.bytes_per_s) is not None:
            self._rate = Bucket(rate, max(rate / 4, self.QUANTUM_BYTES), self._clock)
        else:
            self._rate = None
        if (connects := allowance.connections_per_minute) is not None:
            self._connects = Bucket(connects / 60, connects, self._clock)
        else:
            self._connects = None

    def connect(self) -> bool:
        """Counts a connection; False if there were too many in the last minute."""
        if self._connects is not None and not self._connects.take():
            return False
        self.connections += 1
        return True

    def spent(self) -> bool:
        """Whether the byte budget is used up."""
        budget = self._allowance.byte_budget
        return budget is not None and self._spent_before + self.bytes_out + self.bytes_in >= budget

    def room(self, wanted: int) -> int:
        """How many bytes may pass now, at most `wanted`. 0: ask again after `wait_s`."""
        if self._rate is None:
            return wanted
        room = int(self._rate.available())
        return 0 if room < self.QUANTUM_BYTES else min(wanted, room)

    def wait_s(self) -> float:
        return 0.0 if self._rate is None else self._rate.wait_s(self.QUANTUM_BYTES) + 0.001

    def passed(self, *, bytes_out: int = 0, bytes_in: int = 0) -> None:
        self.bytes_out += bytes_out
        self.bytes_in += bytes_in
        if self._rate is not None:
            self._rate.spend(bytes_out + bytes_in)
