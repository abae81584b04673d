"""The versions of volumes, `<state_dir>/volumes/<id>/<number>.json`. Each names a sealed disk among the others.

Owns: that a version is whole or not there, its number, which no other ever has, and which of them stay: those somebody
asked for, and the newest.
Never does: looking into a file system. What is in a volume was written by guests, and only guests read it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkyard.errors import HostFailure, VolumeNotFound
from forkyard.storage.disks import Disks, allocated_bytes, chain, seal
from forkyard.storage.durable import sync

#: Who owns an empty volume's top directory: the image's ordinary user; root may write there anyway.
_OWNER, _ROOT = "root_owner=1000:1000", "root_owner=0:0"
#: Of one that is for everybody: as /tmp, and what is made in there is everybody's too, whatever the maker's umask
#: (an ACL as `setxattr` takes it: version 2, and all may do all).
_EVERYBODY_MODE = "041777"
_EVERYBODY_ACL = struct.pack("<I" + 3 * "HHI", 2, 0x01, 7, 2**32 - 1, 0x04, 7, 2**32 - 1, 0x20, 7, 2**32 - 1)
_JOURNAL_MIB, _SMALL_JOURNAL_MIB = 8, 4
_SMALL_BYTES = 32 << 20  # the larger journal does not fit into 16 MiB
#: In a volume's directory: the highest number it has given away, once the version with it was deleted.
_HIGHEST = "highest"
_TOOL_TIMEOUT_S = 3600.0
#: A program that reads what a hypervisor wrote runs as nobody.
_NOBODY = 65534


@dataclass(frozen=True)
class Version:
    volume_id: str
    number: int
    disk: Path
    size_bytes: int
    kept: bool  # somebody asked for it; else it goes when there is a newer one
    source: str | None  # the sandbox that wrote it
    created_at: float


@dataclass(frozen=True)
class Mounted:
    """A volume in a slot of a machine, or of a saved one."""

    slot: int
    volume_id: str
    version: int  # that it began with
    path: str
    mode: str
    size_bytes: int
    disk: Path  # written to; sealed if the machine is a saved one
    next_disk: Path | None = None  # a capture is moving it there

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "disk": str(self.disk), "next_disk": str(self.next_disk) if self.next_disk else None}

    @classmethod
    def of_json(cls, body: dict[str, Any]) -> Mounted:
        following = body.get("next_disk")
        return cls(**{**body, "disk": Path(body["disk"]), "next_disk": Path(following) if following else None})


class Volumes:
    """Blocking: call it in a thread."""

    def __init__(self, directory: Path, disks: Disks) -> None:
        self._dir = directory
        self._disks = disks
        self._lock = threading.Lock()
        self._known: dict[str, dict[int, Version]] = {}
        self._highest: dict[str, int] = {}

    def load(self) -> None:
        """Called once, at the start."""
        if not self._dir.is_dir():
            return
        for path in self._dir.glob("*/*.json"):
            version = _read(path)
            if version is not None:
                self._known.setdefault(version.volume_id, {})[version.number] = version
        for path in self._dir.glob(f"*/{_HIGHEST}"):
            with contextlib.suppress(OSError, ValueError):
                self._highest[path.parent.name] = int(path.read_text())

    def make(self, volume_id: str, size_bytes: int, *, for_all: bool = False) -> Version:
        """An empty volume: version 1. `for_all`: every user may change what any user has put there."""
        disk = self._disks.new_path()
        try:
            make_empty(disk, size_bytes, for_all=for_all)
            return self.publish(volume_id, disk, size_bytes, kept=False, source=None)
        finally:
            self._disks.release(disk)

    def publish(self, volume_id: str, disk: Path, size_bytes: int, *, kept: bool, source: str | None) -> Version:
        """A new version: what this disk says. Durable when it returns. Publishing the newest's disk again changes nothing."""
        with self._lock:
            known = self._known.setdefault(volume_id, {})
            newest = known[max(known)] if known else None
            if newest is not None and newest.disk == disk:
                return newest
            seal(disk)
            sync(disk)
            number = max(max(known, default=0), self._highest.get(volume_id, 0)) + 1
            version = Version(volume_id, number, disk, size_bytes, kept, source, time.time())
            self._write(version)
            known[version.number] = version
            for old in [v for v in known.values() if not v.kept and v.number != version.number]:
                self._forget(old)
            return version

    def find(self, volume_id: str, number: int | None = None) -> Version:
        """The newest, if no number is said."""
        known = self._known.get(volume_id, {})
        if not known:
            raise VolumeNotFound(f"volume {volume_id} has nothing on this host")
        if number is None:
            return known[max(known)]
        if number not in known:
            there = ", ".join(str(n) for n in sorted(known))
            raise VolumeNotFound(f"the volume has no version {number}; it has {there}")
        return known[number]

    def versions(self, volume_id: str) -> list[Version]:
        return [version for _, version in sorted(self._known.get(volume_id, {}).items())]

    def keep(self, volume_id: str, number: int | None = None) -> Version:
        """It stays, whatever comes after it."""
        with self._lock:
            version = self.find(volume_id, number)
            kept = Version(**{**vars(version), "kept": True})
            self._write(kept)
            self._known[volume_id][kept.number] = kept
            return kept

    def drop(self, volume_id: str, number: int) -> None:
        with self._lock:
            version = self.find(volume_id, number)
            if version.number > self._highest.get(volume_id, 0) and version.number == max(self._known[volume_id]):
                # A copy may have begun with it: were the next one given its number, nobody would see that they differ.
                self._put(self._dir / volume_id / _HIGHEST, str(version.number))
                self._highest[volume_id] = version.number
            self._forget(version)

    def delete(self, volume_id: str) -> None:
        """Idempotent. The disks go when nothing rests on them."""
        with self._lock:
            self._known.pop(volume_id, None)
            self._highest.pop(volume_id, None)
            shutil.rmtree(self._dir / volume_id, ignore_errors=True)

    def ids(self) -> list[str]:
        return sorted(self._known)

    def disks(self) -> list[Path]:
        with self._lock:
            return [version.disk for known in self._known.values() for version in known.values()]

    def stored_bytes(self, volume_id: str) -> int:
        files = {path for version in self.versions(volume_id) for path in chain(version.disk)}
        return sum(allocated_bytes(path) for path in files)

    def own_bytes(self, top: Path) -> int:
        """What a mounted volume's disk occupies above the version it began with."""
        versions, total = set(self.disks()), 0
        for path in chain(top):
            if path in versions:
                break
            total += allocated_bytes(path)
        return total

    def fold(self, volume_id: str, longest: int) -> None:
        """A newest version that rests on many layers becomes one file. Others that rest on those layers keep them."""
        version = self.find(volume_id)
        if len(self._disks.layers(version.disk)) <= longest:
            return
        disk = self._disks.new_path()
        taken = False
        try:
            disk.touch(mode=0o600)
            os.chown(disk, _NOBODY, _NOBODY)
            _run("qemu-img", "convert", "-O", "qcow2", str(version.disk), str(disk), user=_NOBODY)
            seal(disk)
            sync(disk)
            with self._lock:
                if self._known.get(volume_id, {}).get(version.number) == version:
                    folded = Version(**{**vars(version), "disk": disk})
                    self._write(folded)
                    self._known[volume_id][version.number] = folded
                    taken = True
        finally:
            if not taken:  # the volume went on, or away, meanwhile
                disk.unlink(missing_ok=True)
            self._disks.release(disk)

    def _write(self, version: Version) -> None:
        path = self._dir / version.volume_id / f"{version.number}.json"
        self._put(path, json.dumps({**vars(version), "disk": str(version.disk)}))

    def _put(self, path: Path, text: str) -> None:
        """Whole or not there, and durable when it returns."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_suffix(".new")
        partial.write_text(text)
        sync(partial)
        partial.rename(path)
        for folder in (path.parent, self._dir):
            sync(folder)

    def _forget(self, version: Version) -> None:
        (self._dir / version.volume_id / f"{version.number}.json").unlink(missing_ok=True)
        self._known.get(version.volume_id, {}).pop(version.number, None)


def disks_of(mounted: Iterable[Mounted]) -> Iterable[Path]:
    for one in mounted:
        yield one.disk
        if one.next_disk is not None:
            yield one.next_disk


def _read(path: Path) -> Version | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        body = json.loads(path.read_text())
        return Version(**{**body, "disk": Path(body["disk"])})
    return None


def make_empty(disk: Path, size_bytes: int, *, for_all: bool = False) -> None:
    """A file system made here, on a file that no guest has seen."""
    with tempfile.TemporaryDirectory(dir=disk.parent.parent) as scratch:
        raw = Path(scratch) / "volume"
        with raw.open("wb") as file:
            file.truncate(size_bytes)
        _run(
            *("mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0"),
            *("-E", f"{_ROOT if for_all else _OWNER},assume_storage_prezeroed=1"),
            *("-J", f"size={_SMALL_JOURNAL_MIB if size_bytes < _SMALL_BYTES else _JOURNAL_MIB}", str(raw)),
        )
        _run("debugfs", "-w", "-R", "rmdir lost+found", str(raw))
        if for_all:
            (Path(scratch) / "acl").write_bytes(_EVERYBODY_ACL)
            _run("debugfs", "-w", "-R", f"set_inode_field / mode {_EVERYBODY_MODE}", str(raw))
            _run("debugfs", "-w", "-R", f'ea_set -f "{scratch}/acl" / system.posix_acl_default', str(raw))
        _run("qemu-img", "convert", "-O", "qcow2", str(raw), str(disk))


def _run(*argv: str, user: int | None = None) -> None:
    options: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_TOOL_TIMEOUT_S, check=False, **options)
    except FileNotFoundError:
        raise HostFailure(f"{argv[0]} is not installed; run: apt install e2fsprogs qemu-utils") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise HostFailure(f"{argv[0]} failed: {error}") from error
    if done.returncode:
        raise HostFailure(f"{argv[0]} failed: {done.stderr.decode(errors='replace').strip()[:500]}")
