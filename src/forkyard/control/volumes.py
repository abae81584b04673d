"""Volumes: named disks that outlive sandboxes.

Owns: names, who has which, and the rules: one writes, many read or have a copy. What is in a volume and which versions
there are, the host knows. Never does: files in them (`volume_files`).
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial

import structlog

from forkyard.control.ground import Ground, known, machine, new_id
from forkyard.control.room import MIB, Room
from forkyard.control.sleep import Sleep
from forkyard.errors import (
    CommandNotFound,
    ForkyardError,
    InvalidRequest,
    OperationTimeout,
    VolumeInUse,
    VolumeNotFound,
)
from forkyard.guest.base import ExecSpec, Exit
from forkyard.hosts.base import Incarnation, VolumeVersion
from forkyard.lifecycle import Cause, State
from forkyard.models import SandboxCreate
from forkyard.models.volumes import (
    FILES_LABEL,
    MAX_VOLUMES,
    SandboxVolume,
    Volume,
    VolumeCommit,
    VolumeCreate,
    VolumeInfo,
    VolumeVersionInfo,
)
from forkyard.store.records import SandboxRecord
from forkyard.store.volumes import VolumeRecord

log = structlog.get_logger(__name__)

MAKE_DEADLINE_S = 300.0
COMMIT_DEADLINE_S = 600.0
CACHE_MIB = 4096
#: Where caches are, and the variable that tells the client so.
CACHE_DIR = "/var/cache/forkyard"
CACHE_VARIABLES = {"pip": "PIP_CACHE_DIR", "npm": "npm_config_cache"}
#: A mount there would take away what the machine itself needs.
_RESERVED = ("/proc", "/sys", "/dev", "/run", "/boot", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64")
#: What an empty volume occupies, more or less.
_EMPTY_BYTES = 4 * MIB


class Volumes:
    def __init__(self, ground: Ground, room: Room, sleep: Sleep) -> None:
        self._ground = ground
        self._room = room
        self._sleep = sleep
        self._making = asyncio.Lock()
        self._dropping = asyncio.Lock()

    # ── volumes ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def create(self, request: VolumeCreate, *, key_id: str = "") -> VolumeInfo:
        limits = self._ground.limits
        if request.size_mib > limits.volume_mib:
            raise InvalidRequest(
                f"size_mib is {request.size_mib}; the largest volume has {limits.volume_mib} (FORKYARD_VOLUME_GIB)",
                field="size_mib",
            )
        return await self._info(await self._make(request.name, request.size_mib, key_id or None))

    async def _make(self, name: str, size_mib: int, key_id: str | None, *, for_all: bool = False) -> VolumeRecord:
        ground = self._ground
        await self._room.on_disk(_EMPTY_BYTES, f"volume {name}")
        record = await ground.store.add_volume(
            "vol-" + new_id(), name, size_mib, key_id=key_id, quota_mib=ground.limits.quota_volumes_mib
        )
        try:
            async with asyncio.timeout(MAKE_DEADLINE_S):
                await ground.host.make_volume(record.id, size_mib * MIB, for_all=for_all)
        except Exception as error:
            await self._remove(record.id)
            if isinstance(error, TimeoutError):
                raise OperationTimeout(f"volume {name} was not made within {MAKE_DEADLINE_S:.0f} s") from None
            raise known(error, "make volume", name) from error
        await ground.store.finish_volume(record.id)
        return record

    async def get(self, id_or_name: str) -> VolumeInfo:
        return await self._info(await self.find(id_or_name))

    async def delete(self, id_or_name: str) -> None:
        """Refused while a sandbox has it, in whatever mode. Snapshots keep their copies."""
        record = await self.find(id_or_name)
        users = (await self._users()).get(record.id, [])
        if users or not await self._ground.store.retire_volume(record.id):
            who = users[0] if users else (await self.find(id_or_name)).writer
            more = f" and {len(users) - 1} more" if len(users) > 1 else ""
            raise VolumeInUse(
                f"volume {record.name!r} is in use by sandbox {who}{more}; delete those first"
                if more or not await self._is_for_files(who)
                else f"files are being written to volume {record.name!r}; delete it when that is done",
                volume=record.name,
                sandbox_id=who,
            )
        await self._remove(record.id)

    async def _remove(self, volume_id: str) -> None:
        """What cannot be removed now is removed at the next start."""
        try:
            await self._ground.host.delete_volume(volume_id)
            await self._ground.store.forget_volume(volume_id)
        except Exception:
            log.exception("a volume could not be removed", volume=volume_id)

    async def clear_half_made(self) -> None:
        """At a start: what a daemon before this one did not come to finish."""
        for record in await self._ground.store.list_volumes(ready=False):
            await self._remove(record.id)

    async def delete_all(self) -> None:
        """Every sandbox is gone already."""
        for record in await self._ground.store.list_volumes():
            if await self._ground.store.retire_volume(record.id):
                await self._remove(record.id)

    async def find(self, id_or_name: str) -> VolumeRecord:
        found = await self._ground.store.volume(id_or_name)
        if found is None:
            raise VolumeNotFound(f"there is no volume {id_or_name!r}; `forkyard volumes ls` lists those there are")
        return found

    # ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def versions(self, id_or_name: str) -> list[VolumeVersionInfo]:
        """Oldest first."""
        record = await self.find(id_or_name)
        return [_version_info(version) for version in await self._ground.host.volume_versions(record.id)]

    async def keep(self, id_or_name: str) -> VolumeVersionInfo:
        """The newest version stays, whatever is written later. One that a sandbox writes to is committed there."""
        record = await self.find(id_or_name)
        if record.writer is not None and not await self._is_for_files(record.writer):
            return await self.commit(id_or_name, VolumeCommit(sandbox_id=record.writer))
        return _version_info(await self._ground.host.keep_version(record.id))

    async def drop_version(self, id_or_name: str, number: int) -> None:
        record = await self.find(id_or_name)
        async with self._dropping:  # two at once would each leave the other's
            versions = await self._ground.host.volume_versions(record.id)
            if len(versions) == 1 and versions[0].number == number:
                raise InvalidRequest(
                    f"version {number} is all that volume {record.name!r} has; delete the volume instead"
                )
            await self._ground.host.drop_version(record.id, number)

    async def commit(self, id_or_name: str, request: VolumeCommit, *, kept: bool = True) -> VolumeVersionInfo:
        """What a sandbox has written to its copy becomes the newest version. The sandbox goes on."""
        volume = await self.find(id_or_name)
        sandbox_id = request.sandbox_id
        with self._ground.activity.using(sandbox_id):
            record = await self._sleep.awake(sandbox_id)
            mine = [one for one in record.volumes if one.volume_id == volume.id]
            mine = [one for one in mine if request.path in (None, one.path)]
            if len(mine) != 1:
                where = f" at {request.path}" if request.path else ""
                has = "has no copy" if not mine else "has more than one copy; say the path"
                raise InvalidRequest(f"sandbox {sandbox_id} {has} of volume {volume.name!r}{where}", field="path")
            if volume.writer not in (None, sandbox_id):
                raise VolumeInUse(
                    f"files are being written to volume {volume.name!r}; commit when that is done"
                    if await self._is_for_files(volume.writer)
                    else f"volume {volume.name!r} is being written to by sandbox {volume.writer}; commit when it is deleted",
                    volume=volume.name,
                    sandbox_id=volume.writer,
                )
            work = partial(self._commit, sandbox_id, mine[0].path, force=request.force, kept=kept)
            return _version_info(await self._ground.turns.run(sandbox_id, "commit", work, interruptible=False))

    async def _commit(self, sandbox_id: str, path: str, *, force: bool, kept: bool) -> VolumeVersion:
        record = await self._ground.record(sandbox_id)
        await self._room.on_disk(_EMPTY_BYTES, f"a commit of {path}", spare=sandbox_id)
        try:
            async with asyncio.timeout(COMMIT_DEADLINE_S):
                if path.startswith(f"{CACHE_DIR}/"):
                    await self._open_to_all(machine(record), path)
                return await self._ground.host.commit_volume(machine(record), path, force=force, kept=kept)
        except TimeoutError:
            raise OperationTimeout(f"{path} was not committed within {COMMIT_DEADLINE_S:.0f} s") from None
        except Exception as error:
            raise known(error, "commit", sandbox_id) from error

    async def _open_to_all(self, incarnation: Incarnation, path: str) -> None:
        """Clients make some files of their caches for one user only. A sandbox that cannot open them is its own affair."""
        command = ["chmod", "-R", "a+rwX", "--", path]
        try:
            async with self._ground.host.guest(incarnation).execute(ExecSpec(command, user="root")) as execution:
                async for item in execution:
                    if isinstance(item, Exit) and item.exit_code != 0:
                        log.warning("a cache is not open to all users", sandbox=incarnation.sandbox_id, path=path)
        except CommandNotFound as error:
            log.warning("a cache is not open to all users", sandbox=incarnation.sandbox_id, error=error.message)

    # ── for sandboxes ────────────────────────────────────────────────────────────────────────────────────────────

    async def wanted(self, request: SandboxCreate, inherited: Iterable[SandboxVolume]) -> tuple[SandboxVolume, ...]:
        """What a new sandbox is to have. `inherited`: what the snapshot it is made from was saved with."""
        found = list(inherited)
        for path, asked in request.volumes.items():
            found.append(await self._mount(path, asked))
        for kind in dict.fromkeys(request.cache):
            if not any(one.path == f"{CACHE_DIR}/{kind}" for one in found):
                found.append(await self._cache(kind))
        paths = [one.path for one in found]
        for path in paths:
            if any(other != path and (other + "/").startswith(path + "/") for other in paths) or paths.count(path) > 1:
                raise InvalidRequest(
                    f"volumes: {path} is in another's way; no mount may be inside another", field="volumes"
                )
        if len(found) > MAX_VOLUMES:
            raise InvalidRequest(
                f"a sandbox has at most {MAX_VOLUMES} volumes and caches, not {len(found)}", field="volumes"
            )
        return tuple(found)

    def environment(self, request: SandboxCreate) -> dict[str, str]:
        return {CACHE_VARIABLES[kind]: f"{CACHE_DIR}/{kind}" for kind in request.cache}

    async def _mount(self, path: str, asked: Volume) -> SandboxVolume:
        clean = posixpath.normpath(path)
        if clean != path.rstrip("/") or clean == "/" or clean.startswith("//"):
            raise InvalidRequest(f"volumes: {path!r} is no plain absolute path", field="volumes")
        if any(clean == taken or clean.startswith(taken + "/") for taken in _RESERVED):
            raise InvalidRequest(f"volumes: {clean} is the machine's own; mount it elsewhere", field="volumes")
        if asked.mode == "rw" and asked.version is not None:
            raise InvalidRequest("volumes: an older version can be mounted with mode `ro` or `cow`", field="volumes")
        record = await self.find(asked.name)
        if asked.version is not None and asked.version not in await self._numbers(record.id):
            raise VolumeNotFound(f"volume {record.name!r} has no version {asked.version}")
        return SandboxVolume(volume_id=record.id, name=record.name, path=clean, mode=asked.mode, version=asked.version)

    async def _numbers(self, volume_id: str) -> list[int]:
        return [version.number for version in await self._ground.host.volume_versions(volume_id)]

    async def _cache(self, kind: str) -> SandboxVolume:
        """The volume is made when it is first asked for, empty."""
        name = f"cache-{kind}"
        async with self._making:
            record = await self._ground.store.volume(name) or await self._make(name, CACHE_MIB, None, for_all=True)
        return SandboxVolume(volume_id=record.id, name=name, path=f"{CACHE_DIR}/{kind}", mode="cow", version=None)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _users(self) -> dict[str, list[str]]:
        """Which sandboxes have each volume."""
        users: dict[str, list[str]] = {}
        states = [state for state in State if state is not State.DELETED]
        for record in await self._ground.store.list_sandboxes(states=states):
            # One that only reads files for somebody is on its way out, and has a copy.
            reads = FILES_LABEL in record.labels and all(one.mode == "ro" for one in record.volumes)
            for one in record.volumes if _has_machine(record) and not reads else ():
                users.setdefault(one.volume_id, []).append(record.id)
        return users

    async def _is_for_files(self, sandbox_id: str | None) -> bool:
        record = None if sandbox_id is None else await self._ground.store.sandbox(sandbox_id)
        return record is not None and FILES_LABEL in record.labels

    async def _info(self, record: VolumeRecord, users: dict[str, list[str]] | None = None) -> VolumeInfo:
        host = self._ground.host
        users = await self._users() if users is None else users
        try:
            stored_bytes = await host.volume_bytes(record.id)
        except ForkyardError:
            stored_bytes = 0
        return VolumeInfo(
            id=record.id,
            name=record.name,
            size_mib=record.size_mib,
            version=max(await self._numbers(record.id), default=0),
            stored_bytes=stored_bytes,
            writer=record.writer,
            used_by=users.get(record.id, []),
            created_at=record.created_at,
        )

    async def list(self) -> list[VolumeInfo]:
        records = await self._ground.store.list_volumes()
        users = await self._users()
        return [await self._info(record, users) for record in records]


def _has_machine(record: SandboxRecord) -> bool:
    return not (record.state is State.FAILED and record.cause is Cause.CREATE_FAILED)


def _version_info(version: VolumeVersion) -> VolumeVersionInfo:
    return VolumeVersionInfo(
        version=version.number,
        kept=version.kept,
        source=version.source,
        created_at=datetime.fromtimestamp(version.created_at, UTC),
    )
