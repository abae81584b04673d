"""A snapshot of a VM that runs: its RAM, device state and disk at one instant.

Owns: the order of steps, and undoing them. RAM is copied while the VM runs, and again what it wrote meanwhile, until little
is left; then the VM stands still for the rest:

    stop ── device state begins ── rest of RAM ── device state ends ── disk sealed ── cont

QEMU's main loop can change RAM and devices even while the CPUs are stopped (bytes that arrive for the agent, for one). So
its device state goes through a pipe that holds less than the state is long: QEMU stands still in the middle of
writing it until the rest of RAM has been copied, and both are of one instant.
Never does: syncing to the host's disk in the pause, beyond the flush QEMU does itself, which is made cheap beforehand.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkyard.errors import ForkyardError, SnapshotFailed, VmCrashed
from forkyard.faults import reached
from forkyard.vmm.base import Captured, CaptureTarget, PageSink, VmRecord
from forkyard.vmm.qemu.disks import Top
from forkyard.vmm.qemu.finishing import in_thread, to_the_end
from forkyard.vmm.qemu.pages import PAGE, LayerFile, PageTable, RamReader, Run, merge, ram_of, total
from forkyard.vmm.qemu.qmp import Qmp
from forkyard.vmm.qemu.sealing import Sealing
from forkyard.vmm.qemu.shim import Range, watch

#: So much may be left for the pause: copying it takes about a millisecond.
REST_BYTES = 2 << 20
#: A guest that writes faster than we copy is not waited for for ever.
ROUNDS = 8
#: Unchanged pages between changed ones are saved too if they are few: each run costs a mapping in every child.
GAP_BYTES = 4 * PAGE
PAUSE_TIMEOUT_S = 30.0
#: Of one that stood still already all memory is copied in the pause, perhaps to a slow disk.
SLOWEST_BYTES_PER_S = 20 << 20
#: Of the 160 KB of device state of the smallest machine. It must block, or nothing holds QEMU.
_PIPE_BYTES = 1 << 16


class Copier:
    """Copies a VM's RAM, first `ahead` while it runs, then the `rest` while it stands still. Blocking.

    `live` means that the kernel notes which pages are written. Without that, all is copied again in the pause; having been
    copied ahead still helps, because the layer's own pages are there. If nothing is copied ahead, the rest is all.
    """

    def __init__(self, pid: int, memory_bytes: int, target: Path | PageSink, shim: Path, *, live: bool) -> None:
        with contextlib.ExitStack() as opened:
            self._ram = ram_of(pid, memory_bytes)
            self._table = opened.enter_context(PageTable(pid))
            sink = opened.enter_context(LayerFile(target, memory_bytes)) if isinstance(target, Path) else target
            self._reader = RamReader(pid, self._ram, sink)
            self._live, self._shim, self._watching = live, shim, False
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def ahead(self, disks: Sequence[Path]) -> None:
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(disk.open("rb")) for disk in disks]
            if self._live and watch(self._shim, Range(self._ram.address, self._ram.size_bytes)) is None:
                self._watching = True
                self._table.written(self._ram.run, ask_again=True)  # from now on
            left = self._all()
            for _ in range(ROUNDS):
                self._reader.save(left)
                for file in files:
                    os.fdatasync(file.fileno())  # else QEMU does, in the pause
                if not self._watching:
                    return
                left = merge(self._table.written(self._ram.run, ask_again=True), GAP_BYTES)
                if total(left) <= REST_BYTES:
                    break
            self._reader.save(left)

    def rest(self) -> None:
        if self._watching:
            self._reader.save(self._table.written(self._ram.run, ask_again=False))
        else:
            self._reader.save(self._all())

    def _all(self) -> list[Run]:
        private = self._table.private if self._live else self._table.private_slowly
        return merge([*self._ram.layered, *private(self._ram.run)], GAP_BYTES)


@dataclass
class Capture:
    """One capture of one VM. `top` is the disk in use, at any time, and `volumes` those of the slots."""

    qmp: Qmp
    record: VmRecord
    pid: int
    shim: Path
    top: Top
    volumes: Mapping[int, Top]
    target: CaptureTarget
    live: bool

    async def run(self, *, was_running: bool, keep_running: bool) -> Captured:
        disk, target = self.top.path, self.target
        memory_bytes = self.record.shape.memory_mib << 20
        volumes = {slot: top.path for slot, top in self.volumes.items()}
        for path in (target.layer, target.device_state, target.next_disk, *target.next_volumes.values()):
            if isinstance(path, Path) and path.exists():
                raise SnapshotFailed(f"{path} is in the way of a capture; captures never overwrite")
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as opened:
            if isinstance(target.layer, Path):
                undo.callback(target.layer.unlink, missing_ok=True)
            undo.callback(target.device_state.unlink, missing_ok=True)
            # A thread of its own: in the pause, nobody must wait for one to become free.
            thread = opened.enter_context(ThreadPoolExecutor(1, "capture"))

            def open_files() -> tuple[int, Copier]:
                state = _new_file(target.device_state)
                opened.callback(os.close, state)
                copier = Copier(self.pid, memory_bytes, target.layer, self.shim, live=self.live)
                opened.callback(copier.close)
                return state, copier

            state, copier = await in_thread(open_files, thread)
            # One that stands still already is read once.
            ahead = (lambda: copier.ahead([disk, *volumes.values()])) if was_running else (lambda: None)
            copying = asyncio.create_task(in_thread(ahead, thread))
            try:
                sealing = self._sealing()
                async with sealing.prepared():
                    await copying
                    reached("capture.copied")
                    pausing = self._pause(thread, copier, state, sealing, was_running, keep_running)
                    paused_ms = await to_the_end(pausing)
            finally:
                await asyncio.gather(copying, return_exceptions=True)
            undo.pop_all()
        return Captured(paused_ms if was_running else 0.0, disk, volumes)

    def _sealing(self) -> Sealing:
        """What is to be sealed, and what the VM writes to then."""
        paths = {self.volumes[slot]: path for slot, path in self.target.next_volumes.items()}
        if self.target.next_disk is not None:
            paths[self.top] = self.target.next_disk
        return Sealing(self.qmp, self.record, list(paths), list(paths.values()))

    async def _pause(
        self,
        thread: Executor,
        copier: Copier,
        state: int,
        sealing: Sealing,
        was_running: bool,
        keep_running: bool,
    ) -> float:
        with contextlib.closing(_StatePipe(self.record)) as pipe:
            finishing = asyncio.get_running_loop().run_in_executor(thread, _finish, pipe, copier, state)
            started = time.perf_counter()
            # Each batch is sent in one go: a round trip per command is what costs.
            # Not live: that would also give up the disk, which is sealed next.
            timeout_s = PAUSE_TIMEOUT_S
            if not was_running:
                timeout_s += (self.record.shape.memory_mib << 20) / SLOWEST_BYTES_PER_S
            save = {"filename": str(pipe.path), "live": False, "timeout_s": timeout_s}
            stopping = asyncio.gather(
                self._execute("stop"),
                self._execute("xen-save-devices-state", **save),
                self._execute("query-status", timeout_s=timeout_s),
                return_exceptions=True,
            )
            stopping.add_done_callback(pipe.let_go)
            finishing.add_done_callback(pipe.let_go)
            outcomes: list[Any] = [*await asyncio.gather(finishing, return_exceptions=True), *await stopping]
        try:
            # The first failure is the cause: if ours fails, so does QEMU's.
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            if outcomes[-1]["status"] not in ("paused", "prelaunch"):
                raise VmCrashed(f"the guest of VM {self.record.vm_id} ended while it was captured")
            reached("capture.saved")
            sealed = self._seal(sealing)
            resumed = self._resume(was_running and keep_running)
            # The VM goes on even if its disk could not be sealed.
            for failure in await asyncio.gather(sealed, resumed, return_exceptions=True):
                if failure is not None:
                    raise failure
        except BaseException:
            with contextlib.suppress(ForkyardError):
                await self._resume(was_running)
            raise
        paused_ms = (time.perf_counter() - started) * 1000
        reached("capture.sealed")
        await sealing.seal()
        return paused_ms

    async def _execute(self, command: str, **arguments: Any) -> Any:
        return await self.qmp.execute(command, **arguments)

    async def _seal(self, sealing: Sealing) -> None:
        await sealing.switch()
        for top in sealing.above:
            if top.slot is None:
                self.top = top
            else:
                self.volumes = {**self.volumes, top.slot: top}

    async def _resume(self, wanted: bool) -> None:
        if wanted:
            await self._execute("cont")


class _StatePipe:
    """Through which QEMU writes its device state. A path and not a descriptor, because QEMU truncates what it is given.

    We hold both ends until QEMU has answered or the reader has given up: so opening it never blocks, and the reader sees no
    end before QEMU has begun.
    """

    def __init__(self, record: VmRecord) -> None:
        self.path = record.dir / "state.fifo"
        self.path.unlink(missing_ok=True)
        os.mkfifo(self.path, 0o600)
        os.chown(self.path, record.uid, record.uid)
        self.reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._both: int | None = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        os.set_blocking(self.reader, True)
        fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def let_go(self, _: object = None) -> None:
        if self._both is not None:
            os.close(self._both)
            self._both = None

    def close(self) -> None:
        self.let_go()
        self.path.unlink(missing_ok=True)


def _finish(pipe: _StatePipe, copier: Copier, state: int) -> None:
    """Blocking: what happens while QEMU stands still. Closes the reading end, so that QEMU never waits for nobody."""
    try:
        poller = select.poll()
        poller.register(pipe.reader, select.POLLIN)
        if not poller.poll(PAUSE_TIMEOUT_S * 1000):
            raise SnapshotFailed(f"QEMU did not begin to write its device state within {PAUSE_TIMEOUT_S:.0f} s")
        copier.rest()
        with open(state, "wb", closefd=False) as file:
            while chunk := os.read(pipe.reader, _PIPE_BYTES):
                file.write(chunk)
    except OSError as error:
        raise SnapshotFailed(f"could not save the VM's state: {error.strerror}") from error
    finally:
        os.close(pipe.reader)


def _new_file(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SnapshotFailed(f"could not make {path}: {error.strerror}") from error
