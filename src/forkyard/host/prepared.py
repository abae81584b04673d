"""Machines with volumes mounted in them, captured before anybody asks: a create that wants the same volumes again is a
restore, and nobody waits for a mount.

Owns: what was captured so (memory on tmpfs, disks among all others), of which versions, and for how long. Such a machine
never had an owner: one made from it gets identity, clock and random numbers as from a template, and overlays of its own over
disks that nobody writes, as from a snapshot. Nothing of it outlives the daemon. Never does: a version that is no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from forkyard.errors import ForkyardError
from forkyard.host.foundry import Foundry, Origin
from forkyard.host.instants import Instants
from forkyard.host.machine import Machine
from forkyard.host.volumes import HostVolumes, Places
from forkyard.hosts.base import Mount
from forkyard.models import Shape
from forkyard.storage.disks import seal
from forkyard.storage.volumes import Volumes, disks_of

log = structlog.get_logger(__name__)

#: So many are kept, those used last; each is some megabytes of memory.
MOST = 8
#: So many wishes are remembered. What somebody has a copy of others will want as well. All else must be wished for a second
#: time: a volume that one sandbox after another writes to has a new version each time.
REMEMBERED = 64
#: Whoever wished for it is served first.
AFTER_S = 0.3

#: What a machine is restored from, and what is mounted in it.
Key = tuple[str, Places]


class Prepared:
    def __init__(
        self,
        foundry: Foundry,
        instants: Instants,
        volumes: HostVolumes,
        stored: Volumes,
        on_ready: Callable[[Shape, Places], None],
    ) -> None:
        self._foundry = foundry
        self._instants = instants
        self._volumes = volumes
        self._stored = stored
        self._on_ready = on_ready
        self._there: OrderedDict[Key, Origin] = OrderedDict()
        self._wishes: OrderedDict[Key, None] = OrderedDict()
        self._making: dict[Key, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()  # it is work for processors alone

    def wish(self, shape: Shape, template: Origin, mounts: Sequence[Mount]) -> Origin | None:
        """What a create with these volumes is best restored from. What is not there may be, the next time."""
        if not mounts:
            return None
        key = template.base, self._volumes.places(mounts)
        found = self.find(*key)
        if found is not None:
            return found
        worth_it = key in self._wishes or all(mount.mode == "cow" for mount in mounts)
        if worth_it and key not in self._making and len(self._making) < MOST:
            task = asyncio.create_task(self._prepare(key, shape, template, mounts), name="prepare volumes")
            self._making[key] = task
            task.add_done_callback(lambda _: self._making.pop(key))
        self._wishes[key] = None
        self._wishes.move_to_end(key)
        while len(self._wishes) > REMEMBERED:
            self._wishes.popitem(last=False)
        return None

    def find(self, base: str, places: Places) -> Origin | None:
        key = base, places
        if key in self._there:
            self._there.move_to_end(key)
        return self._there.get(key)

    def forget(self, origin: Origin) -> None:
        """It is of no use after all."""
        for key in [key for key, other in self._there.items() if other is origin]:
            self._drop(key)

    async def prune(self) -> None:
        """What belongs to versions that are no more is given up, also while it is being made."""
        await self._give_up([key for key in (*self._there, *self._making) if self.gone(key[1])])

    def gone(self, places: Places) -> bool:
        versions = set(self._stored.disks())
        return any(disk not in versions for _, disk, _ in places)

    def disks(self) -> list[Path]:
        there = list(self._there.values())
        return [disk for origin in there for disk in (origin.files.disk, *disks_of(origin.volumes))]

    async def stop(self) -> None:
        await self._give_up([*self._there, *self._making])

    async def _give_up(self, keys: Sequence[Key]) -> None:
        tasks = [self._making[key] for key in keys if key in self._making]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for key in keys:
            if key in self._there:
                self._drop(key)

    async def _prepare(self, key: Key, shape: Shape, template: Origin, mounts: Sequence[Mount]) -> None:
        await asyncio.sleep(AFTER_S)
        # Nobody has it read-write: what a copy sees and what a writer sees is the same.
        copies = [replace(mount, mode="ro" if mount.mode == "ro" else "cow") for mount in mounts]
        name = f"volumes-{secrets.token_hex(6)}"
        try:
            async with self._one_at_a_time, contextlib.AsyncExitStack() as undo:
                machine = await self._foundry.park(name, shape, template, (), self._volumes.wanted(copies))
                undo.push_async_callback(self._foundry.remove, machine.entry)
                self._there[key] = await self._captured(machine)
            self._on_ready(shape, key[1])
        except ForkyardError as error:  # who wants them mounts them, and is told what is wrong
            log.info("volumes not prepared", error=error.message)
            self._wishes.pop(key, None)
        while len(self._there) > MOST:
            self._drop(next(iter(self._there)))

    async def _captured(self, machine: Machine) -> Origin:
        """Its process has ended when this returns: disks that it has open are nobody else's."""
        try:
            origin = await self._instants.keep(machine)
        finally:
            await machine.kill()
        seal(origin.files.disk)
        self._volumes.seal(machine.entry)
        return origin

    def _drop(self, key: Key) -> None:
        files = self._there.pop(key).files
        files.device_state.unlink(missing_ok=True)
        if files.layer is not None:
            files.layer.unlink(missing_ok=True)
