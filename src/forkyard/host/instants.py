"""A machine at one instant, as files that others are restored from: taken now, or saved earlier.

Owns: how a running machine is captured and its disk moved on, and how what was captured gets to disk and back. What was
taken now is there as long as the block lasts; VMs keep what they mapped. Never does: which machine it is of.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from forkyard.faults import reached
from forkyard.host.chains import Chains
from forkyard.host.foundry import Origin
from forkyard.host.intact import Intact
from forkyard.host.journal import Entry, Journal, Phase, with_disks_of
from forkyard.host.machine import Machine
from forkyard.host.templates import Templates
from forkyard.models import Shape
from forkyard.storage.disks import Disks
from forkyard.storage.snapshots import Saved, Snapshots
from forkyard.vmm.base import CaptureTarget, SnapshotFiles


class Instants:
    def __init__(
        self,
        ram_dir: Path,
        journal: Journal,
        disks: Disks,
        chains: Chains,
        snapshots: Snapshots,
        intact: Intact,
        templates: Templates,
    ) -> None:
        self._ram_dir = ram_dir
        self._journal = journal
        self._disks = disks
        self._chains = chains
        self._snapshots = snapshots
        self._intact = intact
        self._templates = templates

    @contextlib.asynccontextmanager
    async def captured(self, machine: Machine, *, seal: bool) -> AsyncIterator[tuple[Origin, float]]:
        """Now, and for how long it had to stand still. `seal`: it goes on with a new disk, on the one that is captured."""
        if seal:
            await self._chains.before_capture(machine)
        name = self._ram_dir / f"capture-{secrets.token_hex(6)}"
        layer, device_state = name.with_suffix(".layer"), name.with_suffix(".state")
        before = machine.entry
        next_disk = self._disks.new_path() if seal else None
        volumes = [replace(one, next_disk=self._disks.new_path() if seal else None) for one in before.volumes]
        next_volumes = {one.slot: one.next_disk for one in volumes if one.next_disk is not None}
        # Told before it is done: whatever becomes of this daemon, both disks are known to be in use.
        machine.entry = self._journal.write(replace(before, next_disk=next_disk, volumes=volumes))
        try:
            try:
                captured = await machine.vm.capture(
                    CaptureTarget(layer, device_state, next_disk, next_volumes),
                    keep_running=before.phase is Phase.RUNNING,
                )
            finally:
                machine.entry = self._journal.write(with_disks_of(machine.vm, machine.entry))
                if next_disk is not None:
                    for path in (next_disk, *next_volumes.values()):
                        self._disks.release(path)
                    self._chains.look_after(machine)
            paused_ms = captured.paused_ms if before.phase is Phase.RUNNING else 0.0
            files = SnapshotFiles(self.ram(before), device_state, captured.disk, layer)
            sealed = tuple(replace(one, disk=captured.volumes[one.slot]) for one in before.volumes)
            connected = before.phase is not Phase.RUNNING or await machine.connected()
            yield Origin(before.base, files, volumes=sealed, connected=connected), paused_ms
        finally:
            layer.unlink(missing_ok=True)
            device_state.unlink(missing_ok=True)

    async def keep(self, machine: Machine) -> Origin:
        """One that stands still, and will not go on, as a template is: nobody's past. Whoever asked removes the files."""
        entry = machine.entry
        name = self._ram_dir / f"kept-{secrets.token_hex(6)}"
        target = CaptureTarget(name.with_suffix(".layer"), name.with_suffix(".state"), None)
        captured = await machine.vm.capture(target, keep_running=False)
        files = SnapshotFiles(self.ram(entry), target.device_state, captured.disk, name.with_suffix(".layer"))
        volumes = tuple(replace(one, disk=captured.volumes[one.slot]) for one in entry.volumes)
        return Origin(entry.base, files, pristine=True, volumes=volumes)

    async def put_away(self, machine: Machine, snapshot_id: str) -> Saved:
        """One that stands still, and will not go on: its memory goes straight to disk. Durable when it returns."""
        entry = machine.entry
        device_state = self._ram_dir / f"capture-{secrets.token_hex(6)}.state"
        writing = await asyncio.to_thread(self._snapshots.begin, snapshot_id)
        try:
            captured = await machine.vm.capture(CaptureTarget(writing, device_state, None), keep_running=False)
            reached("cool.captured")
            volumes = [replace(one, disk=captured.volumes[one.slot]) for one in entry.volumes]
            return await asyncio.to_thread(
                writing.finish, entry.base, entry.shape, device_state, captured.disk, volumes
            )
        finally:
            device_state.unlink(missing_ok=True)
            await asyncio.to_thread(writing.close)

    async def save(self, snapshot_id: str, entry: Entry, origin: Origin) -> Saved:
        files = origin.files
        assert files.layer is not None
        return await asyncio.to_thread(
            self._snapshots.write,
            *(snapshot_id, entry.base, entry.shape, files.layer, files.device_state, files.disk, origin.volumes),
        )

    async def saved(self, snapshot_id: str) -> tuple[Origin, Shape]:
        """A snapshot on disk, as it lies there. Its pages are still being checked; nobody runs on them before that is done."""
        saved, reading = await self._intact.open(snapshot_id)
        ram = await self._templates.ram_of(saved.template, saved.shape)
        device_state, layer = self._snapshots.device_state(snapshot_id), self._snapshots.pages(snapshot_id)
        files = SnapshotFiles(ram, device_state, saved.disk, layer, saved.runs)
        return Origin(saved.template, files, reading, volumes=saved.volumes), saved.shape

    def ram(self, entry: Entry) -> Path:
        """What its memory is a private copy of."""
        return self._ram_dir / f"{entry.base}.ram"
