"""The initramfs: what the kernel unpacks before there is a disk.

Owns: the newc cpio format, what the base initramfs holds (busybox, the modules a root disk needs, `/init`), and the
archive that carries the guest agent. Linux unpacks concatenated archives in order, so `base + agent_archive(dir)` is a
bootable initramfs and a new agent needs no new image.
Never does: running programs; the only files read are the agent's own.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

AGENT_UNIT = "forkyard-agent.service"

# Loaded by /init, with all they depend on. crc32c_generic is what ext4 asks the crypto API for by name, which no
# module dependency shows. The rest (console, rng, vmgenid) is udev's work, from the root disk.
ROOT_MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4")

_HEADER_BYTES = 110
_BLOCK_BYTES = 512


@dataclass(frozen=True)
class Entry:
    """One file or directory of an archive. `path` is relative to the root; `mode` includes the file type."""

    path: str
    mode: int
    data: bytes = b""


def directory(path: str) -> Entry:
    return Entry(path, stat.S_IFDIR | 0o755)


def regular_file(path: str, data: bytes, *, executable: bool = False) -> Entry:
    return Entry(path, stat.S_IFREG | (0o755 if executable else 0o644), data)


def cpio_newc(entries: Iterable[Entry]) -> bytes:
    """A newc archive: owner root, time 0, in the order given, so that equal entries give equal bytes.

    The result is padded to a multiple of 512 bytes; whatever archive follows is aligned as the kernel expects.
    """
    archive = bytearray()
    for inode, entry in enumerate(entries, start=1):
        archive += _record(entry, inode)
    archive += _record(Entry("TRAILER!!!", 0), 0)
    return bytes(archive + bytes(-len(archive) % _BLOCK_BYTES))


def _record(entry: Entry, inode: int) -> bytes:
    name = entry.path.encode() + b"\0"
    nlink = 2 if stat.S_ISDIR(entry.mode) else 1
    # ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor, namesize, check
    fields = (inode, entry.mode, 0, 0, nlink, 0, len(entry.data), 0, 0, 0, 0, len(name), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    name_padding = bytes(-(_HEADER_BYTES + len(name)) % 4)
    return header + name + name_padding + entry.data + bytes(-len(entry.data) % 4)


def module_order(modules_dep: str, wanted: Iterable[str]) -> list[str]:
    """Paths of the wanted modules and of all they need, each after what it needs.

    `modules_dep` is the text of depmod's `modules.dep`. A wanted module that is not in it is built into the kernel.
    """
    needs: dict[str, list[str]] = {}
    by_name: dict[str, str] = {}
    for line in modules_dep.splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
        by_name[PurePosixPath(path).name.split(".")[0].replace("-", "_")] = path

    order: list[str] = []

    def add(path: str) -> None:
        if path not in order:
            for needed in needs[path]:
                add(needed)
            order.append(path)

    for name in wanted:
        if name in by_name:
            add(by_name[name])
    return order


def base_archive(*, busybox: bytes, init: bytes, modules: Mapping[str, bytes]) -> bytes:
    """The initramfs of an image. `modules` are file names and contents, in the order of loading."""
    return cpio_newc(
        [
            *(directory(name) for name in ("bin", "dev", "proc", "sys", "newroot", "modules", "forkyard")),
            regular_file("bin/busybox", busybox, executable=True),
            regular_file("init", init, executable=True),
            regular_file("modules/order", "".join(f"{name}\n" for name in modules).encode()),
            *(regular_file(f"modules/{name}", data) for name, data in modules.items()),
        ]
    )


def agent_archive(agent_dir: Path, programs: Mapping[str, bytes]) -> bytes:
    """The guest agent as an archive: all its Python files, its programs and its systemd unit, under /forkyard/agent/."""
    files = sorted([*agent_dir.rglob("*.py"), agent_dir / AGENT_UNIT])
    names = [file.relative_to(agent_dir).as_posix() for file in files]
    folders = sorted({parent.as_posix() for name in names for parent in PurePosixPath("agent", name).parents} - {"."})
    return cpio_newc(
        [
            directory("forkyard"),
            *(directory(f"forkyard/{folder}") for folder in folders),
            *(
                regular_file(f"forkyard/agent/{name}", file.read_bytes())
                for name, file in zip(names, files, strict=True)
            ),
            *(regular_file(f"forkyard/agent/{name}", data, executable=True) for name, data in programs.items()),
        ]
    )
