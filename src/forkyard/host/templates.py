"""Templates: machines that have booted, settled and been saved once per shape, so that every create is a restore.

Owns: `<cache_dir>/templates/<key>/` (RAM, device state, disk, manifest; content-keyed, shared by daemons, built under a
lock in a scratch directory and renamed into place) and this daemon's copies of template RAM on tmpfs, which VMs map.
Never does: sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import structlog

from forkyard.errors import CommandNotFound, ForkyardError, SnapshotCorrupt, TemplateBuildFailed
from forkyard.guest.base import Connector, Guest
from forkyard.guest.code import BROUGHT
from forkyard.host import errand
from forkyard.host.cache import MANIFEST, used_now
from forkyard.host.foundry import Foundry
from forkyard.host.journal import Journal
from forkyard.images import BaseImage, Progress, agent_archive, ensure_program
from forkyard.models import Milestone, Shape
from forkyard.storage.durable import sync
from forkyard.vmm.base import BootSource, Driver, SnapshotFiles, Vm

log = structlog.get_logger(__name__)

AGENT_DIR = Path(__file__).parent.parent / "guest_agent"

#: Part of the key: change it when what is done to a machine before it is saved changes.
RECIPE = 3

#: A machine that booted by itself has no template: its RAM is a private copy of zeros.
ZEROS = "zero-"

#: Run once before the snapshot, so that the usual tools are in the page cache of every sandbox. Failure is not fatal.
WARM_UP = (
    "bash -lc true",
    "sh -c 'ls / | cat'",
    "python3 -c 'import json, subprocess, asyncio, pathlib, re, uuid'",
    "git --version",
    "node -e 0",
    "sudo -u user bash -lc true",
    "tar --version && grep -V && sed --version && env",
    "for tool in cat cp mv rm mkdir find head tail sort curl; do $tool --version; done",
    "true",
)
#: A new vmgenid is told by an ACPI event. A kernel without a driver for it (Debian's cloud kernel) would interpret much code
#: to find that out, in every machine that wakes up; it learns of the restore from the agent.
NO_VMGENID_EVENT = "test -e /sys/bus/acpi/drivers/vmgenid || echo disable > /sys/firmware/acpi/interrupts/gpe05"
#: Longer than the kernel puts anything off that is much work (write-back begins after 5 s).
SETTLE_S = 7.0


#: The agent sets the network up as soon as the card is found. Says yes when it is. On a host with much to do the driver of
#: the card can come long after everything else.
NETWORK_UP = "until grep -q '^eth0.*0003' /proc/net/route; do sleep 0.2; done; echo yes"
NETWORK_UP_S = 120.0
#: For whoever reads why it did not.
NETWORK_STATE = "ls /sys/class/net; cat /proc/net/route; dmesg | grep -i -e virtio -e eth0 | tail -n 5"


#: What the interpreter that was brought into an image of others does there: wait for the network card, grow the
#: file system to the size of its disk, write everything out.
FOREIGN_SETTLE = """
import fcntl, os, struct, time
for _ in range(100):
    with open("/proc/net/route") as routes:
        if any(line.startswith("eth0") and line.split()[3] == "0003" for line in routes):
            print("network up")
            break
    time.sleep(0.1)
