"""A command in a guest, run to its end, with the end of what it printed.

For what Forkyard itself does in a guest. What comes back is bounded, whatever the guest sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from forkyard.errors import GuestUnreachable, OperationTimeout
from forkyard.guest.base import ExecSpec, Exit, Guest, Output, Stream

TAIL_BYTES = 16 * 1024
#: The guest ends a command at its own deadline; this much later we no longer wait for it to say so.
GRACE_S = 30.0


@dataclass(frozen=True)
class Finished:
    exit_code: int | None
    signal: int | None
    timed_out: bool
    tail: str  # of both streams, as they came

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def why(self, timeout_s: float | None) -> str:
        if self.timed_out:
            return f"was not done within {timeout_s:.0f} s"
        return f"exited with {self.exit_code}" if self.exit_code is not None else f"was ended by signal {self.signal}"


async def run(
    guest: Guest,
    spec: ExecSpec,
    on_output: Callable[[Stream, bytes], None] | None = None,
    *,
    keep_bytes: int = TAIL_BYTES,
) -> Finished:
    """`spec` has a timeout, so that this ends."""
    assert spec.timeout_s is not None
    tail = bytearray()
    try:
        async with asyncio.timeout(spec.timeout_s + GRACE_S), guest.execute(spec) as execution:
            async for item in execution:
                if isinstance(item, Output):
                    tail += item.data
                    del tail[:-keep_bytes]
                    if on_output is not None:
                        on_output(item.stream, item.data)
                elif isinstance(item, Exit):
                    text = tail.decode("utf-8", "replace")
                    return Finished(item.exit_code, item.signal, item.timed_out, text)
    except TimeoutError:
        raise OperationTimeout(f"a command in the machine did not end within {spec.timeout_s:.0f} s") from None
    raise GuestUnreachable("the machine stopped answering in the middle of a command")
