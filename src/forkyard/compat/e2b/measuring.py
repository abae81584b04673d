"""What a sandbox uses, measured inside it."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass

from forkyard.control.plane import ControlPlane
from forkyard.errors import OperationTimeout
from forkyard.guest.base import ExecSpec, Output
from forkyard.models import SandboxInfo

_MEASURE = "head -1 /proc/stat; sleep 0.1; head -1 /proc/stat; cat /proc/meminfo; df -B1 --output=used,size / | tail -1"
_DEADLINE_S = 20.0
_MAX_BYTES = 65_536
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)


@dataclass(frozen=True)
class Measured:
    at: int
    cpu_count: int
    cpu_used_pct: float
    mem_total: int
    mem_used: int
    mem_cache: int
    disk_used: int
    disk_total: int


async def measured(control: ControlPlane, info: SandboxInfo) -> Measured:
    text = await _output(control, info.id)
    lines = text.splitlines()
    busy, total = (
        (later - sooner for sooner, later in zip(*map(_ticks, lines[:2]), strict=True)) if len(lines) > 2 else (0, 0)
    )
    memory = {}
    for line in lines[2:]:
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and words and _NUMBER.fullmatch(words[0]):
            memory[name] = int(words[0]) * 1024
    disk = [int(word) for word in (lines[-1].split() if lines else []) if _NUMBER.fullmatch(word)]
    used, size = disk if len(disk) == 2 else (0, info.shape.disk_gib * 2**30)
    mem_total = memory.get("MemTotal", info.shape.memory_mib * 2**20)
    return Measured(
        at=int(time.time()),
        cpu_count=info.shape.vcpus,
        cpu_used_pct=round(min(max(100 * busy / total, 0.0), 100.0), 2) if total > 0 else 0.0,
        mem_total=mem_total,
        mem_used=max(mem_total - memory.get("MemAvailable", mem_total), 0),
        mem_cache=memory.get("Cached", 0),
        disk_used=used,
        disk_total=size,
    )


def _ticks(line: str) -> tuple[int, int]:
    """Busy, and all."""
    words = [int(word) for word in line.split()[1:] if _NUMBER.fullmatch(word)]
    if len(words) < 4:
        return 0, 0
    return sum(words) - words[3], sum(words)


async def _output(control: ControlPlane, sandbox_id: str) -> str:
    found = bytearray()
    try:
        async with (
            asyncio.timeout(_DEADLINE_S),
            control.sandboxes.use(sandbox_id) as guest,
            guest.execute(ExecSpec(_MEASURE, timeout_s=_DEADLINE_S)) as execution,
        ):
            async for item in execution:
                if isinstance(item, Output) and item.stream == "stdout" and len(found) < _MAX_BYTES:
                    found += item.data
    except TimeoutError:
        raise OperationTimeout(f"sandbox {sandbox_id} was not measured within {_DEADLINE_S:.0f} s") from None
    return found.decode("utf-8", "replace")
