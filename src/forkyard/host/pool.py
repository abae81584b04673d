"""Machines and shells made before anybody asks for them.

Owns: parked machines (restored, used once, CPUs stopped) per shape, and warm shells (hypervisors without a machine) per
base RAM. A create takes a parked machine, a fork or a resume a shell; whoever finds none makes its own. Refilled in the
background, within limits: as many machines as lately were asked for, as many shells as lately were wanted at once. A
parked machine has no owner: at hand-over it gets its identity, clock and random numbers like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from forkyard.errors import ForkyardError
from forkyard.host.foundry import Foundry, Origin, Shell
from forkyard.host.machine import Machine
from forkyard.models import Shape

log = structlog.get_logger(__name__)

#: So many were asked for in this time, so many are kept ready.
WINDOW_S = 60.0
#: Creates that wait come first: the pool is refilled when it has been quiet for so long.
QUIET_S = 0.25
#: What a parked machine and a shell cost, for the memory budget.
PARKED_MIB = 100
SHELL_MIB = 24
#: Commands that most first commands resemble: their code is translated when the owner comes. The short one last, and
#: more than once: what is run only after the end of the first is translated by the second.
WARM_UP = ("bash -c true; python3 -c 'import json, subprocess'", "echo $HOME", "true", "true")


class Bursts:
    """How many were wanted at once, lately."""

    def __init__(self) -> None:
        self._bursts: deque[tuple[float, int]] = deque()  # when the last of it came, and how many came

    def note(self) -> None:
        now = time.monotonic()
        together = 0
        if self._bursts and now - self._bursts[-1][0] < QUIET_S:
            _, together = self._bursts.pop()
        self._bursts.append((now, together + 1))

    def largest(self) -> int:
        while self._bursts and self._bursts[0][0] < time.monotonic() - WINDOW_S:
            self._bursts.popleft()
        return max((count for _, count in self._bursts), default=0)


class Pool:
    def __init__(
        self, foundry: Foundry, origin: Callable[[Shape], Awaitable[Origin]], *, size: int, memory_mib: int, shells: int
    ) -> None:
        self._foundry = foundry
        self._origin = origin
        self._size = min(size, memory_mib // PARKED_MIB)
        self._memory_mib = memory_mib
        self._fewest_shells = shells
        self._parked: dict[Shape, list[Machine]] = defaultdict(list)
        self._shells: dict[str, list[Shell]] = defaultdict(list)
        self._bases: dict[str, tuple[Shape, Path]] = {}
        self._bursts: dict[str, Bursts] = defaultdict(Bursts)
        self._demand: dict[Shape, deque[float]] = defaultdict(deque)
        self._last_use = 0.0
        self._wake = asyncio.Event()
        self._refiller: asyncio.Task[None] | None = None

    def start(self, shape: Shape) -> None:
        """Keep at least one machine of this shape ready."""
        if self._size or self._fewest_shells:
            self._demand[shape].append(float("inf"))
            self._refiller = asyncio.create_task(self._refill(), name="refill the pool")

    async def stop(self) -> None:
        if self._refiller is not None:
            self._refiller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refiller
        for machine in [m for machines in self._parked.values() for m in machines]:
            await machine.kill()
            await self._foundry.remove(machine.entry)
        for shell in [s for shells in self._shells.values() for s in shells]:
            await self._foundry.discard(shell)
        self._parked.clear()
        self._shells.clear()

    def take(self, shape: Shape) -> Machine | None:
        self._used()
        self._demand[shape].append(time.monotonic())
        while self._parked[shape]:
            machine = self._parked[shape].pop()
            if machine.alive:
                return machine
        return None

    def take_shell(self, base: str, shape: Shape, ram: Path) -> Shell | None:
        self._used()
        self._bases[base] = (shape, ram)
        self._bursts[base].note()
        return self._shells[base].pop() if self._shells[base] else None

    def forget_base(self, base: str) -> None:
        self._bases.pop(base, None)
        self._bursts.pop(base, None)

    def _used(self) -> None:
        self._last_use = time.monotonic()
        self._wake.set()

    def _target(self, shape: Shape) -> int:
        asked = self._demand[shape]
        while asked and asked[0] < time.monotonic() - WINDOW_S:
            asked.popleft()
        return min(self._size, len(asked))

    def _shell_target(self, base: str) -> int:
        if not self._fewest_shells:
            return 0
        parked = sum(len(machines) for machines in self._parked.values())
        others = sum(len(shells) for other, shells in self._shells.items() if other != base)
        room = (self._memory_mib - parked * PARKED_MIB) // SHELL_MIB - others
        return max(self._fewest_shells, min(self._bursts[base].largest(), room))

    async def _refill(self) -> None:
        while True:
            if await self._make_one():
                continue
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), WINDOW_S)

    async def _make_one(self) -> bool:
        """Whether something was missing. One at a time: those who wait for a machine need the CPU more."""
        while (quiet := time.monotonic() - self._last_use) < QUIET_S:
            await asyncio.sleep(QUIET_S - quiet)
        try:
            for base, (shape, ram) in list(self._bases.items()):
                target = self._shell_target(base)
                if len(self._shells[base]) > target:
                    await self._foundry.discard(self._shells[base].pop())
                    return True
                if len(self._shells[base]) < target and ram.exists():
                    name = f"shell-{secrets.token_hex(6)}"
                    self._shells[base].append(await self._foundry.start_shell(name, shape, base, ram))
                    return True
            for shape in list(self._demand):
                if len(self._parked[shape]) < self._target(shape):
                    origin = await self._origin(shape)
                    name = f"pool-{secrets.token_hex(6)}"
                    self._parked[shape].append(await self._foundry.park(name, shape, origin, WARM_UP))
                    self._bases.setdefault(origin.base, (shape, origin.files.ram))
                    return True
        except ForkyardError as error:
            log.warning("the pool could not be refilled", error=error.message)
            await asyncio.sleep(5)
        return False
