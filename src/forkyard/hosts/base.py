"""What the control plane asks of a host. `host/` implements it in process; a remote one will speak it over the wire.

Names are always (sandbox, incarnation), so that a late command can never touch a newer machine of the same sandbox.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from forkyard.errors import ForkyardError
from forkyard.guest.base import Guest
from forkyard.models import Check, Milestone, SandboxLogs, Shape
from forkyard.models.bases import ImageConfig, ImageInfo
from forkyard.models.network import EgressRecord
from forkyard.models.volumes import VolumeMode
from forkyard.net.base import Network, Traffic
from forkyard.vmm.base import VmExit, VmUsage


@dataclass(frozen=True)
class Incarnation:
    """One machine of one sandbox."""

    sandbox_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.sandbox_id}-{self.number}"


@dataclass(frozen=True)
class Created:
    template: str
    milestones: list[Milestone]


@dataclass(frozen=True)
class Ended:
    """A machine ended without being asked to."""

    incarnation: Incarnation
    exit: VmExit


@dataclass(frozen=True)
class Recovered:
    """What a host found of an earlier daemon's machines when it started."""

    adopted: frozenset[Incarnation]  # running
    paused: frozenset[Incarnation]  # resumable: memory is kept by a stopped VM, or whole on disk
    stopped: frozenset[Incarnation]  # only the disk is left: can be booted
    #: Journalled, but no longer running. They are kept until `destroy` so that logs can be read.
    dead: frozenset[Incarnation]
    rebooted: bool  # the host itself was restarted since


@dataclass(frozen=True)
class Mount:
    """A volume as a machine is to have it."""

    volume_id: str
    path: str
    mode: VolumeMode
    version: int | None = None  # None: the newest
    draft: bool = False  # `rw`, but nothing of what is written is the volume's unless it is committed

    @property
    def given(self) -> VolumeMode:
        """What the machine has: of a draft, a copy."""
        return "cow" if self.draft else self.mode


@dataclass(frozen=True)
class VolumeVersion:
    number: int
    size_bytes: int  # of the volume
    kept: bool  # else it goes when there is a newer one
    source: str | None  # the sandbox that wrote it
    created_at: float


@dataclass(frozen=True)
class CreateSpec:
    shape: Shape
    env: Mapping[str, str] = field(default_factory=dict)
    snapshot_id: str | None = None  # start from this instead of the template of the shape
    network: Network = field(default_factory=Network)
    #: Those that a snapshot was made with are in it; here they have the mode that they are to have now.
    volumes: tuple[Mount, ...] = ()
    image: str | None = None  # id of an imported image, instead of the base image


@dataclass(frozen=True)
class Forked:
    """What became of a fork; `children` in the order they were asked for."""

    paused_ms: float
    children: list[Created | ForkyardError]


@dataclass(frozen=True)
class SnapshotMade:
    size_bytes: int
    paused_ms: float


@dataclass(frozen=True)
class Capacity:
    memory_mib: int
    disk_free_bytes: int


@dataclass(frozen=True)
class Load:
    """What a machine uses, as its host sees it."""

    cpu_s: float  # since it started
    memory_bytes: int  # of its memory, what it has touched; shared pages included
    disk_bytes: int  # that its disk occupies with all it rests on


