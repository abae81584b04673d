"""Keeps the chains of disks short: every fork, snapshot and resume adds one, and every read goes down through all.

Owns: when a running machine's chain is folded, and how much of it (`storage.disks.fold`). In the background, a while after
the chain grew; only if it grows faster than it is folded does a capture wait.
"""

from __future__ import annotations

import asyncio

import structlog

from forkyard.errors import ForkyardError
from forkyard.host.machine import Machine
from forkyard.storage.disks import Disks

log = structlog.get_logger(__name__)

#: At so many times the length that is wished for, a capture waits.
LONGEST = 2
#: Whoever made the chain longer is not disturbed.
QUIET_S = 2.0


class Chains:
    def __init__(self, disks: Disks, long: int) -> None:
        self._disks = disks
        self._long = long
        self._folding: dict[str, asyncio.Task[None]] = {}

    def look_after(self, machine: Machine) -> None:
        """Fold its chain soon, if it is long."""
        name = machine.entry.vm_id
        if name not in self._folding:
            task = asyncio.create_task(self._later(machine), name=f"fold the disks of {name}")
            self._folding[name] = task
            task.add_done_callback(lambda _: self._folding.pop(name, None))

    async def before_capture(self, machine: Machine) -> None:
        if len(self._disks.layers(machine.vm.disk)) >= LONGEST * self._long:
            await self._fold(machine)

    async def stop(self) -> None:
        tasks = list(self._folding.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _later(self, machine: Machine) -> None:
        await asyncio.sleep(QUIET_S)
        if machine.alive and len(await asyncio.to_thread(self._disks.layers, machine.vm.disk)) > self._long:
            await self._fold(machine)

    async def _fold(self, machine: Machine) -> None:
        """A chain that stays long is slow, and right."""
        base = await asyncio.to_thread(self._disks.fold, machine.vm.disk)
        try:
            await machine.vm.flatten(base)
        except ForkyardError as error:
            log.info("disks not folded", vm=machine.entry.vm_id, error=error.message)
        else:
            left = len(await asyncio.to_thread(self._disks.layers, machine.vm.disk))
            log.info("disks folded", vm=machine.entry.vm_id, layers=left)
