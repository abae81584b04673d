"""Create, get, list, update, delete, and the way to the guest.

Owns: the order of steps of a create (record first, then the machine, then the state), and what two callers at once
mean. Never does: how a machine is made (`hosts`), or SQL (`store`). The other verbs have files of their own: `sleep`,
`power`, `forks`, `snapshots`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

from forkyard.control.ground import Ground, ended, known, machine, new_id, refusal, sandbox_info
from forkyard.control.identities import Identities
from forkyard.control.network import Networks
from forkyard.control.pages import cursor_after, place_of
from forkyard.control.ports import explained
from forkyard.control.removal import Removal
from forkyard.control.room import MACHINE_BYTES, Room
from forkyard.control.secrets import Secrets
from forkyard.control.sleep import Sleep
from forkyard.control.snapshots import Snapshots
from forkyard.control.turns import deleted_meanwhile, outcome
from forkyard.control.volumes import Volumes
from forkyard.errors import (
    GuestUnreachable,
    HostFailure,
    IdempotencyConflict,
    InvalidRequest,
    InvalidShape,
    OperationTimeout,
    PortClosed,
    SandboxNotFound,
    SnapshotNotFound,
    VmCrashed,
)
from forkyard.guest.base import Guest
from forkyard.hosts.base import Created, CreateSpec, Incarnation
from forkyard.lifecycle import ENDED, Cause, State
from forkyard.models import Page, SandboxCreate, SandboxInfo, SandboxLogs, SandboxUpdate
from forkyard.models.builds import BUILD_LABEL
from forkyard.models.labels import ours
from forkyard.models.specs import GitRepo
from forkyard.models.volumes import copies
from forkyard.store.records import IdempotencyClaim, NewSandbox, SandboxRecord
from forkyard.vmm.base import VmUsage

#: Also covers the first use of a shape, which builds its template. The host has tighter limits for each step.
CREATE_DEADLINE_S = 1800.0
CONNECT_DEADLINE_S = 30.0
_SHAPE_FIELDS = ("vcpus", "memory_mib", "disk_gib")
#: These have a value always; null is no wish.
_NOT_NULL = (
    "labels",
    "annotations",
    "on_ttl",
    "persistence",
    "priority",
    "checkpoints_kept",
    "network",
    "activity_threshold_bytes",
)


#: In the block they are made; what it gives puts them into the guest.
MakeClones = Callable[
    [SandboxRecord, Sequence[GitRepo]], AbstractAsyncContextManager[Callable[[Guest], Awaitable[None]]]
]


class Sandboxes:
    def __init__(
        self,
        ground: Ground,
        removal: Removal,
        room: Room,
        sleep: Sleep,
        snapshots: Snapshots,
        secrets: Secrets,
        networks: Networks,
        identities: Identities,
        volumes: Volumes,
    ) -> None:
        self._ground = ground
        self._volumes = volumes
        self._identities = identities
        self._secrets = secrets
        self._networks = networks
        self._removal = removal
        self._room = room
        self._sleep = sleep
        self._snapshots = snapshots
        #: Who makes the repositories of a new sandbox ready, while its machine is made. Hosting fills this in.
        self.clones: MakeClones = _no_clones
        self._claims: dict[tuple[str, str], tuple[str, asyncio.Task[SandboxInfo]]] = {}

    # ── create ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(
        self,
        request: SandboxCreate,
        *,
        api_key_id: str = "",
        idempotency_key: str | None = None,
        image: str | None = None,
    ) -> SandboxInfo:
        """With an `idempotency_key`, a retry, also a concurrent one, gets the sandbox of the first call. `image`: what it
        boots from instead of the base image, for builds."""
        if idempotency_key is None:
            return await outcome(self._begin(request, api_key_id, None, image))
        claim = IdempotencyClaim(api_key_id, idempotency_key, self._request_hash(request))
        slot = (api_key_id, idempotency_key)
        under_way = self._claims.get(slot)
        if under_way is not None:
            first_hash, task = under_way
            if first_hash != claim.request_hash:
                raise IdempotencyConflict(
                    f"a different request with Idempotency-Key {idempotency_key!r} is under way; use a new key for "
                    "a new request"
                )
            return await outcome(task)
        task = self._begin(request, api_key_id, claim)
        self._claims[slot] = (claim.request_hash, task)
        task.add_done_callback(lambda _: self._claims.pop(slot, None))
        return await outcome(task)

    def _begin(
        self, request: SandboxCreate, api_key_id: str, claim: IdempotencyClaim | None, image: str | None = None
    ) -> asyncio.Task[SandboxInfo]:
        sandbox_id = new_id()
        return self._ground.turns.begin(
            sandbox_id, "create", partial(self._create, sandbox_id, request, api_key_id, claim, image)
        )

    async def _create(
        self,
        sandbox_id: str,
        request: SandboxCreate,
        api_key_id: str,
        claim: IdempotencyClaim | None,
        image: str | None,
    ) -> SandboxInfo:
        new = await self._wanted(sandbox_id, request, api_key_id)
        record = await self._admitted(new, claim)
        if record.id != sandbox_id:
            return sandbox_info(record)
        try:
            await self._room.on_disk(MACHINE_BYTES, "a new sandbox")
            spec = await self._ground.spec_of(record, snapshot_id=record.snapshot_id)
            async with self.clones(record, request.git) as put_clones:
                created = await self._make_machine(machine(record), replace(spec, image=image))
                await self._ground.prepare(record, machine(record))
                if request.git:
                    await put_clones(self._ground.host.guest(machine(record)))
        except Exception as raised:
            error = known(raised, "create", sandbox_id)
            if new.snapshot_id is not None and await self._ground.store.snapshot(new.snapshot_id) is None:
                error = SnapshotNotFound(f"snapshot {request.snapshot!r} was deleted while a sandbox was made of it")
            # The host left nothing behind by contract; asking it again costs nothing and covers what came too late.
            await self._ground.destroy_quietly(machine(record))
            await self._ground.move_back(record, State.FAILED, Cause.CREATE_FAILED, error)
            raise error from (None if error is raised else raised)
        return await self._announce(record, created)

    async def _wanted(self, sandbox_id: str, request: SandboxCreate, api_key_id: str) -> NewSandbox:
        shape, env, snapshot_id = request.shape(), dict(request.env), None
        network, origin = request.network, None
        trusts_ca: bool | None = False
        public_env = env if BUILD_LABEL in request.labels else {}
        if request.snapshot is not None:
            snapshot = await self._snapshots.find(request.snapshot)
            for name in request.model_fields_set.intersection(_SHAPE_FIELDS):
                if getattr(shape, name) != getattr(snapshot.shape, name):
                    raise InvalidShape(
                        f"snapshot {request.snapshot!r} has {name} {getattr(snapshot.shape, name)}, and a sandbox made "
                        f"from it cannot have {getattr(shape, name)}; leave {name} out",
                        field=name,
                    )
            shape, snapshot_id = snapshot.shape, snapshot.id
            origin, trusts_ca = await self._ground.record(snapshot.sandbox_id), snapshot.trusts_ca
            # What a spec says is for all who start from it; what somebody gave their sandbox is not.
            public_env = {**origin.public_env, **public_env}
            env = {**{name: value for name, value in public_env.items() if name not in request.secrets}, **env}
            # That of a build is for the build.
            if "network" not in request.model_fields_set and BUILD_LABEL not in origin.labels:
                egress = origin.network.egress.model_copy(update={"headers": []})
                network = origin.network.model_copy(update={"egress": egress})
        request.network.egress.check_rules()
        await self._networks.check(network)
        volumes = await self._volumes.wanted(request, () if origin is None else copies(origin.volumes))
        env = {**self._volumes.environment(request), **env}
        for name in request.secrets.keys() & env.keys():
            raise InvalidRequest(f"{name} is in env and in secrets; name it once", field=f"secrets.{name}")
        return NewSandbox(
            sandbox_id,
            shape,
            request.name,
            request.labels,
            env,
            key_id=api_key_id or None,
            snapshot_id=snapshot_id,
            persistence=request.persistence,
            priority=request.priority,
            idle_timeout_s=request.idle_timeout_s,
            ttl_s=request.ttl_s,
            checkpoint_every_s=request.checkpoint_every_s,
            checkpoints_kept=request.checkpoints_kept,
            network=network,
            # Not those of the origin, nor its headers: whoever may use a snapshot need not be who may use its secrets.
            secrets=await self._secrets.sealed(request.secrets, origin.secrets if origin else None),
            identity_id=await self._identity(request.identity),
            trusts_ca=trusts_ca,
            activity_threshold_bytes=request.activity_threshold_bytes,
            on_ttl=request.on_ttl,
            annotations=request.annotations,
            volumes=volumes,
            public_env=public_env,
        )

    async def _identity(self, wanted: str | None) -> str | None:
        return None if wanted is None else (await self._identities.find(wanted)).id

    async def _admitted(self, new: NewSandbox, claim: IdempotencyClaim | None) -> SandboxRecord:
        def add() -> Awaitable[SandboxRecord]:
            admit = self._ground.admission(new.shape.memory_mib, creates=True)
            return self._ground.store.add_sandbox(new, claim, admit=admit)

        return await self._room.in_memory(add, cooler=self._sleep)

    async def _make_machine(self, incarnation: Incarnation, spec: CreateSpec) -> Created:
        try:
            async with asyncio.timeout(CREATE_DEADLINE_S):
                return await self._ground.host.create(incarnation, spec)
        except TimeoutError:
            raise OperationTimeout(f"the create did not finish within {CREATE_DEADLINE_S:.0f} s") from None

    async def _announce(self, record: SandboxRecord, created: Created) -> SandboxInfo:
        ground = self._ground
        milestones = {milestone.name: milestone.at_ms for milestone in created.milestones}
        moved = await ground.store.transition(
            record.id,
            record.incarnation,
            State.CREATING,
            State.RUNNING,
            Cause.READY,
            template=created.template,
            data={"template": created.template, "milestones_ms": milestones},
        )
        if moved is not None:
            ground.activity.touch(record.id)
            return sandbox_info(moved)
        now = await ground.record(record.id)
        await ground.destroy_quietly(machine(record))
        if now.state is State.FAILED:
            raise VmCrashed(now.cause_detail or "the machine ended while it was being created", cause=now.cause)
        raise deleted_meanwhile()

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def get(self, sandbox_id: str) -> SandboxInfo:
        return sandbox_info(await self._ground.record(sandbox_id))

    async def said_by_spec(self, sandbox_id: str) -> Mapping[str, str]:
        """Variables of the spec it was made of: those that are not for this sandbox alone."""
        return (await self._ground.record(sandbox_id)).public_env

    async def list(
        self,
        *,
        states: Collection[State] | None = None,
        labels: Mapping[str, str] | None = None,
        ended: bool = False,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page[SandboxInfo]:
        """Newest first. Without `states`, those that have ended are left out unless `ended`."""
        if states is None and not ended:
            states = [state for state in State if state not in ENDED]
        found = await self._ground.store.list_sandboxes(
            states=states, labels=labels, before=place_of(cursor), limit=limit + 1
        )
        more = len(found) > limit
        found = found[:limit]
        return Page[SandboxInfo](
            items=[sandbox_info(record) for record in found], next_cursor=cursor_after(found[-1]) if more else None
        )

    async def count_running(self) -> int:
        return await self._ground.store.count_sandboxes(State.RUNNING)

    async def logs(self, sandbox_id: str) -> SandboxLogs:
        """Also of one that sleeps or has failed, until it is deleted."""
        record = await self._ground.record(sandbox_id)
        if record.state is State.DELETED:
            raise ended(record)
        try:
            return await self._ground.host.logs(machine(record))
        except SandboxNotFound:  # not made yet, or its create failed: nothing was kept
            return SandboxLogs(template_boot=[], create=[], console="")

    async def usage(self, sandbox_id: str) -> VmUsage:
        """Does not wake it."""
        record = await self._ground.record(sandbox_id)
        if record.state is not State.RUNNING:
            raise refusal(record, "it is not running")
        try:
            return await self._ground.host.usage(machine(record))
        except SandboxNotFound:
            raise _just_ended(sandbox_id) from None

    # ── use ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def use(self, sandbox_id: str) -> AsyncIterator[Guest]:
        """The guest, for one call: the sandbox is woken if it sleeps, and stays awake while the block lasts."""
        with self._ground.activity.using(sandbox_id):
            yield await self.guest(sandbox_id)

    async def guest(self, sandbox_id: str) -> Guest:
        """The way into a sandbox, woken if it sleeps. Only inside `use` does it stay awake."""
        return (await self.entered(sandbox_id))[1]

    async def entered(self, sandbox_id: str) -> tuple[Incarnation, Guest]:
        """Like `guest`, and which machine it is in."""
        incarnation = machine(await self._sleep.awake(sandbox_id))
        try:
            return incarnation, self._ground.host.guest(incarnation)
        except SandboxNotFound:
            raise _just_ended(sandbox_id) from None

    def _request_hash(self, request: SandboxCreate) -> str:
        fields = request.model_dump(mode="json")
        for secret in fields["secrets"].values():  # a plain hash of a short value could be guessed
            secret["value"] = None if secret["value"] is None else self._secrets.digest(secret["value"])
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    async def connect(self, sandbox_id: str, port: int) -> socket.socket:
        """A TCP connection to a port in a sandbox, woken if it sleeps; non-blocking, the caller's to close. `PortClosed`
        if nothing listens. Whoever moves bytes over it says so to `Activity`."""
        with self._ground.activity.using(sandbox_id):
            incarnation = machine(await self._sleep.awake(sandbox_id))
            try:
                async with asyncio.timeout(CONNECT_DEADLINE_S):
                    return await self._ground.host.connect(incarnation, port)
            except PortClosed as error:
                raise await explained(error, self._ground.host, incarnation, port) from None
            except TimeoutError:
                raise OperationTimeout(
                    f"port {port} of sandbox {sandbox_id} did not answer within {CONNECT_DEADLINE_S:.0f} s"
                ) from None
            except SandboxNotFound:
                raise _just_ended(sandbox_id) from None

    # ── change, delete ───────────────────────────────────────────────────────────────────────────────────────────

    async def update(self, sandbox_id: str, request: SandboxUpdate) -> SandboxInfo:
        """Fields that are absent stay as they are. A ttl counts from now."""
        given = request.model_dump(exclude_unset=True, mode="json")
        for name in _NOT_NULL:
            if name in given and given[name] is None:
                raise InvalidRequest(f"{name} cannot be null; leave it out to keep it as it is", field=name)
        if "ttl_s" in given:
            ttl_s = given["ttl_s"]
            given["expires_at"] = None if ttl_s is None else datetime.now(UTC) + timedelta(seconds=ttl_s)
        if given.pop("network", None) is not None and request.network is not None:
            await self._networks.set(sandbox_id, request.network)
        if "labels" in given:
            given["labels"] |= ours((await self._ground.record(sandbox_id)).labels)
        if "identity" in given:
            given["identity_id"] = await self._identity(given.pop("identity"))
        living = [state for state in State if state not in (State.DELETING, State.DELETED)]
        if given and not await self._ground.store.update_sandbox(sandbox_id, given, states=living):
            raise ended(await self._ground.record(sandbox_id))
        if "identity_id" in given:
            await self._networks.renew(sandbox_id)
        return await self.get(sandbox_id)

    async def disarm(self, sandbox_id: str) -> None:
        """Take its identity and its secrets away: what runs in it from now on is not to be trusted with them."""
        if not await self._ground.store.update_sandbox(sandbox_id, {"identity_id": None, "secrets": {}}):
            raise ended(await self._ground.record(sandbox_id))
        await self._networks.renew(sandbox_id)

    async def delete(self, sandbox_id: str, cause: Cause = Cause.DELETED_BY_USER) -> None:
        """Returns when the machine and all it owned are gone. Deleting what is deleted is fine."""
        await self._removal.delete(sandbox_id, cause)


@asynccontextmanager
async def _no_clones(
    _record: SandboxRecord, repos: Sequence[GitRepo]
) -> AsyncIterator[Callable[[Guest], Awaitable[None]]]:
    if repos:
        raise HostFailure("this daemon has no git")

    async def put(_guest: Guest) -> None:
        pass

    yield put


def _just_ended(sandbox_id: str) -> GuestUnreachable:
    return GuestUnreachable(f"the machine of sandbox {sandbox_id} is gone; its state will say why in a moment")
