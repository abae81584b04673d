"""What the control plane asks of a host. `host/` implements it in process; a remote one will speak it over the wire.

Names are always (sandbox, incarnation), so that a late command can never touch a newer machine of the same sandbox.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from forkyard.guest.base import Guest
from forkyard.models import Check, Milestone, SandboxLogs, Shape
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

    adopted: frozenset[Incarnation]
    #: Journalled, but no longer running. They are kept until `destroy` so that logs can be read.
    dead: frozenset[Incarnation]
    rebooted: bool  # the host itself was restarted since


@dataclass(frozen=True)
class CreateSpec:
    shape: Shape
    env: Mapping[str, str] = field(default_factory=dict)


class Host(Protocol):
    @property
    def accel(self) -> str: ...

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
        """End a machine and remove all it owns. Idempotent."""
        ...

    def guest(self, incarnation: Incarnation) -> Guest:
        """Raises `SandboxNotFound` if it does not run here."""
        ...

    async def logs(self, incarnation: Incarnation) -> SandboxLogs: ...
    async def usage(self, incarnation: Incarnation) -> VmUsage: ...
    async def checks(self) -> list[Check]: ...

    def ended(self) -> AsyncIterator[Ended]:
        """Machines that end by themselves, as it happens. One consumer."""
        ...

    async def prepare(self, shape: Shape) -> str:
        """Make sure that the template of this shape exists; returns its key."""
        ...
