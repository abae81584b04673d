"""The QEMU driver: implements `vmm.base.Driver`.

Owns: starting a VM and undoing it. The steps of a start are: files (disk, sockets, cgroups), process, QMP, and for a
restore device state; whatever fails on the way, nothing of the VM is left but its directory.
Never does: deciding which VMs should run; the host does, and has written each `VmRecord` to its journal before it asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self, TypeVar

from forkyard.errors import ForkyardError, HostFailure, VmStartFailed
from forkyard.models import Check, Shape
from forkyard.vmm.base import BootSource, SnapshotFiles, VmRecord
from forkyard.vmm.qemu import cmdline
from forkyard.vmm.qemu import vm as vms
from forkyard.vmm.qemu.cgroups import Cgroups
from forkyard.vmm.qemu.native import Native, ensure_native
from forkyard.vmm.qemu.probe import PROBE_UID, Verdict, kvm_access, open_kvm, probe_kvm
from forkyard.vmm.qemu.process import Confinement, Process, is_vm, jail_argv, kill_now, spawn
from forkyard.vmm.qemu.qmp import Qmp
from forkyard.vmm.qemu.vm import QemuVm

START_TIMEOUT_S = 30.0
RECLAIM_TIMEOUT_S = 30.0
#: QEMU's own memory beside guest RAM and translation cache: heap, stacks, disk caches. A limit against runaways.
OVERHEAD_MIB = 192
#: QEMU's disk workers are at most 64; the rest are vCPUs and a few of its own.
THREADS = 96
MIB, GIB = 1 << 20, 1 << 30

T = TypeVar("T")
AccelChoice = Literal["auto", "kvm", "tcg"]
KVM_ADVICE = (
    "Nothing needs to be done. For full speed, run on a machine (or a VM with nested virtualisation) whose KVM runs "
    "ordinary Linux guests."
)
TCG_MEANS = "Software emulation (TCG) is used: everything works, but CPU-bound work inside sandboxes is 4–5× slower."


class QemuDriver:
    """Made by `open`, which may take ten seconds the first time (the probe of KVM) and is quick afterwards."""

    def __init__(
        self, engine: cmdline.Engine, version: str, native: Native, cgroups: Cgroups, kvm: Verdict, choice: AccelChoice
    ) -> None:
        self._engine = engine
        self._version = version
        self._native = native
        self._cgroups = cgroups
        self._kvm = kvm
        self._choice = choice
        self._vms: weakref.WeakValueDictionary[str, QemuVm] = weakref.WeakValueDictionary()

    @classmethod
    async def open(
        cls,
        *,
        cache_dir: Path,
        scope: str,
        accel: AccelChoice = "auto",
        tb_size_mib: int = 64,
        kernel: Path | None = None,
        binary: str = "qemu-system-x86_64",
    ) -> Self:
        """`scope` names this daemon among those of the machine; `kernel` is what the probe of KVM boots (without one,
        `auto` means TCG)."""
        path = shutil.which(binary)
        if path is None or shutil.which("qemu-img") is None:
            raise HostFailure(f"{binary} or qemu-img is not installed; run: apt install qemu-system-x86 qemu-utils")
        if os.geteuid() != 0:
            raise HostFailure("VMs are started by root, who then drops to a user per VM; run the daemon as root")
        version = await asyncio.to_thread(_version, path)
        native = await asyncio.to_thread(ensure_native, cache_dir)
        if accel != "auto":
            kvm = Verdict(accel == "kvm", f"FORKYARD_ACCEL={accel} was set, so KVM was not tried")
        elif kernel is not None:
            kvm = await probe_kvm(path, version, native, kernel, cache_dir)
        else:
            kvm = kvm_access() or Verdict(False, "KVM was not tried: there is no guest kernel to try it with yet")
        engine = cmdline.Engine(path, "kvm" if kvm.usable else "tcg", tb_size_mib)
        return cls(engine, version, native, Cgroups(scope), kvm, accel)

    @property
    def accel(self) -> str:
        return self._engine.accel

    @property
    def fingerprint(self) -> str:
        # The translation cache is the host's affair alone; the rest of the machine is part of the saved state.
        engine = cmdline.Engine("qemu", self._engine.accel, 0)
        parts = [self._version, *cmdline.machine(engine, Shape(), Path("disk")), cmdline.kernel_args(engine.accel, "")]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    async def boot(self, record: VmRecord, source: BootSource, ram: Path) -> QemuVm:
        def files() -> None:
            disk = record.dir / "disk.qcow2"
            _qemu_img_create(disk, source.disk, "raw", record.shape.disk_gib * GIB)
            os.chown(disk, record.uid, record.uid)
            fd = os.open(ram, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, record.shape.memory_mib * MIB)
                os.fchown(fd, record.uid, record.uid)
            finally:
                os.close(fd)
            log = vms.console_log(record)
            log.touch(mode=0o640)
            os.chown(log, record.uid, 0)

        return await self._start(
            record, files, lambda sockets: cmdline.boot(self._engine, record, sockets, source, ram)
        )

    async def restore(self, record: VmRecord, snapshot: SnapshotFiles) -> QemuVm:
        return await self._start(
            record,
            lambda: _overlay(snapshot.disk, record),
            lambda sockets: cmdline.restore(self._engine, record, sockets, snapshot.ram),
            env={"FORKYARD_RAM_PATH": str(snapshot.ram)},
            device_state=snapshot.device_state,
        )

    async def _start(
        self,
        record: VmRecord,
        files: Callable[[], None],
        command: Callable[[cmdline.Sockets], list[str]],
        *,
        env: Mapping[str, str] | None = None,
        device_state: Path | None = None,
    ) -> QemuVm:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                pid = await _to_the_end(lambda: self._spawn(record, files, command, env or {}))
                vm = QemuVm(record, Process.open(pid), self._cgroups)
                self._vms[record.vm_id] = vm
                await vm.connect(timeout_s=START_TIMEOUT_S)
                if device_state is not None:
                    await vm.load(device_state, timeout_s=START_TIMEOUT_S)
                return vm
        except (ForkyardError, OSError, subprocess.SubprocessError) as error:
            said = await asyncio.to_thread(vms.tail, vms.qemu_log(record), 1500)
            await self.reclaim(record)
            why = f"no answer within {START_TIMEOUT_S:.0f} s" if isinstance(error, TimeoutError) else str(error)
            raise VmStartFailed(
                f"VM {record.vm_id} did not start: {why}."
                + (f" QEMU said: {said}." if said else "")
                + " `forkyard doctor` checks what a VM needs."
            ) from error
        except BaseException:  # cancelled: the caller's deadline, or the daemon stops
            await asyncio.shield(self.reclaim(record))
            raise

    def _spawn(
        self,
        record: VmRecord,
        files: Callable[[], None],
        command: Callable[[cmdline.Sockets], list[str]],
        env: Mapping[str, str],
    ) -> int:
        record.dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        files()
        shape = record.shape
        with contextlib.ExitStack() as listening:
            # Our own listening sockets, inherited by QEMU: whoever connects waits in line, so nobody needs to poll.
            qmp = listening.enter_context(_listener(vms.qmp_socket(record)))
            agent = listening.enter_context(_listener(vms.agent_socket(record)))
            memory_mib = shape.memory_mib + self._engine.tb_size_mib + OVERHEAD_MIB
            confinement = Confinement(
                uid=record.uid,
                directory=record.dir,
                cgroup_entrances=self._cgroups.create(
                    record.vm_id, memory_bytes=memory_mib * MIB, pids=THREADS + shape.vcpus
                ),
                keep_fds=[qmp.fileno(), agent.fileno()],
                # Room for qcow2's own tables; what a VM writes can never be much more than its disk.
                file_size_bytes=shape.disk_gib * GIB + shape.disk_gib * GIB // 16 + GIB,
                env=env,
            )
            pid = self._launch(confinement, command(cmdline.Sockets(*confinement.keep_fds)), vms.qemu_log(record))
        (record.dir / "qemu.pid").write_text(str(pid))
        return pid

    def _launch(self, confinement: Confinement, argv: list[str], log: Path) -> int:
        env = {**confinement.env, "LD_PRELOAD": str(self._native.ramshim)}
        fds = list(confinement.keep_fds)
        with contextlib.ExitStack() as ours:
            if self._engine.accel == "kvm":
                kvm = open_kvm()
                ours.callback(os.close, kvm)
                env["FORKYARD_KVM_FD"] = str(kvm)
                fds.append(kvm)
            return spawn(jail_argv(self._native.jail, replace(confinement, env=env, keep_fds=fds), argv), fds, log)

    async def adopt(self, record: VmRecord) -> QemuVm | None:
        for pid in await asyncio.to_thread(self._candidates, record):
            try:
                process = Process.open(pid)
            except ProcessLookupError:
                continue
            vm = QemuVm(record, process, self._cgroups)
            # Checked after the pidfd is open: what it names can no longer change.
            if is_vm(pid, record.dir):
                try:
                    await vm.connect(timeout_s=START_TIMEOUT_S)
                except ForkyardError:
                    await vm.detach()
                    continue
                self._vms[record.vm_id] = vm
                await vm.settle()
                return vm
            await vm.detach()
        return None

    async def reclaim(self, record: VmRecord) -> None:
        vm = self._vms.pop(record.vm_id, None)
        if vm is not None:
            await vm.kill()
        await _to_the_end(lambda: self._reclaim(record))

    def _reclaim(self, record: VmRecord) -> None:
        self._cgroups.kill_all(record.vm_id, timeout_s=RECLAIM_TIMEOUT_S)
        for pid in self._candidates(record):  # without cgroups, the pid file is all there is
            if is_vm(pid, record.dir):
                kill_now(pid, timeout_s=RECLAIM_TIMEOUT_S)
        self._cgroups.remove(record.vm_id)
        for path in (vms.qmp_socket(record), vms.agent_socket(record), record.dir / "qemu.pid"):
            path.unlink(missing_ok=True)

    def _candidates(self, record: VmRecord) -> list[int]:
        pids = self._cgroups.processes(record.vm_id)
        with contextlib.suppress(OSError, ValueError):
            pids.add(int((record.dir / "qemu.pid").read_text()))
        return sorted(pids)

    async def console(self, record: VmRecord, tail_bytes: int) -> str:
        """The end of a VM's serial console, also of one that has ended."""
        vm = self._vms.get(record.vm_id)
        if vm is not None:
            await vm.collect_console()
        return await asyncio.to_thread(vms.tail, vms.console_log(record), tail_bytes)

    async def start_idle_ms(self, scratch: Path) -> float:
        """From before the launcher is started until QEMU has a machine and answers its first command, as every VM must.
        (The bare greeting comes some 15 ms sooner, from a thread that runs before there is a machine.)"""
        path = scratch / "idle.sock"
        with _listener(path) as listener:
            confinement = Confinement(PROBE_UID, Path("/"), keep_fds=[listener.fileno()])
            started = time.perf_counter()
            pid = self._launch(confinement, cmdline.idle(self._engine, listener.fileno()), scratch / "idle.log")
        process = Process.open(pid)
        try:
            qmp = await Qmp.connect(path, timeout_s=START_TIMEOUT_S)
            elapsed_ms = (time.perf_counter() - started) * 1000
            await qmp.aclose()
            return elapsed_ms
        finally:
            process.kill()
            await process.wait()
            path.unlink(missing_ok=True)

    async def checks(self) -> list[Check]:
        return [
            Check(name="qemu", status="ok", summary=f"QEMU {self._version} at {self._engine.binary}"),
            self._accel_check(),
            self._cgroup_check(),
        ]

    def _accel_check(self) -> Check:
        if self._kvm.usable:
            return Check(name="accelerator", status="ok", summary=f"KVM: {self._kvm.reason}")
        return Check(
            name="accelerator",
            status="ok" if self._choice == "tcg" else "warning",
            summary=f"{self._kvm.reason}. {TCG_MEANS}",
            advice=None if self._choice == "tcg" else KVM_ADVICE,
        )

    def _cgroup_check(self) -> Check:
        limited = sorted(c for h in self._cgroups.hierarchies for c in h.controllers)
        if limited == ["memory", "pids"]:
            versions = "+".join(sorted({f"v{h.version}" for h in self._cgroups.hierarchies}))
            return Check(
                name="cgroups", status="ok", summary=f"each VM is limited in memory and processes ({versions})"
            )
        return Check(
            name="cgroups",
            status="warning",
            summary=f"VMs are limited in {' and '.join(limited) or 'nothing'}; a runaway one could use up the host",
            advice="Mount /sys/fs/cgroup writable, with the memory and pids controllers.",
        )


