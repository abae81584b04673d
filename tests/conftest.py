"""What holds for all tests: each is run, and signals mean what they mean, whoever started the run."""

from __future__ import annotations

import signal
from collections import Counter

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests with one name, only one would be run where several workers share them."""
    twice = [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]
    if twice:
        raise pytest.UsageError(f"tests with the same name: {', '.join(twice[:5])}")


# What a script puts in the background has Ctrl-C ignored, with nohup hang-ups too; and ignoring is inherited, down to
# the programs that the tests interrupt.
for _number, _meaning in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _meaning)