root, disk = os.open("/", os.O_RDONLY), os.open("/dev/vda", os.O_RDONLY)
blocks = os.lseek(disk, 0, os.SEEK_END) // os.statvfs("/").f_bsize
fcntl.ioctl(root, 0x40086610, struct.pack("Q", blocks))  # EXT4_IOC_RESIZE_FS
os.sync()
"""
FOREIGN_WARM_UP = (
    *("true", "sh -c 'ls / | cat'", "bash -lc true"),
    *("python3 -c 'import json, subprocess, asyncio'", "node -e 0", "git --version"),
    "true",
)

#: A shape, and the key of an image that is not the base image.
Kind = tuple[Shape, str | None]


@dataclass(frozen=True)
class Template:
    key: str
    snapshot: SnapshotFiles
    milestones: list[Milestone]


def tree_hash(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(directory)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def template_key(image_key: str, agent_hash: str, driver_fingerprint: str, shape: Shape) -> str:
    parts = [str(RECIPE), image_key, agent_hash, driver_fingerprint, shape.model_dump_json(), *WARM_UP]
    parts += [FOREIGN_SETTLE, *FOREIGN_WARM_UP]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


class Templates:
    def __init__(
        self,
        *,
        cache_dir: Path,
        ram_dir: Path,
        driver: Driver,
        connect: Connector,
        journal: Journal,
        foundry: Foundry,
        image: BaseImage,
        boot_timeout_s: float,
    ) -> None:
        self._dir = cache_dir / "templates"
        self._ram_dir = ram_dir
        self._driver = driver
        self._connect = connect
        self._journal = journal
        self._foundry = foundry
        self._image = image
        self._boot_timeout_s = boot_timeout_s
        self._ready: dict[Kind, Template] = {}
        self._locks: dict[Kind, asyncio.Lock] = {}
        self._loading: dict[str, asyncio.Lock] = {}

    async def ensure(self, shape: Shape, progress: Progress, image: BaseImage | None = None) -> Template:
        """The template of this shape; built if this is its first use on this machine."""
        kind = (shape, None if image is None else image.key)
        if self._is_ready(kind):
            return self._ready[kind]
        async with self._locks.setdefault(kind, asyncio.Lock()):
            if not self._is_ready(kind):
                self._ready[kind] = await self._load(await self.build(shape, progress, image))
            return self._ready[kind]

    def _is_ready(self, kind: Kind) -> bool:
        """Unless it was removed from the cache, with its image."""
        return kind in self._ready and (self._dir / self._ready[kind].key / MANIFEST).exists()

    def loaded(self) -> list[Path]:
        return [self._dir / template.key for template in self._ready.values()]

    def milestones(self, key: str) -> list[Milestone]:
        with contextlib.suppress(OSError, ValueError, KeyError):
            manifest = json.loads((self._dir / key / MANIFEST).read_text())
            return [Milestone(**m) for m in manifest["milestones"]]
        return []

    async def build(self, shape: Shape, progress: Progress, image: BaseImage | None = None) -> str:
        """Make sure that the template of this shape is in the cache; returns its key."""
        image = image or self._image
        agent_hash = await asyncio.to_thread(tree_hash, AGENT_DIR)
        key = template_key(image.key + image.made_at, agent_hash, self._driver.fingerprint, shape)
        final = self._dir / key
        self._dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        async with self._build_lock(key):
            if not (final / MANIFEST).exists():
                await self._build(key, image, shape, final, progress)
            used_now(final)
        return key

    async def _load(self, key: str) -> Template:
        """Put a template's RAM on tmpfs, where VMs map it."""
        directory = self._dir / key
        ram = self._ram_dir / f"{key}.ram"
        # After a restart, the first sleeper that wakes wants it in the same moment as whoever makes it ready for creates.
        async with self._loading.setdefault(key, asyncio.Lock()):
            if not ram.exists():
                self._ram_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
                partial = ram.with_suffix(".partial")
                await _sparse_copy(directory / "ram", partial)
                partial.chmod(0o444)
                partial.rename(ram)
        files = SnapshotFiles(ram, directory / "device-state", directory / "disk.qcow2")
        return Template(key, files, self.milestones(key))

    async def boot_source(self, image: BaseImage | None = None) -> BootSource:
        """What a machine boots with: the kernel of its image, whose drivers are on its disk, and an initramfs that brings
        the agent."""
        image = image or self._image
        agent_hash = await asyncio.to_thread(tree_hash, AGENT_DIR)
        initramfs = self._dir / f"initramfs-{image.key}-{agent_hash[:12]}"
        if not initramfs.exists():
            programs = {}
            for name in ("front", "init"):
                program = await asyncio.to_thread(ensure_program, AGENT_DIR / f"{name}.c", self._dir.parent)
                programs[name] = program.read_bytes()
            archive = await asyncio.to_thread(agent_archive, AGENT_DIR, programs)
            partial = initramfs.with_name(f".{initramfs.name}.{os.getpid()}")
            partial.write_bytes(image.initramfs.read_bytes() + archive)
            partial.chmod(0o444)
            partial.rename(initramfs)
        return BootSource(image.kernel, initramfs, image.disk)

    async def ram_of(self, base: str, shape: Shape) -> Path:
        """The RAM that a snapshot's pages differ from, on tmpfs."""
        ram = self._ram_dir / f"{base}.ram"
        if not ram.exists():
            if base.startswith(ZEROS):
                self._ram_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
                with ram.open("wb") as file:
                    file.truncate(shape.memory_mib << 20)
                ram.chmod(0o444)
            elif (self._dir / base / MANIFEST).exists():
                await self._load(base)
            else:
                raise SnapshotCorrupt(
                    f"the template {base} it rests on is no longer in the cache. Its disk may be: resume(memory=False)"
                )
        return ram

    def forget_ram(self, used: Collection[str]) -> None:
        """Give back the memory of templates that no running VM needs."""
        if self._ram_dir.is_dir():
            for path in self._ram_dir.iterdir():
                if path.name not in {f"{key}.ram" for key in used}:
                    path.unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def _build_lock(self, key: str) -> AsyncIterator[None]:
        """Held across processes: daemons that share a cache build a template once."""
        fd = os.open(self._dir / f".{key}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            await asyncio.to_thread(fcntl.flock, fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    async def _build(self, key: str, image: BaseImage, shape: Shape, final: Path, progress: Progress) -> None:
        if shape.disk_gib < image.min_disk_gib:
            raise TemplateBuildFailed(
                f"disk_gib={shape.disk_gib} is smaller than the base image; ask for at least {image.min_disk_gib}"
            )
        scratch = self._dir / f".building-{key}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(mode=0o755)
        self._ram_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        ram = self._ram_dir / f"{key}.building"
        ram.unlink(missing_ok=True)
        entry = self._foundry.new_entry(f"template-{key}", shape, key, scratch / "disk.qcow2")
        record = self._journal.record(entry)
        started = time.monotonic()
        try:
            self._journal.forget(entry)
            await self._foundry.begin(entry)
            vm = await self._driver.boot(record, await self.boot_source(image), ram)
            guest: Guest | None = None
            try:
                async with asyncio.timeout(self._boot_timeout_s):
                    guest, milestones = await self._settle(vm, started, progress, foreign=image is not self._image)
                progress("template: saving", 0.95)
                # Saved while we are connected: a restored agent waits for its host instead of finding it gone.
                await vm.stop()
                await vm.save(scratch / "device-state")
            except TimeoutError:
                raise TemplateBuildFailed(
                    f"the machine did not become ready within {self._boot_timeout_s:.0f} s; its console ended with:\n"
                    + console_tail(vm.console_log, 2000)
                ) from None
            except ForkyardError as error:
                raise TemplateBuildFailed(
                    f"{error.message}\nIts console ended with:\n{console_tail(vm.console_log, 2000)}"
                ) from error
            finally:
                if guest is not None:
                    await guest.aclose()
                await vm.kill()
            await _sparse_copy(ram, scratch / "ram")
            os.chown(scratch / "disk.qcow2", 0, 0)
            for name in ("disk.qcow2", "device-state", "ram"):
                (scratch / name).chmod(0o444)
            manifest = {
                "key": key,
                "image": image.key,
                "shape": shape.model_dump(),
                "accel": self._driver.accel,
                "milestones": [m.model_dump() for m in milestones],
                "built_in_s": round(time.monotonic() - started, 1),
            }
            (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1))
            await asyncio.to_thread(_sync_tree, scratch)
            shutil.rmtree(final, ignore_errors=True)
            scratch.rename(final)
            log.info("template built", key=key, shape=str(shape), seconds=manifest["built_in_s"])
        finally:
            await self._foundry.remove(entry)
            ram.unlink(missing_ok=True)
            shutil.rmtree(scratch, ignore_errors=True)

    async def _settle(
        self, vm: Vm, started: float, progress: Progress, *, foreign: bool
    ) -> tuple[Guest, list[Milestone]]:
        """Wait until the machine and the agent are done, then use the usual tools once."""
        milestones: dict[str, Milestone] = {}

        def note(name: str) -> None:
            if name not in milestones:
                milestones[name] = Milestone(name=name, at_ms=round((time.monotonic() - started) * 1000, 1))
                progress(f"template: booting ({name})", min(0.1 + 0.12 * len(milestones), 0.6))

        progress("template: booting", 0.1)
        await vm.cont()
        watcher = asyncio.create_task(_watch_console(vm.console_log, note))
        ended = asyncio.create_task(vm.wait())
        guest_task = asyncio.create_task(self._connect(str(vm.agent_socket), timeout_s=self._boot_timeout_s))
        try:
            await asyncio.wait({ended, guest_task}, return_when=asyncio.FIRST_COMPLETED)
            if not guest_task.done():
                raise TemplateBuildFailed(f"the machine ended while it booted: {ended.result().detail}")
            guest = await guest_task
            note("agent")
            await (_use_foreign(guest, note) if foreign else _use(guest, note, progress))
            # What a kernel puts off (freeing, flushing, timers) would else be done by every sandbox again when it wakes up.
            await asyncio.sleep(SETTLE_S)
            return guest, sorted(milestones.values(), key=lambda m: m.at_ms)
        finally:
            for task in (watcher, ended, guest_task):
                task.cancel()


