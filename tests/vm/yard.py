"""A small guest for tests of the driver alone: booted and saved once, restored by every test.

The guest is the base image's kernel and disk without systemd and without the agent: an `/init` that starts a loop which
runs each line it receives on the agent's port. So these tests stand on the driver only.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from forkyard.images.base import ensure_base_image
from forkyard.images.initramfs import cpio_newc, regular_file
from forkyard.models import Shape
from forkyard.settings import Settings
from forkyard.vmm.base import BootSource, CaptureTarget, SnapshotFiles, VmRecord
from forkyard.vmm.qemu import QemuDriver
from forkyard.vmm.qemu.vm import QemuVm

T = TypeVar("T")

#: Of its own for each worker: a user may have only so many processes.
FIRST_UID = 658000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
INIT = """\
#!/bin/busybox sh
export PATH=/bin
busybox mount -t devtmpfs dev /dev
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
while read -r module; do busybox insmod /modules/$module; done < /modules/order
until [ -b /dev/vda ]; do busybox sleep 0.05; done
busybox mount -t ext4 /dev/vda /newroot
busybox cp /lines.py /newroot/run/lines.py
for directory in dev proc sys; do busybox mount --move /$directory /newroot/$directory; done
exec busybox chroot /newroot /bin/sh -c '
for module in virtio_console virtio_rng pvpanic_pci; do /sbin/modprobe $module; done
exec python3 -I /run/lines.py'
"""
LINES = """\
import glob, json, os, select, subprocess, time
while not (ports := glob.glob("/dev/vport*p1")):
    time.sleep(0.02)
port = os.open(ports[0], os.O_RDWR | os.O_NONBLOCK)
poll, buffer = select.poll(), b""
poll.register(port, select.POLLIN)
def answer(line):
    while line:  # nobody may be there to take it: the host of a copy is another one, and comes later
        try:
            line = line[os.write(port, line):]
        except BlockingIOError:
            time.sleep(0.02)
