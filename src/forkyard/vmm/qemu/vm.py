"""One QEMU VM that runs: implements `vmm.base.Vm`.

Owns: the connection to its QEMU, the watch on its process, and the answer to "why did it end". A guest that ends leaves
its QEMU paused (see `cmdline`); we read the cause and the console, and only then let the process go.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forkyard.errors import ForkyardError, HostFailure, SnapshotFailed, VmCrashed, VmStartFailed
from forkyard.vmm.base import (
    Captured,
    CaptureTarget,
    ExitKind,
    SnapshotFiles,
    VmCounters,
    VmExit,
    VmRecord,
    VmUsage,
    VolumeDisk,
)
from forkyard.vmm.qemu import disks, pages
from forkyard.vmm.qemu.capture import Capture
from forkyard.vmm.qemu.cgroups import Cgroups
from forkyard.vmm.qemu.cmdline import CONSOLE, CONSOLE_RING_BYTES
from forkyard.vmm.qemu.disks import Top
from forkyard.vmm.qemu.finishing import in_thread, to_the_end
from forkyard.vmm.qemu.flatten import Flatten, cancel_all
from forkyard.vmm.qemu.process import Process, Status
from forkyard.vmm.qemu.qmp import Event, Qmp
from forkyard.vmm.qemu.sealing import Sealing
from forkyard.vmm.qemu.shim import Range, map_file

LOAD_TIMEOUT_S = 30.0
KILL_TIMEOUT_S = 30.0
#: Each makes up to two mappings, and a process may have 65530 (vm.max_map_count). Smaller runs beyond that are copied.
MAX_MAPPED_RUNS = 16_000
#: In the last words of a kernel that had no memory left: nobody to kill, or told to panic (`vm.panic_on_oom`).
OUT_OF_MEMORY = ("out of memory", "deadlocked on memory")
CONSOLE_LOG_BYTES = 256 * 1024  # of a sandbox; a template's boot log is whole


def qmp_socket(record: VmRecord) -> Path:
    return record.dir / "qmp.sock"


def agent_socket(record: VmRecord) -> Path:
    return record.dir / "agent.sock"


def shim_socket(record: VmRecord) -> Path:
    return record.dir / "shim.sock"


def console_log(record: VmRecord) -> Path:
    return record.dir / "console.log"


def qemu_log(record: VmRecord) -> Path:
    return record.dir / "qemu.log"


def tail(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size).decode(errors="replace").strip()
    except OSError:
        return ""


async def start_failure(record: VmRecord, error: Exception, timeout_s: float) -> VmStartFailed:
    """Why a VM did not start, with what QEMU said about it."""
    said = await asyncio.to_thread(tail, qemu_log(record), 1500)
    why = f"no answer within {timeout_s:.0f} s" if isinstance(error, TimeoutError) else str(error)
    return VmStartFailed(
        f"VM {record.vm_id} did not start: {why}."
        + (f" QEMU said: {said}." if said else "")
        + " `forkyard doctor` checks what a VM needs."
    )


def guest_end(run_state: str, reason: str, console: str) -> VmExit | None:
    """What QEMU's run state says about the guest: how it ended, or None while it has not."""
    if run_state == "guest-panicked" or (reason == "guest-reset" and "Kernel panic - not syncing" in console):
        line = next((line for line in reversed(console.splitlines()) if "Kernel panic" in line), "")
        cause = line.partition("Kernel panic - not syncing: ")[2][:200].strip()
        if any(words in cause.lower() for words in OUT_OF_MEMORY):
            return VmExit(ExitKind.OUT_OF_MEMORY, f"the guest ran out of memory: {cause}; give it more memory_mib")
        return VmExit(ExitKind.PANIC, "the guest kernel panicked" + (f": {cause}" if cause else ""))
    if run_state == "shutdown" and reason == "guest-reset":
        return VmExit(ExitKind.SHUTDOWN, "the guest rebooted, which ends a sandbox; create a new one")
    if run_state == "shutdown":
        return VmExit(ExitKind.SHUTDOWN, "the guest powered off")
    if run_state == "internal-error":
        return VmExit(ExitKind.CRASHED, "the hypervisor could not go on with this guest (QEMU: internal-error)")
    return None


