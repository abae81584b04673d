"""Which accelerator this machine really has.

Owns: the probe of KVM, and its cached result in `<cache_dir>/kvm-probe.json`. `/dev/kvm` can open and still be
useless (a nested or paravirtual one on which ordinary kernels hang, or QEMU aborts), so the only proof is a real
kernel that came as far as running a program, with the CPU model and the user that VMs will have.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from forkyard.vmm.qemu import cmdline
from forkyard.vmm.qemu.native import Native
from forkyard.vmm.qemu.process import Confinement, Status, jail_argv

KVM = Path("/dev/kvm")
DEADLINE_S = 10.0
PROBE_UID = 65534
_SUCCESS = b"forkyard: probe guest ran"


@dataclass(frozen=True)
class Verdict:
    """Whether KVM can be used, and why not, in plain words."""

    usable: bool
    reason: str


def kvm_access() -> Verdict | None:
    """What can be said without running a guest; None if a probe must decide."""
    if not KVM.exists():
        return Verdict(False, "this machine has no /dev/kvm")
    try:
        os.close(open_kvm())
    except OSError as error:
        return Verdict(False, f"/dev/kvm does not open: {error.strerror}")
    return None


def open_kvm() -> int:
    return os.open(KVM, os.O_RDWR | os.O_CLOEXEC)


async def probe_kvm(
    binary: str, version: str, native: Native, kernel: Path, cache_dir: Path, *, deadline_s: float = DEADLINE_S
) -> Verdict:
    """Run a guest under KVM, once per (QEMU, host kernel, CPU, guest kernel)."""
    known = kvm_access()
    if known is not None:
        return known
    cache = cache_dir / "kvm-probe.json"
    key = await asyncio.to_thread(_key, version, kernel)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        saved = json.loads(cache.read_text())
        if saved["key"] == key:
            return Verdict(bool(saved["usable"]), str(saved["reason"]))
    verdict = await _run_guest(binary, native, kernel, deadline_s)
    with contextlib.suppress(OSError):
        partial = cache.with_suffix(".new")
        partial.write_text(json.dumps({"key": key, **asdict(verdict)}))
        partial.rename(cache)
    return verdict


async def _run_guest(binary: str, native: Native, kernel: Path, deadline_s: float) -> Verdict:
    engine = cmdline.Engine(binary, "kvm", 0)
    with tempfile.TemporaryDirectory(prefix="forkyard-probe-") as scratch:
        initramfs = await asyncio.to_thread(_write_initramfs, Path(scratch), native.probe_init)
        kvm = open_kvm()
        try:
            env = {"LD_PRELOAD": str(native.ramshim), "FORKYARD_KVM_FD": str(kvm)}
            confinement = Confinement(uid=PROBE_UID, directory=Path("/"), keep_fds=[kvm], env=env)
            process = await asyncio.create_subprocess_exec(
                *jail_argv(native.jail, confinement, cmdline.probe(engine, kernel, initramfs)),
                pass_fds=[kvm],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        finally:
            os.close(kvm)
        try:
            async with asyncio.timeout(deadline_s):
                out, err = await process.communicate()
        except TimeoutError:
            return Verdict(False, f"/dev/kvm opens, but a Linux guest did not start within {deadline_s:.0f} s")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if _SUCCESS in out:
        return Verdict(True, "a probe guest ran under KVM")
    said = [line for line in err.decode(errors="replace").splitlines() if "warning:" not in line]
    why = said[0].removeprefix("qemu-system-x86_64: ")[:300] if said else "the guest ended without a word"
    code = process.returncode or 0
    ended = Status(signal=-code) if code < 0 else Status(code=code)
    return Verdict(False, f"/dev/kvm opens, but cannot run a Linux guest: QEMU {ended} ({why})")


def _write_initramfs(directory: Path, init: Path) -> Path:
    directory.chmod(0o711)
    initramfs = directory / "initramfs"
    initramfs.write_bytes(one_file_initramfs(init.read_bytes()))
    initramfs.chmod(0o444)
    return initramfs


def one_file_initramfs(init: bytes) -> bytes:
    """A cpio archive (newc) with /init and nothing else."""

    def record(name: bytes, mode: int, data: bytes) -> bytes:
        numbers = (1, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % number for number in numbers) + name + b"\0"
        return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)

    return record(b"init", stat.S_IFREG | 0o755, init) + record(b"TRAILER!!!", 0, b"")


def _key(version: str, kernel: Path) -> str:
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    parts = [version, platform.release(), cpu, hashlib.sha256(kernel.read_bytes()).hexdigest()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
