"""What holds for all tests: signals mean what they mean, whoever started the run."""

from __future__ import annotations

import signal

# What a script puts in the background has Ctrl-C ignored, with nohup hang-ups too; and ignoring is inherited, down to
# the programs that the tests interrupt.
for _number, _meaning in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _meaning)
