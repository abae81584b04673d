"""The QEMU driver: implements `vmm.base.Driver`.

Owns: starting a VM and undoing it. The steps of a start are: files (RAM, sockets, cgroups), process, QMP, then disk and
device state (`QemuVm.load`); whatever fails on the way, nothing of the VM is left but its directory.
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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

from forkyard.errors import ForkyardError, HostFailure, VmStartFailed
from forkyard.models import Check, Shape
from forkyard.models.volumes import MAX_VOLUME_MIB
from forkyard.vmm.base import BootSource, SnapshotFiles, Start, VmRecord
from forkyard.vmm.qemu import cmdline
from forkyard.vmm.qemu import vm as vms
from forkyard.vmm.qemu.cgroups import Cgroups
from forkyard.vmm.qemu.disks import GIB
from forkyard.vmm.qemu.finishing import in_thread, to_the_end
from forkyard.vmm.qemu.native import Native, ensure_native
from forkyard.vmm.qemu.pages import why_not_live
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
MIB = 1 << 20
#: One of these is the tap's in a VM: within its limit of open files, and whatever number the daemon's own have.
TAP_FDS = range(1000, 1004)

AccelChoice = Literal["auto", "kvm", "tcg"]
KVM_ADVICE = (
    "Nothing needs to be done. For full speed, run on a machine (or a VM with nested virtualisation) whose KVM runs "
    "ordinary Linux guests."
)
TCG_MEANS = "Software emulation (TCG) is used: everything works, but CPU-bound work inside sandboxes is 4–5× slower."


class QemuDriver:
    """Made by `open`, which may take ten seconds the first time (the probe of KVM) and is quick afterwards."""

    def __init__(
        self,
        engine: cmdline.Engine,
        version: str,
        native: Native,
        cgroups: Cgroups,
        kvm: Verdict,
        choice: AccelChoice,
        not_live: str | None,
    ) -> None:
        self._engine = engine
        self._version = version
        self._native = native
        self._cgroups = cgroups
        self._kvm = kvm
        self._choice = choice
        self._not_live = not_live
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
        live_capture: bool = True,
    ) -> Self:
        """`scope` names this daemon among those of the machine; `kernel` is what the probe of KVM boots (without one,
        `auto` means TCG); without `live_capture`, captures are made as on a kernel that cannot do better."""
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
        not_live = await asyncio.to_thread(why_not_live) if live_capture else "live capture is switched off"
        return cls(engine, version, native, Cgroups(scope), kvm, accel, not_live)

    @property
    def accel(self) -> str:
        return self._engine.accel

    @property
    def fingerprint(self) -> str:
        # The translation cache is the host's affair alone; the rest of the machine is part of the saved state.
        engine = cmdline.Engine("qemu", self._engine.accel, 0)
        parts = [self._version, *cmdline.machine(engine, Shape()), cmdline.kernel_args(engine.accel, "")]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    async def boot(self, record: VmRecord, source: BootSource, ram: Path, *, template: bool = True) -> QemuVm:
        def files() -> None:
            if template:
                _make_ram(ram, record.shape, 0o600, record.uid)
                log = vms.console_log(record)
                log.touch(mode=0o640)
                os.chown(log, record.uid, 0)
            else:
                with contextlib.suppress(FileExistsError):
                    _make_ram(ram, record.shape, 0o444, 0)

        return await self._start(
            record,
            files,
            lambda sockets: cmdline.boot(self._engine, record, sockets, source, ram, template=template),
            private_ram=None if template else ram,
            then=lambda vm: vm.attach_disk(source.disk, "raw"),
        )

    async def shell(self, record: VmRecord, ram: Path) -> QemuVm:
        return await self._shell(record, ram, None)

    async def restore(self, record: VmRecord, snapshot: SnapshotFiles) -> QemuVm:
        return await self._shell(record, snapshot.ram, lambda vm: vm.load(snapshot))

    async def _shell(self, record: VmRecord, ram: Path, then: Callable[[QemuVm], Awaitable[None]] | None) -> QemuVm:
        return await self._start(
            record,
            lambda: None,
            lambda sockets: cmdline.shell(self._engine, record, sockets, ram),
            private_ram=ram,
            then=then,
        )

    async def _start(
        self,
        record: VmRecord,
        files: Callable[[], None],
        command: Callable[[cmdline.Sockets], list[str]],
        *,
        private_ram: Path | None,
        then: Callable[[QemuVm], Awaitable[None]] | None,
    ) -> QemuVm:
        env = {} if private_ram is None else {"FORKYARD_RAM_PATH": str(private_ram)}
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                pid = await in_thread(lambda: self._spawn(record, files, command, env))
                vm = QemuVm(record, Process.open(pid), self._cgroups, live_capture=self._not_live is None)
                self._vms[record.vm_id] = vm
                await vm.connect(timeout_s=START_TIMEOUT_S)
                if then is not None:
                    await then(vm)
                return vm
        except VmStartFailed:
            await self.reclaim(record)
            raise
        except (ForkyardError, OSError, subprocess.SubprocessError) as error:
            failure = await vms.start_failure(record, error, START_TIMEOUT_S)
            await self.reclaim(record)
            raise failure from error
        except BaseException:  # cancelled: the caller's deadline, or the daemon stops
            await to_the_end(self.reclaim(record))
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
            shim = listening.enter_context(_listener(vms.shim_socket(record)))
            inherited = [qmp.fileno(), agent.fileno(), shim.fileno()]
            tap_fd = next(fd for fd in TAP_FDS if fd not in inherited)
            # Twice: a page that a guest is the first of all to touch is charged to it in the template's file, and again as
            # its own when it writes it.
            memory_mib = 2 * shape.memory_mib + self._engine.tb_size_mib + OVERHEAD_MIB
            largest_bytes = max(shape.disk_gib * GIB, MAX_VOLUME_MIB * MIB)
            confinement = Confinement(
                uid=record.uid,
                directory=record.dir,
                cgroup_entrances=self._cgroups.create(
                    record.vm_id,
                    vcpus=shape.vcpus,
                    memory_bytes=memory_mib * MIB,
                    pids=THREADS + shape.vcpus,
                ),
                keep_fds=inherited,
                netns=record.netns,
                tap=(cmdline.TAP, tap_fd),
                # Room for qcow2's own tables; what a VM writes can never be much more than its disk, or a volume.
                file_size_bytes=largest_bytes + largest_bytes // 16 + GIB,
                env={**env, "FORKYARD_SHIM_FD": str(shim.fileno())},
            )
            sockets = cmdline.Sockets(qmp_fd=qmp.fileno(), agent_fd=agent.fileno(), tap_fd=tap_fd)
            pid = self._launch(confinement, command(sockets), vms.qemu_log(record))
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
            vm = QemuVm(record, process, self._cgroups, live_capture=self._not_live is None)
            # Checked after the pidfd is open: what it names can no longer change.
            if is_vm(pid, cmdline.name(record.dir)):
                try:
                    await vm.find_disk()
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
        await in_thread(lambda: self._reclaim(record))

    def _reclaim(self, record: VmRecord) -> None:
        self._cgroups.kill_all(record.vm_id, timeout_s=RECLAIM_TIMEOUT_S)
        for pid in self._candidates(record):  # without cgroups, the pid file is all there is
            if is_vm(pid, cmdline.name(record.dir)):
                kill_now(pid, timeout_s=RECLAIM_TIMEOUT_S)
        self._cgroups.remove(record.vm_id)
        sockets = (vms.qmp_socket(record), vms.agent_socket(record), vms.shim_socket(record))
        for path in (*sockets, record.dir / "qemu.pid"):
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

    async def start_idle_ms(self, scratch: Path) -> Start:
        """From before the launcher is started. (The greeting comes some 15 ms before the first answer, from a thread that
        runs before there is a machine.)"""
        path = scratch / "idle.sock"
        with _listener(path) as listener:
            confinement = Confinement(PROBE_UID, Path("/"), keep_fds=[listener.fileno()])
            started = time.perf_counter()
            pid = self._launch(confinement, cmdline.idle(self._engine, listener.fileno()), scratch / "idle.log")
        process = Process.open(pid)
        try:
            qmp = await Qmp.connect(path, timeout_s=START_TIMEOUT_S)
            answered, greeted = time.perf_counter(), qmp.greeted_at or started
            await qmp.aclose()
            return Start(greeting_ms=(greeted - started) * 1000, answer_ms=(answered - started) * 1000)
        finally:
            process.kill()
            await process.wait()
            path.unlink(missing_ok=True)

    async def checks(self) -> list[Check]:
        return [
            Check(name="qemu", status="ok", summary=f"QEMU {self._version} at {self._engine.binary}"),
            self._accel_check(),
            self._cgroup_check(),
            self._capture_check(),
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

    def _capture_check(self) -> Check:
        if self._not_live is None:
            summary = "a VM runs on while it is captured; it pauses only for what it writes in the last moment"
            return Check(name="live-capture", status="ok", summary=summary)
        return Check(
            name="live-capture",
            status="warning",
            summary=f"{self._not_live}: a VM pauses while all its changed memory is copied, 1–2 ms for each MB",
            advice="Forks and snapshots are correct all the same. For short pauses, run Linux 6.7 or newer as root.",
        )

    def _cgroup_check(self) -> Check:
        limited = sorted(c for h in self._cgroups.hierarchies for c in h.controllers)
        if limited == ["cpu", "memory", "pids"]:
            versions = "+".join(sorted({f"v{h.version}" for h in self._cgroups.hierarchies}))
            return Check(
                name="cgroups", status="ok", summary=f"each VM is limited in CPU, memory and processes ({versions})"
            )
        return Check(
            name="cgroups",
            status="warning",
            summary=f"VMs are limited in {' and '.join(limited) or 'nothing'}; a runaway one could use up the host",
            advice="Mount /sys/fs/cgroup writable, with the cpu, memory and pids controllers.",
        )


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


def _make_ram(path: Path, shape: Shape, mode: int, uid: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)
        os.ftruncate(fd, shape.memory_mib * MIB)
        os.fchown(fd, uid, uid)
    finally:
        os.close(fd)