class QemuVm:
    def __init__(self, record: VmRecord, process: Process, cgroups: Cgroups, *, live_capture: bool) -> None:
        self._record = record
        self._process = process
        self._cgroups = cgroups
        self._live_capture = live_capture
        self._top = Top(1, record.disk)
        self._volumes: dict[int, Top] = {}
        self._capturing = asyncio.Lock()
        self._flattening: asyncio.Task[None] | None = None
        self._qmp: Qmp | None = None
        self._connecting = asyncio.Lock()
        self._stop_asked = False
        self._killed = False
        self._guest_end: VmExit | None = None
        self._shutdown_reason = ""
        self._settling: asyncio.Task[None] | None = None

    @property
    def record(self) -> VmRecord:
        return self._record

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def agent_socket(self) -> Path:
        return agent_socket(self._record)

    @property
    def console_log(self) -> Path:
        return console_log(self._record)

    @property
    def disk(self) -> Path:
        return self._top.path

    @property
    def volumes(self) -> dict[int, Path]:
        return {slot: top.path for slot, top in self._volumes.items()}

    async def connect(self, *, timeout_s: float) -> Qmp:
        """The connection to QEMU, made again if it broke."""
        async with self._connecting:
            if self._qmp is None or self._qmp.closed:
                if self._process.ended:
                    raise VmCrashed(f"the QEMU of VM {self._record.vm_id} has ended")
                if self._qmp is not None:
                    await self._qmp.aclose()
                self._qmp = await Qmp.connect(qmp_socket(self._record), self._on_event, timeout_s=timeout_s)
            return self._qmp

    async def _execute(self, command: str, **arguments: Any) -> Any:
        qmp = await self.connect(timeout_s=15.0)
        return await qmp.execute(command, **arguments)

    async def load(self, snapshot: SnapshotFiles, volumes: Sequence[VolumeDisk] = ()) -> None:
        try:
            with self._new_disks_removed_on_failure(volumes):
                async with asyncio.timeout(LOAD_TIMEOUT_S):
                    mapping = asyncio.create_task(in_thread(lambda: self._map_layer(snapshot)))
                    try:
                        await self._make_disk(snapshot.disk, "qcow2")
                        await self._make_volumes(volumes)
                        qmp = await self.connect(timeout_s=LOAD_TIMEOUT_S)
                        # The disk's commands are sent first and so done first; nobody waits for their answers.
                        await asyncio.gather(
                            self._attach_disk(qmp), self._load_state(qmp, snapshot.device_state, after=mapping)
                        )
                    finally:
                        await asyncio.wait({mapping})
                        mapping.exception()  # whatever failed first is told
        except (ForkyardError, OSError) as error:
            raise await start_failure(self._record, error, LOAD_TIMEOUT_S) from error

    async def attach_disk(self, below: Path, below_format: str) -> None:
        """Give a machine that boots its disk: `record.disk`, made over `below` if it does not exist."""
        with self._new_disks_removed_on_failure(()):
            await self._make_disk(below, below_format)
            await self._attach_disk(await self.connect(timeout_s=LOAD_TIMEOUT_S))

    async def attach(self, volumes: Sequence[VolumeDisk]) -> None:
        try:
            with self._new_disks_removed_on_failure(volumes):
                async with asyncio.timeout(LOAD_TIMEOUT_S):
                    before = set(self._volumes)
                    await self._make_volumes(volumes)
                    qmp = await self.connect(timeout_s=LOAD_TIMEOUT_S)
                    tops = [top for slot, top in self._volumes.items() if slot not in before]
                    commands = [command for top in tops for command in (*disks.attach(top), disks.announce(top))]
                    await asyncio.gather(*(qmp.execute(command, **arguments) for command, arguments in commands))
        except (ForkyardError, OSError) as error:
            raise await start_failure(self._record, error, LOAD_TIMEOUT_S) from error

    async def take_out(self, slot: int) -> None:
        async with self._capturing:
            qmp = await self.connect(timeout_s=15.0)
            top = self._volumes[slot]
            await asyncio.gather(*(qmp.execute(command, **arguments) for command, arguments in disks.take_out(top)))
            del self._volumes[slot]
        await in_thread(top.path.unlink)

    async def _make_volumes(self, volumes: Sequence[VolumeDisk]) -> None:
        if not volumes:
            return

        def make() -> None:
            for volume in volumes:
                disks.make_overlay(volume.disk, volume.below, "qcow2", self._record, volume.size_bytes)

        await in_thread(make)
        self._volumes |= {v.slot: Top(1, v.disk, v.slot, v.size_bytes) for v in volumes}

    async def seal_volume(self, slot: int, next_disk: Path) -> Path:
        async with self._capturing:
            qmp = await self.connect(timeout_s=15.0)
            await self._stop_flattening(qmp)
            below = self._volumes[slot]
            sealing = Sealing(qmp, self._record, [below], [next_disk])
            async with sealing.prepared():
                await to_the_end(self._switch_volume(sealing))
            await sealing.seal()
            return below.path

    async def _switch_volume(self, sealing: Sealing) -> None:
        await sealing.switch()
        self._volumes |= {top.slot: top for top in sealing.above if top.slot is not None}

    async def _make_disk(self, below: Path, below_format: str) -> None:
        if not self._record.disk.exists():
            await in_thread(lambda: disks.make_overlay(self._record.disk, below, below_format, self._record))

    async def _attach_disk(self, qmp: Qmp) -> None:
        # Sent in one go, done in this order: a round trip per command is what costs.
        commands = [command for top in (self._top, *self._volumes.values()) for command in disks.attach(top)]
        await asyncio.gather(*(qmp.execute(command, **arguments) for command, arguments in commands))

    @contextlib.contextmanager
    def _new_disks_removed_on_failure(self, volumes: Sequence[VolumeDisk]) -> Iterator[None]:
        new = [path for path in (self._record.disk, *(v.disk for v in volumes)) if not path.exists()]
        try:
            yield
        except BaseException:
            for path in new:
                path.unlink(missing_ok=True)
            raise

    def _map_layer(self, snapshot: SnapshotFiles) -> None:
        layer = snapshot.layer
        if layer is None:
            return
        ram = pages.ram_of(self.pid, self._record.shape.memory_mib << 20)
        if snapshot.runs is None and layer.stat().st_size != ram.size_bytes:
            raise HostFailure(f"{layer} is not a layer of a machine with {ram.size_bytes >> 20} MiB of memory")
        # The first page is copied: a page of the template's own is how RAM is found (`pages.find_ram`).
        first, rest = pages.split(pages.places(layer, snapshot.runs), pages.PAGE)
        rest.sort(key=lambda place: place.start - place.end)  # longest first
        mapped, copied = rest[:MAX_MAPPED_RUNS], [*first, *rest[MAX_MAPPED_RUNS:]]
        ranges = [Range(ram.address + start, end - start, offset) for start, end, offset in sorted(mapped)]
        map_file(shim_socket(self._record), layer, ranges)
        pages.copy_into(self.pid, ram, layer, copied)

    async def _load_state(self, qmp: Qmp, device_state: Path, *, after: asyncio.Task[None]) -> None:
        await after  # devices look into RAM when they are loaded
        done = qmp.expect(lambda e: e.name == "MIGRATION" and e.data.get("status") in ("completed", "failed"))
        fd = os.open(device_state, os.O_RDONLY | os.O_CLOEXEC)
        try:
            await asyncio.gather(
                qmp.execute("migrate-set-capabilities", capabilities=[{"capability": "events", "state": True}]),
                qmp.execute("getfd", fds=[fd], fdname="state"),
                qmp.execute("migrate-incoming", uri="fd:state"),
            )
        finally:
            os.close(fd)
        event = await done
        if event.data["status"] != "completed":
            raise HostFailure(f"QEMU could not load {device_state}")

    async def find_disk(self) -> None:
        """Of a VM that another daemon started: which disk it writes to now."""
        await cancel_all(await self.connect(timeout_s=15.0))
        nodes = await self._execute("query-named-block-nodes", flat=True)
        self._top, self._volumes, prepared = disks.tops(nodes)
        for node in prepared:
            await self._execute("blockdev-del", **{"node-name": node})

    async def capture(self, target: CaptureTarget, *, keep_running: bool) -> Captured:
        async with self._capturing:
            qmp = await self.connect(timeout_s=15.0)
            await self._stop_flattening(qmp)
            status = str((await qmp.execute("query-status"))["status"])
            if status not in ("running", "paused", "prelaunch"):
                raise VmCrashed(f"the guest of VM {self._record.vm_id} has ended (QEMU: {status})")
            capture = Capture(
                *(qmp, self._record, self.pid, shim_socket(self._record)),
                *(self._top, self._volumes, target, self._live_capture),
            )
            self._stop_asked, asked_before = True, self._stop_asked
            try:
                captured = await capture.run(was_running=status == "running", keep_running=keep_running)
                asked_before = asked_before or not keep_running
                return captured
            except OSError as error:
                raise SnapshotFailed(f"VM {self._record.vm_id} could not be captured: {error}") from error
            finally:
                self._top, self._volumes = capture.top, dict(capture.volumes)
                self._stop_asked = asked_before

    async def flatten(self, base: Path) -> None:
        async with self._capturing:
            if self._flattening is None or self._flattening.done():
                flatten = Flatten(await self.connect(timeout_s=15.0), self._top, base)
                self._flattening = asyncio.create_task(flatten.run(), name=f"flatten {self._record.vm_id}")
            under_way = self._flattening
        await asyncio.shield(under_way)

    async def _stop_flattening(self, qmp: Qmp) -> None:
        """A disk that QEMU copies into cannot be sealed."""
        if self._flattening is not None and not self._flattening.done():
            await Flatten(qmp, self._top, self._top.path).cancel()
            await asyncio.wait({self._flattening})

    async def cont(self) -> None:
        self._stop_asked = False
        await self._execute("cont")

    async def stop(self) -> None:
        self._stop_asked = True
        await self._execute("stop")

    async def save(self, device_state: Path) -> None:
        fd = os.open(device_state, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            added = await self._execute("add-fd", fds=[fd])
            fdset = added["fdset-id"]
            # live: also flushes the disk and gives up its locks, so that the state and the disk are of one instant.
            await self._execute("xen-save-devices-state", filename=f"/dev/fdset/{fdset}", live=True, timeout_s=60.0)
            await self._execute("remove-fd", **{"fdset-id": fdset})
            await asyncio.to_thread(os.fsync, fd)
        finally:
            os.close(fd)

    async def wait(self) -> VmExit:
        status = await self._process.wait()
        return await self._verdict(status)

    async def kill(self) -> None:
        self._killed = True
        if self._process.watched:
            self._process.kill()
            try:
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                raise HostFailure(
                    f"QEMU (pid {self.pid}) of VM {self._record.vm_id} does not end even when killed; see dmesg"
                ) from None
        await self._disconnect()

    async def usage(self) -> VmUsage:
        try:
            return await asyncio.to_thread(_usage, self.pid)
        except OSError as error:
            raise VmCrashed(f"the QEMU of VM {self._record.vm_id} has ended") from error

    def counters(self) -> VmCounters | None:
        try:
            return _counters(self.pid)
        except OSError:
            return None

    async def detach(self) -> None:
        await self._disconnect()
        self._process.close()

    async def collect_console(self) -> None:
        """Move what the guest wrote since the last time into the console log, which keeps only its end."""
        try:
            encoded = await self._execute("ringbuf-read", device=CONSOLE, size=CONSOLE_RING_BYTES, format="base64")
        except HostFailure:  # a template's console is a file already; or QEMU is gone
            return
        data = base64.b64decode(encoded)
        if data:
            await asyncio.to_thread(_append_bounded, self.console_log, data, CONSOLE_LOG_BYTES)

    async def settle(self) -> None:
        """If the guest has ended: remember how, keep its console, and let QEMU go."""
        try:
            state = str((await self._execute("query-status"))["status"])
            await self.collect_console()
        except ForkyardError:
            return  # QEMU is going by itself; its process tells the rest
        end = guest_end(state, self._shutdown_reason, tail(self.console_log, 8192))
        if end is not None:
            self._guest_end = end
            self._process.kill()

    def _on_event(self, event: Event) -> None:
        if event.name == "SHUTDOWN":
            self._shutdown_reason = str(event.data.get("reason", ""))
        elif not (event.name == "GUEST_PANICKED" or (event.name == "STOP" and not self._stop_asked)):
            return
        previous = self._settling

        async def settle() -> None:
            if previous is not None:
                await previous
            await self.settle()

        self._settling = asyncio.create_task(settle())

    async def _verdict(self, status: Status) -> VmExit:
        if self._guest_end is not None:
            return self._guest_end
        if self._killed:
            return VmExit(ExitKind.KILLED, "ended by Forkyard")
        if self._cgroups.out_of_memory(self._record.vm_id):
            return VmExit(ExitKind.CRASHED, "killed by the host: QEMU used more memory than its limit")
        said = await asyncio.to_thread(tail, qemu_log(self._record), 500)
        return VmExit(ExitKind.CRASHED, f"QEMU {status}" + (f"; it said: {said}" if said else ""))

    async def _disconnect(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.wait({self._settling})
        if self._flattening is not None:
            self._flattening.cancel()
            await asyncio.wait({self._flattening})
        if self._qmp is not None:
            await self._qmp.aclose()


def _usage(pid: int) -> VmUsage:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    pss_kib = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return VmUsage(pss_mib=pss_kib / 1024, cpu_s=_counters(pid).cpu_s)


def _counters(pid: int) -> VmCounters:
    # The name in parentheses may hold spaces: count from behind it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks, pages = int(fields[11]) + int(fields[12]), int(fields[21])
    return VmCounters(cpu_s=ticks / os.sysconf("SC_CLK_TCK"), resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"))


def _append_bounded(path: Path, data: bytes, limit: int) -> None:
    kept = path.read_bytes()[-limit:] if path.exists() else b""
    path.write_bytes((kept + data)[-limit:])
