"""The memory of a QEMU, seen from outside: where guest RAM is, which of its pages are the VM's own, and copying them.

Owns: the kernel interfaces for that (/proc/PID/maps and pagemap, PAGEMAP_SCAN, process_vm_readv and writev) and layer
files, which hold such pages (see `SnapshotFiles.layer`). All calls are blocking; the long ones let other threads run.
Never does: stopping a VM. Who copies from one that runs must ask again what was `written` meanwhile.

A page of RAM is one of: *shared* (unchanged, of the template's file), *layered* (of the layer file this VM was made from;
its mapping tells), or *private* (written by this VM).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import functools
import itertools
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from forkyard.errors import HostFailure, SnapshotFailed, VmCrashed
from forkyard.vmm.base import PageSink
from forkyard.vmm.qemu.shim import USERFAULTFD

PAGE = 4096
#: A part of an address space or of a file: where it begins and ends.
Run = tuple[int, int]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = _libc.process_vm_writev.restype = ctypes.c_ssize_t
_MAX_IOVECS = 1024
_BUFFER_BYTES = 256 * 1024

# linux/fs.h
_PAGEMAP_SCAN = 0xC0606610
_SCAN_PROTECT, _SCAN_CHECK_WATCHED = 1, 2
_WRITTEN, _FILE, _PRESENT, _SWAPPED = 2, 4, 8, 16
_SCAN_RUNS = 16384

# In a word of /proc/PID/pagemap, bit 63 is "present", 62 "swapped", 61 "of a file". They are all in its last byte.
_IS_PRIVATE = bytes(bool(byte & 0xC0) and not byte & 0x20 for byte in range(256))


@dataclass(frozen=True)
class Ram:
    """Guest RAM in the address space of its QEMU."""

    address: int
    size_bytes: int
    layered: tuple[Run, ...]  # parts of it that are mapped from a layer

    @property
    def run(self) -> Run:
        return self.address, self.address + self.size_bytes


def find_ram(maps: str, size_bytes: int, template: Path) -> Ram:
    """From the text of /proc/PID/maps. RAM is in many pieces once a layer is mapped. Its first page is always the
    template's, and the pieces that follow it are together as long as RAM is."""
    pieces: list[tuple[int, int, str]] = []
    address: int | None = None
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or fields[1] != "rw-p" or fields[4] == "0":
            continue
        start, end = (int(word, 16) for word in fields[0].split("-"))
        path = fields[5].removesuffix(" (deleted)")
        if address is None and path == str(template) and int(fields[2], 16) == 0:
            address = start
        if address is not None and end <= address + size_bytes:
            pieces.append((start, end, path))
    if address is None or sum(end - start for start, end, _ in pieces) != size_bytes:
        raise HostFailure(
            f"no private memory of {size_bytes >> 20} MiB is mapped in this QEMU; only sandboxes are captured"
        )
    layered = [(start, end) for start, end, path in pieces if path != str(template)]
    return Ram(address, size_bytes, tuple(merge(layered)))


def ram_of(pid: int, size_bytes: int) -> Ram:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError as error:
        raise VmCrashed(f"the QEMU with pid {pid} has ended") from error
    template = next((word[18:] for word in environment if word.startswith(b"FORKYARD_RAM_PATH=")), b"")
    return find_ram(maps, size_bytes, Path(os.fsdecode(template)))


def merge(runs: Iterable[Run], gap_bytes: int = 0) -> list[Run]:
    """In order, overlapping and adjoining ones made one, and those with a small gap between them too."""
    merged: list[Run] = []
    for start, end in sorted(runs):
        if merged and start <= merged[-1][1] + gap_bytes:
            if end > merged[-1][1]:
                merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return merged


def total(runs: Iterable[Run]) -> int:
    return sum(end - start for start, end in runs)