class Images(Protocol):
    """The images of a host that machines are made of."""

    def base_config(self) -> ImageConfig:
        """What the base image says of itself."""
        ...

    async def find(self, name: str) -> ImageInfo | None:
        """By its id, or by what it was imported from."""
        ...

    async def all(self) -> list[ImageInfo]: ...

    async def delete(self, image_id: str) -> None:
        """And the templates made of it. `Conflict` if sandboxes or snapshots rest on it."""
        ...

    async def import_(
        self,
        name: str,
        *,
        archive: Path | None = None,
        credentials: tuple[str, str] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> ImageInfo:
        """Out of a registry, or out of a local archive. `InvalidImage` if no machine can be made of it,
        `RegistryUnreachable`. `tell` hears what is done. What was imported before under this name is replaced, or is the
        same."""
        ...


class Host(Protocol):
    @property
    def accel(self) -> str: ...

    @property
    def images(self) -> Images: ...

    async def start(self) -> Recovered:
        """Take over what a previous daemon left running. Called once, before anything else."""
        ...

    async def stop(self, *, destroy: bool = False) -> None:
        """Let go of all machines and leave them running; with `destroy`, end them."""
        ...

    async def create(self, incarnation: Incarnation, spec: CreateSpec) -> Created:
        """Restore a machine from the template of this shape (built first if need be); returns when its agent has
        answered. On any failure nothing is left."""
        ...

    async def destroy(self, incarnation: Incarnation) -> None:
        """End a machine and remove all it owns, its disk and its memory on disk included. Idempotent."""
        ...

    async def fork(
        self, source: Incarnation, children: Sequence[Incarnation], env: Mapping[str, str], network: Network
    ) -> Forked:
        """Running copies of `source`, which runs or is paused. One child that fails does not spoil the others. Volumes
        that it writes to are copies in its children, which write to their own."""
        ...

    async def pause(self, incarnation: Incarnation) -> None:
        """Stop the CPUs and keep the memory: a resume takes milliseconds. If it fails the machine runs on."""
        ...

    async def cool(self, incarnation: Incarnation) -> None:
        """Move the memory of a paused machine to disk and end its process; it then costs nothing and survives a
        reboot of the host. If it fails (disk full, say) the machine stays paused as it was. Idempotent."""
        ...

    async def resume(self, incarnation: Incarnation, successor: Incarnation, network: Network) -> Incarnation:
        """Let a paused machine go on. Returns which it is now: itself, or `successor` if its process had ended (then,
        as after `boot` and `rollback`, what is left of `incarnation` is there until it is destroyed: a way back).
        `SnapshotCorrupt` if what is on disk is not what was written; the disk can still be booted."""
        ...

    async def power_off(self, incarnation: Incarnation) -> None:
        """Shut a running or paused machine down; only its disk remains."""
        ...

    async def boot(self, incarnation: Incarnation, successor: Incarnation, spec: CreateSpec) -> Created:
        """A machine `successor` that boots from the disk of `incarnation`, in any shape with a disk at least as large.
        Memory kept for `incarnation` is dropped once it runs."""
        ...

    async def snapshot(self, incarnation: Incarnation, snapshot_id: str) -> SnapshotMade:
        """Save a machine that runs or is paused; it goes on. Durable when this returns."""
        ...

    async def rollback(self, incarnation: Incarnation, successor: Incarnation, spec: CreateSpec) -> Created:
        """Replace a machine, in whatever state, by one restored from `spec.snapshot_id`. If that fails, nothing
        has changed."""
        ...

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """Machines that were started from it are not affected. Idempotent."""
        ...

    async def find_in_snapshot(self, snapshot_id: str, values: Sequence[bytes], *, parent: str | None) -> set[int]:
        """Which of the values are in its memory, or on its disk above that of the snapshot `parent`."""
        ...

    async def make_volume(self, volume_id: str, size_bytes: int, *, for_all: bool = False) -> None:
        """Empty. Durable when this returns. Idempotent. `for_all`: every user may change what any user puts there."""
        ...

    async def volume_versions(self, volume_id: str) -> list[VolumeVersion]:
        """Oldest first; empty if there is no such volume here. A machine that had it read-write leaves a new one."""
        ...

    async def keep_version(self, volume_id: str, number: int | None = None) -> VolumeVersion:
        """This version, or the newest, stays until it is dropped."""
        ...

    async def drop_version(self, volume_id: str, number: int) -> None: ...

    async def commit_volume(
        self, incarnation: Incarnation, path: str, *, force: bool, kept: bool = True
    ) -> VolumeVersion:
        """What a running machine has there becomes a new version, which stays if it is `kept`; the machine goes on. Unless
        `force`, `VolumeChanged` if its copy was made of an older version than the newest."""
        ...

    async def delete_volume(self, volume_id: str) -> None:
        """Machines that have copies of it keep them. Idempotent."""
        ...

    async def volume_bytes(self, volume_id: str) -> int:
        """What all its versions occupy on disk."""
        ...

    async def stored_bytes(self, incarnation: Incarnation) -> int:
        """What it occupies on disk: its own blocks, and its memory if that is there."""
        ...

    def capacity(self) -> Capacity:
        """What this host has, for admission."""
        ...

    def guest(self, incarnation: Incarnation) -> Guest:
        """Raises `SandboxNotFound` if it does not run here."""
        ...

    async def set_network(self, incarnation: Incarnation, network: Network) -> None:
        """From now on; open connections that are no longer allowed are ended. A machine that was adopted reaches nothing
        until this was called."""
        ...

    async def connect(self, incarnation: Incarnation, port: int) -> socket.socket:
        """A TCP connection to a port of the guest, also one that listens on its loopback only. Non-blocking.
        `PortClosed` if nothing listens."""
        ...

    def traffic(self, incarnation: Incarnation) -> Traffic:
        """What its door let through and refused since it was opened: by a start, a resume, or this daemon. Zero if it
        does not run here."""
        ...

    def egress(self) -> AsyncIterator[EgressRecord]:
        """Connections and DNS queries of all machines, when each is over. One consumer; if it is slow, `traffic` stays
        right but records are dropped, and a record says how many."""
        ...

    async def logs(self, incarnation: Incarnation) -> SandboxLogs: ...
    async def usage(self, incarnation: Incarnation) -> VmUsage: ...

    async def loads(self) -> Mapping[Incarnation, Load]:
        """Of all machines whose CPUs run. No guest is asked."""
        ...

    async def checks(self) -> list[Check]: ...

    def ended(self) -> AsyncIterator[Ended]:
        """Machines that end by themselves, as it happens. One consumer."""
        ...

    async def prepare(self, shape: Shape, image: str | None = None) -> str:
        """Make sure that the template of this shape exists; returns its key."""
        ...
