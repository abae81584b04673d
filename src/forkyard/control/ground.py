"""What all verbs stand on: records, moves between states, turns, activity.

Owns: how a record becomes an answer, and how a state refuses a verb. Never does: a verb.
"""

from __future__ import annotations

import asyncio
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from forkyard.control.activity import Activity
from forkyard.control.ingress import Ingress
from forkyard.control.placement import Limits, admit
from forkyard.control.turns import Turns
from forkyard.errors import ForkyardError, InternalError, SandboxEnded, SandboxNotFound, StateConflict
from forkyard.hosts.base import CreateSpec, Host, Incarnation, Mount
from forkyard.lifecycle import ENDED, Cause, State
from forkyard.models import SandboxInfo, Shape
from forkyard.models.volumes import FILES_LABEL
from forkyard.net.base import Network
from forkyard.store.records import Admit, Load, SandboxRecord
from forkyard.store.sql import Store

log = structlog.get_logger(__name__)

DESTROY_DEADLINE_S = 120.0

_ALPHABET = string.ascii_lowercase + string.digits
_NEXT_STEP = {
    State.PAUSED: "resume it first",
    State.STOPPED: "start it first",
    State.RUNNING: "pause or stop it first",
}


def new_id() -> str:
    """Unguessable, and a legal host name: a letter, then 19 letters and digits (102 bits)."""
    return secrets.choice(string.ascii_lowercase) + "".join(secrets.choice(_ALPHABET) for _ in range(19))


def new_snapshot_id() -> str:
    return "sc-" + "".join(secrets.choice(_ALPHABET) for _ in range(20))


@dataclass(frozen=True)
class Hot:
    """A paused machine whose memory is not on disk yet, or not known to be."""

    memory_mib: int
    since: float  # on the clock of `Activity`


class NetworkOf(Protocol):
    async def __call__(self, record: SandboxRecord, *, fresh: bool = False) -> Network:
        """`fresh`: for a new machine; else for the one there is."""
        ...


class Prepare(Protocol):
    async def __call__(self, record: SandboxRecord, incarnation: Incarnation, *, unsure: bool = False) -> None:
        """A machine has just come to life, and nobody knows it yet. `unsure`: what its guest was told is not what the
        record says."""
        ...


class Ground:
    def __init__(self, store: Store, host: Host, limits: Limits) -> None:
        self.store = store
        self.host = host
        self.limits = limits
        self.turns = Turns()
        self.activity = Activity()
        self.ingress = Ingress()
        self.hot: dict[str, Hot] = {}
        #: What a machine of this sandbox is given, as of now. The control plane fills these in (`control.network`).
        self.network_of: NetworkOf = _closed
        self.env_of: Callable[[SandboxRecord], Mapping[str, str]] = lambda record: record.env
        self.prepare: Prepare = _as_it_is
        #: A machine is about to go: what is to be known of it must be looked at now.
        self.last_look: Callable[[Incarnation], None] = lambda _: None

    async def record(self, sandbox_id: str) -> SandboxRecord:
        record = await self.store.sandbox(sandbox_id)
        if record is None:
            raise SandboxNotFound(f"there is no sandbox {sandbox_id!r}; `forkyard ls --all` lists those there are")
        return record

    async def move(
        self, record: SandboxRecord, to: State, cause: Cause, detail: str | None = None, **changes: Any
    ) -> SandboxRecord:
        """The record after the move. Somebody else was first (a delete, or the end of the machine): an error that says
        what it is now."""
        self.last_look(machine(record))
        now = await self.store.transition(record.id, record.incarnation, record.state, to, cause, detail, **changes)
        if now is None:
            raise refusal(await self.record(record.id), "it changed meanwhile")
        if now.incarnation != record.incarnation:
            # Kept until now, so that there was a way back. From here on the record leads to the new machine, and nobody
            # need wait: if this daemon dies meanwhile, the next one finds a machine that no record names.
            self.turns.keep(
                asyncio.create_task(self.destroy_quietly(machine(record)), name=f"remove {machine(record)}")
            )
        return now

    async def move_back(self, record: SandboxRecord, to: State, cause: Cause, error: BaseException) -> None:
        """After a step that failed. If somebody else was first, there is nothing to take back."""
        detail = error.message if isinstance(error, ForkyardError) else "an unexpected error; the daemon's log has it"
        await self.store.transition(record.id, record.incarnation, record.state, to, cause, detail)

    async def spec_of(
        self, record: SandboxRecord, *, shape: Shape | None = None, snapshot_id: str | None = None
    ) -> CreateSpec:
        return CreateSpec(
            shape or record.shape,
            self.env_of(record),
            snapshot_id,
            await self.network_of(record, fresh=True),
            tuple(
                Mount(
                    *(one.volume_id, one.path, one.mode, one.version),
                    draft=one.mode == "rw" and FILES_LABEL in record.labels,  # all files are written, or none
                )
                for one in record.volumes
            ),
        )

    def admission(self, memory_mib: int, *, creates: bool = False, sandbox_id: str | None = None) -> Admit:
        """`sandbox_id`: a paused one, whose own memory is not counted against it."""
        capacity = self.host.capacity()
        held_mib = sum(hot.memory_mib for other, hot in self.hot.items() if other != sandbox_id)

        def check(load: Load) -> None:
            admit(self.limits, capacity, load, memory_mib, held_mib=held_mib, creates=creates)

        return check

    async def destroy_quietly(self, incarnation: Incarnation) -> None:
        try:
            async with asyncio.timeout(DESTROY_DEADLINE_S):
                await self.host.destroy(incarnation)
        except Exception:
            log.exception("leftovers could not be removed", vm=str(incarnation))