class PageTable:
    """What the kernel knows about the pages of a process."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise VmCrashed(f"the QEMU with pid {pid} has ended") from error
        self._found = array.array("Q", bytes(24 * _SCAN_RUNS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def private(self, area: Run) -> list[Run]:
        """Pages that are no file's: written, at some time."""
        return self._scan(area, 0, inverted=_FILE, mask=_FILE)

    def written(self, area: Run, *, ask_again: bool) -> list[Run]:
        """Private pages written since the last time this was asked with `ask_again`. Of an area that is watched.

        Whether a page is private costs a look at each, so it is asked only of those that a first look finds: written ones,
        and ones of the template that the guest has only read.
        """
        flags = _SCAN_CHECK_WATCHED | (_SCAN_PROTECT if ask_again else 0)
        return [page for run in self._scan(area, flags, mask=_WRITTEN) for page in self.private(run)]

    def private_slowly(self, area: Run) -> list[Run]:
        """The same as `private`, for kernels without PAGEMAP_SCAN (before Linux 6.7)."""
        runs: list[Run] = []
        step = 1 << 30
        for start in range(area[0], area[1], step):
            pages = (min(start + step, area[1]) - start) // PAGE
            marks = os.pread(self._fd, pages * 8, start // PAGE * 8)[7::8].translate(_IS_PRIVATE)
            runs += [(start + m.start() * PAGE, start + m.end() * PAGE) for m in re.finditer(rb"\x01+", marks)]
        return merge(runs)

    def _scan(self, area: Run, flags: int, *, mask: int, inverted: int = 0) -> list[Run]:
        start, end = area
        runs: list[Run] = []
        while start < end:
            # Only pages that are there: else every hole counts as written.
            what = (inverted, mask, _PRESENT | _SWAPPED, 0)
            found = (self._found.buffer_info()[0], _SCAN_RUNS, 0)
            argument = bytearray(struct.pack("12Q", 96, flags, start, end, 0, *found, *what))
            count = fcntl.ioctl(self._fd, _PAGEMAP_SCAN, argument)
            runs += zip(self._found[0 : 3 * count : 3], self._found[1 : 3 * count : 3], strict=True)
            (start,) = struct.unpack_from("Q", argument, 32)  # how far it came
        return runs


def why_not_live() -> str | None:
    """Why this machine's kernel cannot note what a VM writes while it is being copied; None if it can."""
    features = (1 << 0) | (1 << 12) | (1 << 15)  # write-protection, of tmpfs, asynchronous
    with contextlib.ExitStack() as opened:
        try:
            device = os.open(USERFAULTFD, os.O_RDWR | os.O_CLOEXEC)
            opened.callback(os.close, device)
            watcher = fcntl.ioctl(device, 0xAA00, os.O_CLOEXEC | os.O_NONBLOCK)
            opened.callback(os.close, watcher)
        except OSError as error:
            return f"{USERFAULTFD} cannot be used ({error.strerror})"
        try:
            fcntl.ioctl(watcher, 0xC018AA3F, bytearray(struct.pack("QQQ", 0xAA, features, 0)))
            with PageTable(os.getpid()) as table:
                table.private((0, PAGE))
        except OSError as error:
            return f"the kernel is older than Linux 6.7 ({error.strerror})"
    return None


class Place(NamedTuple):
    """Where a part of RAM is in a layer file."""

    start: int
    end: int
    offset: int


class RamReader:
    """Reads parts of a QEMU's RAM and hands them on."""

    def __init__(self, pid: int, ram: Ram, sink: PageSink) -> None:
        self._pid, self._ram, self._sink = pid, ram, sink
        # Read into here and written from here: faster than reading into a mapping of a file, where every new page is a
        # fault. It stays in the CPU's cache.
        self._buffer = bytearray(_BUFFER_BYTES)

    def save(self, runs: Iterable[Run]) -> None:
        content, address = memoryview(self._buffer), self._ram.address
        for batch in _batches(Place(start, end, start - address) for start, end in runs):
            there = [(start, end) for start, end, _ in batch]
            try:
                _copy(_libc.process_vm_readv, self._pid, there, self._buffer)
            except OSError as error:
                raise VmCrashed(f"the memory of pid {self._pid} cannot be read: {error.strerror}") from error
            self._sink.save([(start - address, end - address) for start, end in there], content[: total(there)])


class LayerFile:
    """A layer that is being filled. Zero pages are written too: a hole would mean the template's page."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SnapshotFailed(f"could not make {path}: {error.strerror}") from error
        os.truncate(self._fd, size_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.fchmod(self._fd, 0o444)
        os.close(self._fd)

    def save(self, runs: Sequence[Run], content: memoryview) -> None:
        at = 0
        for start, end in runs:
            self._write(content[at : at + end - start], start)
            at += end - start

    def _write(self, content: memoryview, offset: int) -> None:
        try:
            written = os.pwrite(self._fd, content, offset)
            if written != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise SnapshotFailed(f"could not save memory to {self._path}: {error.strerror}") from error


def data_runs(file: Path) -> list[Run]:
    """The parts of a layer file that are not holes."""
    return list(_data_runs(file))


def _data_runs(file: Path) -> Iterator[Run]:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = 0
        while True:
            try:
                start = os.lseek(fd, end, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # no data after here
                    return
                raise
            end = os.lseek(fd, start, os.SEEK_HOLE)
            yield start, end
    finally:
        os.close(fd)


def places(layer: Path, runs: Sequence[tuple[int, int]] | None) -> list[Place]:
    """Of a layer whose pages are at their own places, or stand one behind the other (see `SnapshotFiles.runs`)."""
    if runs is None:
        return list(_at_their_own_places(layer))
    found: list[Place] = []
    offset = 0
    for first, count in runs:
        found.append(Place(first * PAGE, (first + count) * PAGE, offset))
        offset += count * PAGE
    if all(one.end <= next_.start for one, next_ in itertools.pairwise(found)):
        return found
    # Some come again, and replace the first.
    last = {page: p.offset + page - p.start for p in found for page in range(p.start, p.end, PAGE)}
    joined: list[Place] = []
    for page, offset in sorted(last.items()):
        if joined and joined[-1].end == page and joined[-1].offset + page - joined[-1].start == offset:
            joined[-1] = joined[-1]._replace(end=page + PAGE)
        else:
            joined.append(Place(page, page + PAGE, offset))
    return joined


@functools.lru_cache(maxsize=8)
def _at_their_own_places(layer: Path) -> Sequence[Place]:
    """Remembered: all children of a fork ask, and nobody writes a layer that others read, or uses its name again."""
    return tuple(Place(start, end, start) for start, end in data_runs(layer))


def split(wanted: Iterable[Place], at: int) -> tuple[list[Place], list[Place]]:
    """What is before this place in RAM, and what is behind it."""
    before: list[Place] = []
    behind: list[Place] = []
    for place in wanted:
        if place.start < at:
            before.append(place._replace(end=min(place.end, at)))
        if place.end > at:
            start = max(place.start, at)
            behind.append(Place(start, place.end, place.offset + start - place.start))
    return before, behind


def copy_into(pid: int, ram: Ram, layer: Path, wanted: Iterable[Place]) -> None:
    """Write these parts of a layer file to their places in RAM."""
    buffer = bytearray(_BUFFER_BYTES)
    content = memoryview(buffer)
    with layer.open("rb", buffering=0) as file:
        for batch in _batches(wanted):
            at = 0
            for start, end, offset in batch:
                os.preadv(file.fileno(), [content[at : at + end - start]], offset)
                at += end - start
            try:
                there = [(ram.address + start, ram.address + end) for start, end, _ in batch]
                _copy(_libc.process_vm_writev, pid, there, buffer)
            except OSError as error:
                raise VmCrashed(f"the memory of pid {pid} cannot be written: {error.strerror}") from error


def _batches(places: Iterable[Place]) -> Iterator[list[Place]]:
    """As much as fits in a buffer, and in one call."""
    batch: list[Place] = []
    room = _BUFFER_BYTES
    for start, end, offset in places:
        while start < end:
            part = min(end - start, room)
            batch.append(Place(start, start + part, offset))
            start, offset, room = start + part, offset + part, room - part
            if room == 0 or len(batch) == _MAX_IOVECS:
                yield batch
                batch, room = [], _BUFFER_BYTES
    if batch:
        yield batch


def _copy(call: Any, pid: int, runs: Sequence[Run], buffer: bytearray) -> None:
    """process_vm_readv or writev of these parts of a process, to or from a buffer, one after the other."""
    size = total(runs)
    anchor = ctypes.c_char.from_buffer(buffer)
    ours = array.array("Q", [ctypes.addressof(anchor), size])
    theirs = array.array("Q", [word for start, end in runs for word in (start, end - start)])
    copied = call(
        ctypes.c_int(pid),
        *(ctypes.c_void_p(ours.buffer_info()[0]), ctypes.c_ulong(1)),
        *(ctypes.c_void_p(theirs.buffer_info()[0]), ctypes.c_ulong(len(runs))),
        ctypes.c_ulong(0),
    )
    if copied != size:
        number = ctypes.get_errno() if copied < 0 else errno.EFAULT
        raise OSError(number, os.strerror(number))
