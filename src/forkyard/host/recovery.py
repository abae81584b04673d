"""After a start: what an earlier daemon left, taken over or put away.

Owns: what becomes of each entry of the journal. A machine that still runs is adopted; one that sleeps or was shut down
rests; one that was never somebody's is removed. Never does: deciding what should run (`control.reconciler`).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace

import structlog

from forkyard.host.foundry import Foundry
from forkyard.host.journal import Entry, Journal, Phase, host_boot_id, settled_disk, with_disks_of
from forkyard.host.machine import Machine
from forkyard.hosts.base import Incarnation, Recovered
from forkyard.storage.disks import seal
from forkyard.vmm.base import Driver

log = structlog.get_logger(__name__)


@dataclass
class Found:
    rebooted: bool = False  # the host, since the earlier daemon
    machines: dict[Incarnation, Machine] = field(default_factory=dict)
    resting: dict[Incarnation, Entry] = field(default_factory=dict)

    def told(self) -> Recovered:
        by_phase = {phase: {i for i, e in self.resting.items() if e.phase is phase} for phase in Phase}
        paused = {i for i, machine in self.machines.items() if machine.entry.phase is Phase.PAUSED}
        return Recovered(
            adopted=frozenset(self.machines) - paused,
            paused=frozenset(paused | by_phase[Phase.COLD]),
            stopped=frozenset(by_phase[Phase.STOPPED]),
            dead=frozenset(by_phase[Phase.RUNNING]),
            rebooted=self.rebooted,
        )


async def recover(journal: Journal, driver: Driver, foundry: Foundry) -> Found:
    boot_id = host_boot_id()
    entries = await asyncio.to_thread(journal.load)
    found = Found(rebooted=bool(entries) and all(entry.boot_id != boot_id for entry in entries))

    async def one(entry: Entry) -> None:
        owner = entry.owner
        if owner is None or entry.phase is Phase.STARTING:
            log.info("half-made vm removed", vm=entry.vm_id)
            await foundry.remove(entry)
            return
        same_boot = entry.boot_id == boot_id
        machine = await _adopted(entry, journal, driver, foundry) if same_boot else None
        if machine is not None:
            found.machines[owner] = machine
            return
        await driver.reclaim(journal.record(entry))
        if entry.phase is Phase.COLD:
            for disk in (entry.disk, *(mounted.disk for mounted in entry.volumes)):
                with contextlib.suppress(FileNotFoundError):  # a disk that is gone is reported when it is wanted
                    seal(disk)
        found.resting[owner] = journal.write(_at_rest(settled_disk(entry), same_boot=same_boot))

    await asyncio.gather(*(one(entry) for entry in entries))
    return found


async def _adopted(entry: Entry, journal: Journal, driver: Driver, foundry: Foundry) -> Machine | None:
    if entry.phase not in (Phase.RUNNING, Phase.PAUSED):
        return None
    vm = await driver.adopt(journal.record(entry))
    if vm is None:
        return None
    running = entry.phase is Phase.RUNNING
    if running:
        await vm.cont()  # its daemon may have died in the short pause of a capture
    machine = foundry.adopted(journal.write(with_disks_of(vm, entry)), vm, awake=running)
    log.info("vm adopted", vm=entry.vm_id, pid=vm.pid, phase=entry.phase)
    return machine


def _at_rest(entry: Entry, *, same_boot: bool) -> Entry:
    if not same_boot and entry.phase is not Phase.COLD:
        return replace(entry, phase=Phase.STOPPED)  # its memory went with the host, its disk did not
    if entry.phase is Phase.PAUSED:
        return replace(entry, phase=Phase.RUNNING)  # it died in its sleep
    return entry