async def _to_the_end(work: Callable[[], T]) -> T:
    """Run blocking work in a thread. A thread cannot be cancelled: if the caller is, wait for it all the same, so that
    what it still makes can be undone."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        task.exception()
        raise


def _version(binary: str) -> str:
    done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=30, check=False)
    first = done.stdout.partition("\n")[0]
    if done.returncode or not first.startswith("QEMU emulator version "):
        raise HostFailure(f"{binary} --version failed: {(done.stderr or done.stdout).strip()[:500]}")
    return first.removeprefix("QEMU emulator version ")


def _listener(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(8)
    except OSError as error:
        listener.close()
        if "too long" in str(error):
            raise HostFailure(
                f"the socket path {path} is longer than Linux allows; choose a shorter directory"
            ) from error
        raise
    return listener


def _overlay(disk: Path, record: VmRecord) -> None:
    """The VM's own disk: an empty qcow2 over the snapshot's. Copying one takes 0.3 ms where making one takes 20, so the
    first is kept beside the snapshot. Its name has the path in it, because its content does."""
    disk = disk.absolute()
    pristine = disk.with_name(f"{disk.name}.overlay-{hashlib.sha256(str(disk).encode()).hexdigest()[:8]}")
    if not pristine.exists():
        partial = pristine.with_name(f".{pristine.name}-{record.vm_id}")
        _qemu_img_create(partial, disk, "qcow2", None)
        partial.rename(pristine)
    target = record.dir / "disk.qcow2"
    shutil.copyfile(pristine, target)
    target.chmod(0o600)
    os.chown(target, record.uid, record.uid)


def _qemu_img_create(path: Path, backing: Path, backing_format: str, size_bytes: int | None) -> None:
    size = [] if size_bytes is None else [str(size_bytes)]
    command = [
        "qemu-img",
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        str(backing.absolute()),
        "-F",
        backing_format,
        str(path),
    ]
    done = subprocess.run([*command, *size], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise HostFailure(f"could not make disk {path} over {backing}: {done.stderr.strip()[:500]}")
