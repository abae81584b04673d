"""Fork: running copies of a sandbox that runs or sleeps.

Owns: the records of the children, and what becomes of each. The parent's turn is held, so no other verb changes it
meanwhile; one child that fails does not spoil the others.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from forkyard.control.ground import Ground, known, machine, new_id, refusal, sandbox_info
from forkyard.control.room import MACHINE_BYTES, Room
from forkyard.control.sleep import Sleep
from forkyard.errors import ForkyardError, HostFailure, NoCapacity, OperationTimeout
from forkyard.faults import reached
from forkyard.hosts.base import Created, Forked
from forkyard.lifecycle import Cause, State
from forkyard.models import ForkChild, ForkResult, SandboxFork, SandboxInfo
from forkyard.models.labels import theirs
from forkyard.models.volumes import copies
from forkyard.store.records import NewSandbox, SandboxRecord

FORK_DEADLINE_S = 600.0


class Forks:
    def __init__(self, ground: Ground, room: Room, sleep: Sleep) -> None:
        self._ground = ground
        self._room = room
        self._sleep = sleep

    async def fork(self, sandbox_id: str, request: SandboxFork, *, api_key_id: str | None = None) -> ForkResult:
        """Per child what became of it; if none came to life, the error of the first."""
        with self._ground.activity.using(sandbox_id):
            work = partial(self._fork, sandbox_id, request, api_key_id)
            # Not interruptible: a delete of the parent waits, for the children are not its own.
            return await self._ground.turns.run(sandbox_id, "fork", work, interruptible=False)

    async def _fork(self, sandbox_id: str, request: SandboxFork, api_key_id: str | None) -> ForkResult:
        ground = self._ground
        parent = await ground.record(sandbox_id)
        if parent.state not in (State.RUNNING, State.PAUSED):
            raise refusal(parent, "a running or paused sandbox can be forked")
        await self._room.on_disk(MACHINE_BYTES * request.count, f"a fork of sandbox {sandbox_id}", spare=sandbox_id)
        new = [_child(parent, request, api_key_id) for _ in range(request.count)]
        async with AsyncExitStack() as turns:
            for one in new:  # a delete of a child waits until it is one
                await turns.enter_async_context(ground.turns.take(one.id))
            outcomes, paused_ms = await self._make(parent, new)
        made = [item.id for item in outcomes if isinstance(item, SandboxInfo)]
        if not made:
            raise next(item for item in outcomes if isinstance(item, ForkyardError))
        await ground.store.add_event(
            "sandbox.forked",
            sandbox_id=sandbox_id,
            cause=Cause.FORKED,
            data={"children": made, "failed": len(new) - len(made), "paused_ms": paused_ms},
            durable=False,  # each child's own record says whose it is, and that is on disk
        )
        return ForkResult(
            parent_id=sandbox_id,
            paused_ms=paused_ms,
            children=[
                ForkChild(sandbox=item) if isinstance(item, SandboxInfo) else ForkChild(problem=item.to_problem())
                for item in outcomes
            ],
        )

    async def _make(
        self, parent: SandboxRecord, new: list[NewSandbox]
    ) -> tuple[list[SandboxInfo | ForkyardError], float]:
        added = await self._admitted(parent, new)
        records = [item for item in added if isinstance(item, SandboxRecord)]
        if not records:
            return [item for item in added if isinstance(item, ForkyardError)], 0.0
        reached("fork.recorded")
        forked = await self._machines(parent, records)
        reached("fork.made")
        settled = iter(
            await asyncio.gather(
                *(self._settle(record, child) for record, child in zip(records, forked.children, strict=True))
            )
        )
        outcomes = [next(settled) if isinstance(item, SandboxRecord) else item for item in added]
        await self._ground.store.sync()  # once for all of them
        return outcomes, forked.paused_ms

    async def _admitted(self, parent: SandboxRecord, new: list[NewSandbox]) -> list[SandboxRecord | ForkyardError]:
        """As many children as there is room for, or room can be made for."""
        admitted: dict[str, SandboxRecord] = {}
        while waiting := [one for one in new if one.id not in admitted]:
            try:
                some = await self._room.in_memory(partial(self._add, parent, waiting), cooler=self._sleep)
            except NoCapacity as refused:
                return [admitted.get(one.id, refused) for one in new]
            admitted |= {record.id: record for record in some}
        return [admitted[one.id] for one in new]

    async def _add(self, parent: SandboxRecord, new: list[NewSandbox]) -> list[SandboxRecord]:
        admit = self._ground.admission(parent.shape.memory_mib, creates=True)
        added = await self._ground.store.add_sandboxes(new, admit=admit)
        records = [item for item in added if isinstance(item, SandboxRecord)]
        if not records:
            raise next(item for item in added if isinstance(item, NoCapacity))
        return records

    async def _machines(self, parent: SandboxRecord, records: list[SandboxRecord]) -> Forked:
        """Whatever goes wrong as a whole went wrong for every child."""
        failure: ForkyardError
        children = [machine(record) for record in records]
        try:
            async with asyncio.timeout(FORK_DEADLINE_S):
                # A budget begins anew, as the ttl does.
                network = replace(await self._ground.network_of(parent), spent_bytes=0)
                forked = await self._ground.host.fork(machine(parent), children, self._ground.env_of(parent), network)
            if len(forked.children) == len(records):
                return forked
            failure = HostFailure(f"the host made {len(forked.children)} of {len(records)} machines of a fork")
        except TimeoutError:
            failure = OperationTimeout(f"the fork did not finish within {FORK_DEADLINE_S:.0f} s")
        except Exception as error:
            failure = known(error, "fork", parent.id)
        return Forked(0.0, [failure] * len(records))

    async def _settle(self, record: SandboxRecord, made: Created | ForkyardError) -> SandboxInfo | ForkyardError:
        ground = self._ground
        if isinstance(made, ForkyardError):
            await ground.destroy_quietly(machine(record))
            await ground.move_back(record, State.FAILED, Cause.CREATE_FAILED, made)
            return made
        await ground.prepare(record, machine(record))
        ground.activity.touch(record.id)
        milestones = {milestone.name: milestone.at_ms for milestone in made.milestones}
        try:
            now = await ground.move(
                record,
                State.RUNNING,
                Cause.FORKED,
                template=made.template,
                data={"parent_id": record.parent_id, "milestones_ms": milestones},
                durable=False,
            )
        except ForkyardError as error:  # it ended before it was recorded, or is being deleted
            await ground.destroy_quietly(machine(record))
            return error
        return sandbox_info(now)


def _child(parent: SandboxRecord, request: SandboxFork, api_key_id: str | None) -> NewSandbox:
    """Its life begins now, and so does its ttl; everything else is the parent's."""
    return NewSandbox(
        id=new_id(),
        shape=parent.shape,
        name=request.name,
        labels=theirs(parent.labels) if request.labels is None else request.labels,
        env=parent.env,
        key_id=api_key_id or parent.key_id,
        parent_id=parent.id,
        persistence=parent.persistence,
        priority=parent.priority,
        idle_timeout_s=parent.idle_timeout_s,
        ttl_s=parent.ttl_s,
        checkpoint_every_s=parent.checkpoint_every_s,
        checkpoints_kept=parent.checkpoints_kept,
        network=parent.network,
        secrets=parent.secrets,
        identity_id=parent.identity_id,
        trusts_ca=parent.trusts_ca,
        activity_threshold_bytes=parent.activity_threshold_bytes,
        on_ttl=parent.on_ttl,
        annotations=parent.annotations,
        volumes=copies(parent.volumes),
        public_env=parent.public_env,
    )
