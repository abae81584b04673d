"""The list of calls, and what they share."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

Check = Callable[["Yard"], None]
#: In the order they run. Name, oldest version that has it, what is checked.
CALLS: list[tuple[str, str, Check]] = []


def call(name: str, since: str = "2.7") -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        assert name not in [known for known, _, _ in CALLS]
        CALLS.append((name, since, check))
        return check

    return add


class Yard:
    """What the calls share: one sandbox, and a directory in it."""

    def __init__(self) -> None:
        import e2b

        self.e2b = e2b
        self.dir = os.environ["COMPAT_DIR"]
        #: A shell of a login reads what the owner of this machine has in their home: not that of a test.
        self.envs = {} if "COMPAT_VM" in os.environ else {"HOME": self.dir}
        self.metadata = {"purpose": "test & more", "run": str(time.time_ns())}
        self.template = ""  # one that was built
        self.sbx: Any = None
        self.volume: Any = None
        self.loop = asyncio.new_event_loop()  # one: the package keeps connections

    def path(self, name: str) -> str:
        return f"{self.dir}/{name}"


def expect(kind: type[BaseException], work: Callable[[], object], text: str = "") -> BaseException:
    try:
        work()
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error!s}"
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)