async def _use(guest: Guest, note: Callable[[str], None], progress: Progress) -> None:
    """Of our own image we know what is in it, and that all of it works."""
    state = await errand.run(guest, "systemctl is-system-running --wait")
    if state != "running":
        failed = await errand.run(guest, "systemctl --failed --no-legend --plain")
        raise TemplateBuildFailed(f"systemd reports {state!r}: {failed}")
    note("systemd-running")
    if await errand.run(guest, NETWORK_UP, NETWORK_UP_S) != "yes":
        found = await errand.run(guest, NETWORK_STATE)
        raise TemplateBuildFailed(f"its network card did not come up in {NETWORK_UP_S:.0f} s:\n{found}")
    note("network")
    progress("template: warming up", 0.7)
    await errand.run(guest, "resize2fs /dev/vda")
    for command in (*WARM_UP, NO_VMGENID_EVENT):
        await errand.run(guest, command)
    # Keys that every sandbox of this template has identify none of them; a boot makes new ones.
    await errand.run(guest, "rm -f /etc/ssh/ssh_host_*_key*")
    await errand.run(guest, "journalctl --sync; sync")


async def _use_foreign(guest: Guest, note: Callable[[str], None]) -> None:
    """An image of others may lack everything, and its services may fail as they like."""
    if await guest.exists("/opt/forkyard/system"):
        note(f"systemd-{await errand.run(guest, ['systemctl', 'is-system-running', '--wait'])}"[:40])
    said = await errand.run(guest, [*BROUGHT, "-c", FOREIGN_SETTLE])
    if "network up" not in said:
        raise TemplateBuildFailed(f"its network card did not come up: {said[-500:]}")
    note("network")
    for command in FOREIGN_WARM_UP:
        with contextlib.suppress(CommandNotFound):
            await errand.run(guest, command)


async def _watch_console(console: Path, note: Callable[[str], None]) -> None:
    mark = "forkyard: milestone "
    while True:
        with contextlib.suppress(OSError):
            for line in console.read_text(errors="replace").splitlines():
                if mark in line:
                    note(line.split(mark, 1)[1].strip()[:40])
        await asyncio.sleep(0.1)


def console_tail(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""


async def _sparse_copy(source: Path, target: Path) -> None:
    # cp copies only what is not a hole, and turns zero pages into holes.
    process = await asyncio.create_subprocess_exec(
        "cp", "--sparse=always", "--", str(source), str(target), stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    if process.returncode:
        target.unlink(missing_ok=True)
        raise TemplateBuildFailed(f"could not copy {source} to {target}: {err.decode(errors='replace').strip()}")


def _sync_tree(directory: Path) -> None:
    for path in [*directory.iterdir(), directory]:
        sync(path)
