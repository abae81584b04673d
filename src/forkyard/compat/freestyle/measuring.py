"""What a VM uses, as it says itself."""

from __future__ import annotations

import re
from typing import Any

from forkyard.control.commands import run
from forkyard.control.plane import ControlPlane
from forkyard.guest.base import ExecSpec
from forkyard.models import SandboxInfo

_MEASURE = "head -1 /proc/stat; sleep 0.05; head -1 /proc/stat; grep -E '^(MemTotal|MemAvailable):' /proc/meminfo"
_DEADLINE_S = 20.0
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)


async def measured(control: ControlPlane, info: SandboxInfo) -> dict[str, Any]:
    async with control.sandboxes.use(info.id) as guest:
        text = (await run(guest, ExecSpec(_MEASURE, timeout_s=_DEADLINE_S, label="stats"))).tail
    lines = [line.split() for line in text.splitlines()]
    ticks = [[int(word) for word in line[1:] if _NUMBER.fullmatch(word)] for line in lines if line[:1] == ["cpu"]]
    memory = {line[0]: int(line[1]) * 1024 for line in lines if len(line) > 1 and _NUMBER.fullmatch(line[1])}
    total = memory.get("MemTotal:", info.shape.memory_mib * 2**20)
    return {
        "cpuPercent": _busy_percent(ticks),
        "memoryTotalBytes": total,
        "memoryUsedBytes": max(total - memory.get("MemAvailable:", total), 0),
    }


def _busy_percent(ticks: list[list[int]]) -> float:
    if len(ticks) != 2 or any(len(one) < 4 for one in ticks):
        return 0.0
    passed = sum(ticks[1]) - sum(ticks[0])
    idle = ticks[1][3] - ticks[0][3]
    return round(min(max(100 * (passed - idle) / passed, 0.0), 100.0), 2) if passed > 0 else 0.0