print("forkyard: milestone lines", file=open("/dev/ttyS0", "w"), flush=True)
while True:
    (_, happened), = poll.poll()
    if happened & select.POLLHUP:
        buffer = b""
        time.sleep(0.02)
        continue
    buffer += os.read(port, 65536)
    *lines, buffer = buffer.split(b"\\n")
    for line in lines:
        done = subprocess.run(["bash", "-c", line], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        answer(json.dumps(done.stdout.decode()).encode() + b"\\n")
"""


@dataclass
class Yard:
    """A driver with its own scope, and a saved guest to restore."""

    root: Path
    driver: QemuDriver
    snapshot: SnapshotFiles
    source: BootSource
    scope: str
    layers: Path  # on tmpfs
    made: int = 0

    def target(self, vm: QemuVm, *, seal: bool = True) -> CaptureTarget:
        """Files for the next capture of this VM."""
        self.made += 1
        next_disk = vm.record.dir / f"disk-{self.made}.qcow2" if seal else None
        return CaptureTarget(self.layers / str(self.made), self.root / f"state-{self.made}", next_disk)

    async def capture(self, vm: QemuVm, *, keep_running: bool = True, seal: bool = True) -> SnapshotFiles:
        target = self.target(vm, seal=seal)
        assert isinstance(target.layer, Path)
        captured = await vm.capture(target, keep_running=keep_running)
        return SnapshotFiles(self.snapshot.ram, target.device_state, captured.disk, target.layer)

    @contextlib.asynccontextmanager
    async def running(self, *snapshots: SnapshotFiles) -> AsyncIterator[list[QemuVm]]:
        """A VM of each of these snapshots, or one of the template."""
        async with contextlib.AsyncExitStack() as undo:
            vms = []
            for snapshot in snapshots or [self.snapshot]:
                record = self.record()
                undo.push_async_callback(self.driver.reclaim, record)
                vms.append(await self.driver.restore(record, snapshot))
                await vms[-1].cont()
            yield vms

    def record(self, name: str = "vm") -> VmRecord:
        self.made += 1
        directory = self.root / "vms" / f"{name}-{self.made}"
        return VmRecord(directory.name, directory, FIRST_UID + self.made, Shape(), directory / "disk.qcow2")

    def belongings(self) -> set[str]:
        """All that belongs to VMs of this scope, wherever it is."""
        cgroups = Path("/sys/fs/cgroup")
        found = {str(path) for path in cgroups.rglob(f"forkyard-{self.scope}/*") if path.is_dir()}
        found |= {str(path) for path in cgroups.rglob(f"forkyard-{self.scope}.*")}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                uid = process.stat().st_uid
                if f"{self.root}/vms/" in command or FIRST_UID <= uid < FIRST_UID + 1000:
                    found.add(f"process {process.name} (uid {uid}, {(process / 'ns/net').readlink()}): {command[:80]}")
        found |= {str(path) for path in self.root.glob("vms/*/*.sock")}
        return found


async def ask(vm: QemuVm, command: str, timeout_s: float = 60) -> str:
    """Run a command in the guest."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_unix_connection(str(vm.agent_socket))
        try:
            writer.write(command.encode() + b"\n")
            await writer.drain()
            return str(json.loads(await reader.readline()))
        finally:
            writer.close()
            await writer.wait_closed()


async def start(vm: QemuVm, name: str, program: str, *arguments: object) -> None:
    """Run a Python program in the guest, in the background."""
    encoded = base64.b64encode(program.encode()).decode()
    words = " ".join(map(str, arguments))
    await ask(vm, f"echo {encoded} | base64 -d > /run/{name}")
    await ask(vm, f"python3 /run/{name} {words} > /run/{name}.log 2>&1 & echo $! > /run/{name}.pid")


async def runs(vm: QemuVm, name: str) -> bool:
    """Whether a program that was started goes on, and has had nothing to complain of."""
    return await ask(vm, f"kill -0 $(cat /run/{name}.pid) && cat /run/{name}.log") == ""


async def tell(vm: QemuVm, command: str) -> None:
    """Run a command from which the guest does not return."""
    _, writer = await asyncio.open_unix_connection(str(vm.agent_socket))
    writer.write(command.encode() + b"\n")
    await writer.drain()
    # Closing at once would take the line back before the guest has read it.
    await vm.wait()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def make_yard(root: Path) -> Yard:
    cache_dir = Settings().cache_dir
    image = await ensure_base_image(cache_dir, lambda *_: None)
    scope = f"test{os.getpid()}"
    driver = await QemuDriver.open(cache_dir=root, scope=scope, accel="tcg")
    initramfs = root / "initramfs"
    guest = [regular_file("init", INIT.encode(), executable=True), regular_file("lines.py", LINES.encode())]
    initramfs.write_bytes(image.initramfs.read_bytes() + cpio_newc(guest))
    ram = Path("/dev/shm") / f"forkyard-{scope}.ram"
    record = VmRecord("template-t", root / "vms" / "t", FIRST_UID, Shape(), root / "disk.qcow2")
    source = BootSource(image.kernel, initramfs, image.disk)
    vm = await driver.boot(record, source, ram)
    try:
        await vm.cont()
        assert await ask(vm, "echo booted", 120) == "booted\n"
        await vm.stop()
        await vm.save(root / "device-state")
        await vm.kill()
    finally:
        await driver.reclaim(record)
    assert "forkyard: milestone lines" in vm.console_log.read_text()
    for path in (ram, record.disk):
        os.chown(path, 0, 0)
        path.chmod(0o444)
    layers = Path(tempfile.mkdtemp(prefix=f"forkyard-{scope}-", dir="/dev/shm"))
    layers.chmod(0o711)
    return Yard(root, driver, SnapshotFiles(ram, root / "device-state", record.disk), source, scope, layers)


@contextlib.contextmanager
def saved_yard() -> Iterator[Yard]:
    root = Path(tempfile.mkdtemp(prefix="fyd-", dir="/tmp"))
    root.chmod(0o711)
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, root)
        yard = asyncio.run(make_yard(root))
        undo.callback(yard.snapshot.ram.unlink)
        undo.callback(shutil.rmtree, yard.layers)
        yield yard


def with_vm(yard: Yard, body: Callable[[QemuVm], Awaitable[T]]) -> T:
    """Restore a guest, let it run, do something with it, and remove it."""

    async def run() -> T:
        record = yard.record()
        vm = await yard.driver.restore(record, yard.snapshot)
        try:
            await vm.cont()
            return await body(vm)
        finally:
            await yard.driver.reclaim(record)

    return asyncio.run(run())
