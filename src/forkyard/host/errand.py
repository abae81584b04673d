"""A command that the host itself runs in a guest, for what it prints."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from forkyard.guest.base import ExecSpec, Exit, Guest, Output

log = structlog.get_logger(__name__)

MOST_BYTES = 65536


async def run(guest: Guest, command: str | Sequence[str], timeout_s: float = 120.0) -> str:
    """What it prints is the guest's word, and bounded. Its failure is not ours."""
    out = bytearray()
    async with guest.execute(
        ExecSpec(command if isinstance(command, str) else list(command), cwd="/", timeout_s=timeout_s)
    ) as execution:
        async for item in execution:
            if isinstance(item, Output) and len(out) < MOST_BYTES:
                out += item.data
            elif isinstance(item, Exit) and item.exit_code != 0:
                log.debug("errand failed", command=command, exit_code=item.exit_code)
    return out.decode(errors="replace").strip()