def machine(record: SandboxRecord) -> Incarnation:
    return Incarnation(record.id, record.incarnation)


def successor(record: SandboxRecord) -> Incarnation:
    return Incarnation(record.id, record.incarnation + 1)


async def _closed(record: SandboxRecord, *, fresh: bool = False) -> Network:  # noqa: ARG001
    return Network()


async def _as_it_is(record: SandboxRecord, incarnation: Incarnation, *, unsure: bool = False) -> None:
    pass


def refusal(record: SandboxRecord, what: str, next_step: str | None = None) -> ForkyardError:
    """Why the state of a sandbox does not allow a verb, in words."""
    if record.state in ENDED or record.state is State.DELETING:
        return ended(record)
    advice = next_step or _NEXT_STEP.get(record.state, "try again when that is done")
    return StateConflict(f"sandbox {record.id} is {record.state}: {what}; {advice}", state=record.state)


def ended(record: SandboxRecord) -> SandboxEnded:
    why = f": {record.cause_detail}" if record.cause_detail else ""
    hint = "; its disk is kept: start it again" if record.state is State.FAILED else ""
    return SandboxEnded(
        f"sandbox {record.id} has ended ({record.cause}){why}{hint}", state=record.state, cause=record.cause
    )


def known(error: Exception, what: str, sandbox_id: str) -> ForkyardError:
    """What a caller is told of an error of the host; what is not ours is logged and kept inside."""
    if isinstance(error, ForkyardError):
        return error
    log.error(f"{what} failed", sandbox=sandbox_id, exc_info=error)
    return InternalError()


def sandbox_info(record: SandboxRecord) -> SandboxInfo:
    return SandboxInfo(
        id=record.id,
        name=record.name,
        state=record.state,
        cause=record.cause,
        cause_detail=record.cause_detail,
        incarnation=record.incarnation,
        shape=record.shape,
        labels=dict(record.labels),
        annotations=dict(record.annotations),
        template=record.template,
        parent_id=record.parent_id,
        snapshot_id=record.snapshot_id,
        persistence=record.persistence,
        priority=record.priority,
        idle_timeout_s=record.idle_timeout_s,
        checkpoint_every_s=record.checkpoint_every_s,
        checkpoints_kept=record.checkpoints_kept,
        network=record.network,
        secret_names=sorted(record.secrets),
        identity_id=record.identity_id,
        volumes=list(record.volumes),
        activity_threshold_bytes=record.activity_threshold_bytes,
        expires_at=record.expires_at,
        on_ttl=record.on_ttl,
        last_active_at=record.last_active_at,
        created_at=record.created_at,
        updated_at=record.updated_at,
        ended_at=record.ended_at,
    )
