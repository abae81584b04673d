"""A VM's disk: a qcow2 of its own over a read-only chain, and how QEMU is told of it.

Owns: making an empty overlay, and the shape of QEMU's block graph, the same however a VM was started:

    virtio-blk -> "disk" (raw: passes all through) -> "top-N" (qcow2, written) -> sealed qcow2s … -> raw base

QEMU starts with `placeholder` in place of the top, so that it can be started before its disk exists. Sealing puts a new
top on the old one, with a higher number. Slots for volumes are the same, "volume-S" and "volume-S-top-N"; the placeholder of
an empty one has no bytes.
Never does: deciding where a disk is, or removing one that was in use.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from forkyard.errors import HostFailure, VmCrashed
from forkyard.vmm.base import VmRecord

GIB = 1 << 30
ROOT_NODE, PLACEHOLDER = "disk", "placeholder"
_TOP = re.compile(r"(?:volume-(?P<slot>[0-9]+)-)?top-(?P<number>[0-9]+)")
_CLUSTER = 1 << 16
_L2_REACH = _CLUSTER * (_CLUSTER // 8)  # bytes of disk under one entry of the first-level table


@dataclass(frozen=True)
class Top:
    """The qcow2 a VM writes to."""

    number: int
    path: Path
    slot: int | None = None  # of a volume; None: the root disk
    size_bytes: int = 0  # of a volume

    @property
    def node(self) -> str:
        return f"{'' if self.slot is None else f'{volume_node(self.slot)}-'}top-{self.number}"

    def next(self, path: Path) -> Top:
        return replace(self, number=self.number + 1, path=path)

    def options(self, **extra: Any) -> dict[str, Any]:
        return {
            "driver": "qcow2",
            "node-name": self.node,
            "discard": "unmap",
            "file": {"driver": "file", "filename": str(self.path), "aio": "threads", "discard": "unmap"},
            **extra,
        }


def volume_node(slot: int) -> str:
    return f"volume-{slot}"


def placeholder(slot: int) -> str:
    return f"empty-{slot}"


def attach(top: Top) -> list[tuple[str, dict[str, Any]]]:
    """The commands that put a disk in the placeholder's place."""
    options = root_options(top.node) if top.slot is None else volume_options(top.slot, top.node)
    return [("blockdev-add", top.options()), ("blockdev-reopen", {"options": [options]})]


def take_out(top: Top) -> list[tuple[str, dict[str, Any]]]:
    """The commands that make a slot empty again, as its guest sees it, too."""
    assert top.slot is not None
    return [
        ("block_resize", {"node-name": volume_node(top.slot), "size": 0}),
        ("blockdev-reopen", {"options": [volume_options(top.slot, placeholder(top.slot))]}),
        ("blockdev-del", {"node-name": top.node}),
    ]


def announce(top: Top) -> tuple[str, dict[str, Any]]:
    """The command that lets a guest see that a slot is no longer empty. (It has that size already.)"""
    assert top.slot is not None
    return "block_resize", {"node-name": volume_node(top.slot), "size": top.size_bytes}


def root_options(below: str) -> dict[str, str]:
    return {"driver": "raw", "node-name": ROOT_NODE, "file": below, "discard": "unmap"}


def volume_options(slot: int, below: str) -> dict[str, str]:
    return {**root_options(below), "node-name": volume_node(slot)}


def is_top(node: str, slot: int | None = None) -> bool:
    found = _TOP.fullmatch(node)
    return found is not None and found["slot"] == (None if slot is None else str(slot))


class Tops(NamedTuple):
    root: Top
    volumes: dict[int, Top]
    prepared: list[str]


def tops(nodes: list[dict[str, Any]]) -> Tops:
    """From the answer to `query-named-block-nodes`: the disks in use, and nodes that were prepared for a sealing which never
    came (their daemon died)."""
    in_use: dict[int | None, Top] = {}
    prepared: list[str] = []
    for node in nodes:
        name = str(node.get("node-name", ""))
        found = _TOP.fullmatch(name)
        if found is None:
            continue
        # One that was only prepared stands on nothing.
        if not node.get("backing_file"):
            prepared.append(name)
            continue
        slot = None if found["slot"] is None else int(found["slot"])
        size_bytes = 0 if slot is None else int(node["image"]["virtual-size"])
        top = Top(int(found["number"]), Path(node["file"]), slot, size_bytes)
        if slot not in in_use or in_use[slot].number < top.number:
            in_use[slot] = top
    if None not in in_use:
        raise VmCrashed("this VM has no disk: its start was never finished")
    root = in_use.pop(None)
    return Tops(root, {slot: top for slot, top in in_use.items() if slot is not None}, prepared)


def make_overlay(
    path: Path, backing: Path, backing_format: str, record: VmRecord, size_bytes: int | None = None
) -> None:
    """Blocking: an empty qcow2 over `backing`, owned by the VM's user; as large as its root disk if nothing is said."""
    backing = backing.absolute()
    if not backing.is_file():
        raise HostFailure(f"could not make disk {path}: {backing}, which it stands on, does not exist")
    pieces = empty_overlay(backing, backing_format, size_bytes or record.shape.disk_gib * GIB)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HostFailure(f"could not make disk {path}: {error.strerror}") from error
    try:
        for offset, content in pieces:
            os.pwrite(fd, content, offset)
        os.fchown(fd, record.uid, record.uid)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise HostFailure(f"could not make disk {path}: {error.strerror}") from error
    finally:
        os.close(fd)


def seal(path: Path) -> None:
    """Blocking: from now on nobody writes this disk."""
    os.chown(path, 0, 0)
    path.chmod(0o444)


def empty_overlay(backing: Path, backing_format: str, size_bytes: int) -> list[tuple[int, bytes]]:
    """An empty qcow2 (version 3) as pieces of a file. `qemu-img create` does the same in 20 ms, and every fork waits for it.

    Four clusters: header, table of reference counts, the first block of counts (these four clusters are used once), and the
    first-level table of the disk, in which nothing is allocated.
    """
    name, kind = os.fsencode(backing), backing_format.encode()
    format_extension = struct.pack(">II", 0xE2792ACA, len(kind)) + kind.ljust(-(-len(kind) // 8) * 8, b"\0")
    end_of_extensions = bytes(8)
    fixed_bytes = 104
    name_offset = fixed_bytes + len(format_extension) + len(end_of_extensions)
    if len(name) > 1023:
        raise HostFailure(f"the path {backing} is longer than a disk can refer to; choose a shorter directory")
    header = struct.pack(
        ">4sIQIIQIIQQIIQQQQII",
        *(b"QFI\xfb", 3),
        *(name_offset, len(name)),
        *(_CLUSTER.bit_length() - 1, size_bytes, 0),  # cluster size, disk size, not encrypted
        *(-(-size_bytes // _L2_REACH), 3 * _CLUSTER),  # first-level table: entries, offset
        *(_CLUSTER, 1),  # table of reference counts: offset, clusters
        *(0, 0),  # no internal snapshots
        *(0, 0, 0),  # no special features
        *(4, fixed_bytes),  # counts are of 2**4 bits
    )
    return [
        (0, header + format_extension + end_of_extensions + name),
        (_CLUSTER, struct.pack(">Q", 2 * _CLUSTER)),
        (2 * _CLUSTER, struct.pack(">4H", 1, 1, 1, 1)),
        (4 * _CLUSTER - 8, bytes(8)),
    ]
