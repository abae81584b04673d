"""Machines and shells made before anybody asks for them.

Owns: parked machines (restored, used once, CPUs stopped) per shape and volumes, and warm shells (hypervisors without a
machine) per base RAM. A create takes a parked machine, a fork or a resume a shell; whoever finds none makes its own. In the
background it is brought to a plan, within one budget of memory: as many machines as lately were asked for, as many shells as
lately were wanted at once; what nobody wants any more is given back. A parked machine has no owner: at hand-over it gets its
identity, clock and random numbers like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from forkyard.errors import ForkyardError
from forkyard.host.foundry import Foundry, Origin, Shell
from forkyard.host.machine import Machine
from forkyard.host.volumes import Places
from forkyard.models import Shape

log = structlog.get_logger(__name__)

#: So many were asked for in this time, so many are kept ready.
WINDOW_S = 60.0
#: Creates that wait come first, and the first commands of new machines: the pool is refilled when nothing was taken from
#: it and nothing made of it was handed over for so long.
QUIET_S = 0.5
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


@dataclass(frozen=True)
class Wish:
    """What a create asks for."""

    shape: Shape
    places: Places = ()  # of its volumes


@dataclass(frozen=True)
class Plan:
    """How many should be ready."""

    machines: dict[Wish, int]
    shells: dict[str, int]


class Pool:
    def __init__(
        self,
        foundry: Foundry,
        origin: Callable[[Wish], Awaitable[Origin | None]],
        *,
        size: int,
        memory_mib: int,
        shells: int,
    ) -> None:
        """What `origin` has nothing for is not kept ready."""
        self._foundry = foundry
        self._origin = origin
        self._size = size
        self._memory_mib = memory_mib
        self._fewest_shells = shells
        self._kept: Wish | None = None
        self._parked: dict[Wish, list[Machine]] = defaultdict(list)
        self._shells: dict[str, list[Shell]] = defaultdict(list)
        self._bases: OrderedDict[str, tuple[Shape, Path]] = OrderedDict()  # used last, last
        self._bursts: dict[str, Bursts] = defaultdict(Bursts)
        self._demand: OrderedDict[Wish, deque[float]] = OrderedDict()  # asked for last, last
        self._parking: tuple[Wish, asyncio.Task[None]] | None = None
        self._last_use = 0.0
        self._wake = asyncio.Event()
        self._refiller: asyncio.Task[None] | None = None

    def start(self, shape: Shape) -> None:
        """Keep at least one machine of this shape ready."""
        self._kept = Wish(shape)
        if self._refiller is None and (self._size or self._fewest_shells):
            self._refiller = asyncio.create_task(self._refill(), name="refill the pool")

    async def stop(self) -> None:
        if self._refiller is not None:
            self._refiller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refiller
        for machine in [m for machines in self._parked.values() for m in machines]:
            await self._end(machine)
        for shell in [s for shells in self._shells.values() for s in shells]:
            await self._foundry.discard(shell)
        self._parked.clear()
        self._shells.clear()

    def take(self, wish: Wish) -> Machine | None:
        self.in_use()
        self.ask_for(wish)
        parked = self._parked[wish]
        found = next((machine for machine in parked if machine.alive), None)
        if found is not None:
            parked.remove(found)
        return found

    def ask_for(self, wish: Wish) -> None:
        self._demand.setdefault(wish, deque()).append(time.monotonic())
        self._demand.move_to_end(wish)
        self._wake.set()

    async def give_up(self, gone: Callable[[Wish], bool]) -> None:
        """Nobody will ask for these any more, nor shall anything of them be left when this returns."""
        for wish in [wish for wish in self._demand if gone(wish)]:
            del self._demand[wish]
        if self._parking is not None and gone(self._parking[0]):
            await _cancelled(self._parking[1])
        for wish in [wish for wish in self._parked if gone(wish)]:
            for machine in self._parked.pop(wish):
                await self._end(machine)

    def take_shell(self, base: str, shape: Shape, ram: Path) -> Shell | None:
        self.in_use()
        self._bases[base] = (shape, ram)
        self._bases.move_to_end(base)
        self._bursts[base].note()
        return self._shells[base].pop() if self._shells[base] else None

    def in_use(self) -> None:
        """Somebody waits for a machine, or has just got one."""
        self._last_use = time.monotonic()
        self._wake.set()

    def plan(self) -> Plan:
        """What was wanted last comes first, as far as the memory reaches; a few shells of each base before machines."""
        room = self._memory_mib
        machines: dict[Wish, int] = {}
        shells: dict[str, int] = {}

        def grant(wanted: int, each_mib: int, most_mib: int) -> int:
            nonlocal room
            count = max(0, min(wanted, min(room, most_mib) // each_mib))
            room -= count * each_mib
            return count

        if self._kept is not None and self._size:
            machines[self._kept] = grant(1, PARKED_MIB, room)
        for base in self._bases_there():
            shells[base] = grant(self._fewest_shells, SHELL_MIB, room // 2)
        for wish in list(reversed(self._demand)):
            have = machines.get(wish, 0)
            machines[wish] = have + grant(min(self._size, self._asked(wish)) - have, PARKED_MIB, room)
        if self._fewest_shells:
            for base in shells:
                shells[base] += grant(self._bursts[base].largest() - shells[base], SHELL_MIB, room)
        return Plan(machines, shells)

    def _bases_there(self) -> list[str]:
        """Whose RAM is still there. Used last, first."""
        for base in [base for base, (_, ram) in self._bases.items() if not ram.exists()]:
            del self._bases[base]
            self._bursts.pop(base, None)
        return list(reversed(self._bases))

    def _asked(self, wish: Wish) -> int:
        """How often, lately."""
        asked = self._demand[wish]
        while asked and asked[0] < time.monotonic() - WINDOW_S:
            asked.popleft()
        if not asked:
            del self._demand[wish]
        return len(asked)

    async def _refill(self) -> None:
        while True:
            self._wake.clear()
            try:
                if await self._change_one():
                    continue
            except ForkyardError as error:
                log.warning("the pool could not be refilled", error=error.message)
                await asyncio.sleep(5)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WINDOW_S):  # `wait_for` may swallow the cancellation by `stop`
                    await self._wake.wait()

    async def _change_one(self) -> bool:
        """Whether there was something to do. One at a time: those who wait for a machine need the CPU more."""
        while (quiet := time.monotonic() - self._last_use) < QUIET_S:
            await asyncio.sleep(QUIET_S - quiet)
        plan = self.plan()
        return await self._give_one_back(plan) or await self._make_one(plan)

    async def _give_one_back(self, plan: Plan) -> bool:
        for base, shells in self._shells.items():
            if len(shells) > plan.shells.get(base, 0):
                await self._foundry.discard(shells.pop())
                return True
        for wish, machines in self._parked.items():
            dead = [machine for machine in machines if not machine.alive]
            surplus = machines[plan.machines.get(wish, 0) :]
            for machine in dead or surplus:
                machines.remove(machine)
                await self._end(machine)
                return True
        return False

    async def _make_one(self, plan: Plan) -> bool:
        for base, wanted in plan.shells.items():
            shape, ram = self._bases[base]
            if len(self._shells[base]) < wanted:
                name = f"shell-{secrets.token_hex(6)}"
                self._shells[base].append(await self._foundry.start_shell(name, shape, base, ram))
                return True
        for wish, wanted in plan.machines.items():
            if len(self._parked[wish]) < wanted and (origin := await self._origin(wish)) is not None:
                await self._park(wish, origin)
                self._bases.setdefault(origin.base, (wish.shape, origin.files.ram))
                return True
        return False

    async def _park(self, wish: Wish, origin: Origin) -> None:
        async def park() -> None:
            name = f"pool-{secrets.token_hex(6)}"
            self._parked[wish].append(await self._foundry.park(name, wish.shape, origin, WARM_UP))

        task = asyncio.create_task(park(), name="park a machine")
        self._parking = wish, task
        try:
            await asyncio.wait({task})
        finally:
            self._parking = None
            await _cancelled(task)
        if not task.cancelled():
            task.result()

    async def _end(self, machine: Machine) -> None:
        await machine.kill()
        await self._foundry.remove(machine.entry)


async def _cancelled(task: asyncio.Task[None]) -> None:
    """It has ended when this returns."""
    task.cancel()
    await asyncio.wait({task})
