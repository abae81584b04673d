"""Decides that a sandbox is idle.

Owns: what counts as activity. A call under way or a sign of life (`activity`), or output of a command in the
background, or network traffic above a threshold. These two are found by looking at the byte counters of its execs and
of its door now and then: four times per idle timeout, so that a sandbox never falls asleep sooner than its timeout
after the last output. To look does not wake a sandbox nor keep it awake.
"""

from __future__ import annotations

import asyncio

from forkyard.control.ground import Ground, machine
from forkyard.errors import ForkyardError
from forkyard.store.records import SandboxRecord

LOOKS_PER_TIMEOUT = 4
LOOK_DEADLINE_S = 5.0


class Idle:
    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._produced: dict[str, tuple[float, int]] = {}  # when we looked, bytes of output by then
        self._moved: dict[str, int] = {}  # bytes of traffic by then

    async def is_due(self, record: SandboxRecord) -> bool:
        """Whether a running sandbox should fall asleep now."""
        timeout_s = record.idle_timeout_s
        if timeout_s is None:
            return False
        activity = self._ground.activity
        due = activity.idle_s(record.id) >= timeout_s
        if due or self._looked_s(record.id) >= timeout_s / LOOKS_PER_TIMEOUT:
            await self.look(record)
        return due and activity.idle_s(record.id) >= timeout_s

    async def look(self, record: SandboxRecord) -> None:
        """Output since the last look is a sign of life, and so is much traffic."""
        traffic = self._ground.host.traffic(machine(record))
        moved = traffic.bytes_out + traffic.bytes_in
        if moved - self._moved.get(record.id, moved) > record.activity_threshold_bytes:
            self._ground.activity.touch(record.id)
        self._moved[record.id] = moved
        try:
            async with asyncio.timeout(LOOK_DEADLINE_S):
                execs = await self._ground.host.guest(machine(record)).execs()
        except (ForkyardError, TimeoutError):
            return  # an agent that does not answer is no reason to stay awake
        produced = sum(one.stdout_bytes + one.stderr_bytes for one in execs)
        _, before = self._produced.get(record.id, (0.0, produced))
        if produced != before:
            self._ground.activity.touch(record.id)
        self._produced[record.id] = (self._ground.activity.clock(), produced)

    def _looked_s(self, sandbox_id: str) -> float:
        at, _ = self._produced.get(sandbox_id, (float("-inf"), 0))
        return self._ground.activity.clock() - at

    def keep_only(self, sandbox_ids: set[str]) -> None:
        for counts in (self._produced, self._moved):
            for sandbox_id in counts.keys() - sandbox_ids:
                del counts[sandbox_id]
