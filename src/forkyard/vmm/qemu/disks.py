"""A VM's disk: a qcow2 of its own over a read-only chain, and how QEMU is told of it.

Owns: making an empty overlay, and the shape of QEMU's block graph, the same however a VM was started:

    virtio-blk -> "disk" (raw: passes all through) -> "top-N" (qcow2, written) -> sealed qcow2s … -> raw base

QEMU starts with `placeholder` in place of the top, so that it can be started before its disk exists. Sealing puts a new
top on the old one, with a higher number.
Never does: deciding where a disk is, or removing one that was in use.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkyard.errors import HostFailure, VmCrashed
from forkyard.vmm.base import VmRecord

GIB = 1 << 30
ROOT_NODE, PLACEHOLDER = "disk", "placeholder"
_TOP = "top-"
_CLUSTER = 1 << 16
_L2_REACH = _CLUSTER * (_CLUSTER // 8)  # bytes of disk under one entry of the first-level table


@dataclass(frozen=True)
class Top:
    """The qcow2 a VM writes to."""

    number: int
    path: Path

    @property
    def node(self) -> str:
        return f"{_TOP}{self.number}"

    def options(self, **extra: Any) -> dict[str, Any]:
        return {
            "driver": "qcow2",
            "node-name": self.node,
            "discard": "unmap",
            "file": {"driver": "file", "filename": str(self.path), "aio": "threads", "discard": "unmap"},
            **extra,
        }


def attach(top: Top) -> list[tuple[str, dict[str, Any]]]:
    """The commands that put a disk in the placeholder's place."""
    return [
        ("blockdev-add", top.options()),
        ("blockdev-reopen", {"options": [root_options(top.node)]}),
    ]


def root_options(below: str) -> dict[str, str]:
    return {"driver": "raw", "node-name": ROOT_NODE, "file": below, "discard": "unmap"}


def is_top(node: str) -> bool:
    return node.startswith(_TOP)


def tops(nodes: list[dict[str, Any]]) -> tuple[Top, list[str]]:
    """From the answer to `query-named-block-nodes`: the disk in use, and nodes that were prepared for a sealing which never
    came (their daemon died)."""
    in_use: list[Top] = []
    prepared: list[str] = []
    for node in nodes:
        name = str(node.get("node-name", ""))
        if not name.startswith(_TOP):
            continue
        # One that was only prepared stands on nothing.
        if node.get("backing_file"):
            in_use.append(Top(int(name.removeprefix(_TOP)), Path(node["file"])))
        else:
            prepared.append(name)
    if not in_use:
        raise VmCrashed("this VM has no disk: its start was never finished")
    return max(in_use, key=lambda top: top.number), prepared


def make_overlay(path: Path, backing: Path, backing_format: str, record: VmRecord) -> None:
    """Blocking: an empty qcow2 over `backing`, owned by the VM's user."""
    backing = backing.absolute()
    if not backing.is_file():
        raise HostFailure(f"could not make disk {path}: {backing}, which it stands on, does not exist")
    pieces = empty_overlay(backing, backing_format, record.shape.disk_gib * GIB)
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
