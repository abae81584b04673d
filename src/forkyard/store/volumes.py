"""Queries of the volumes table.

A row is written before the volume is made and marked ready after it, and unmarked before it is removed, as with
snapshots. `writer` is who has it read-write: taken and given back in the transactions that make and end a sandbox.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

import sqlalchemy as sa

from forkyard.errors import Conflict, QuotaExceeded, VolumeInUse, VolumeNotFound
from forkyard.models.volumes import FILES_LABEL, SandboxVolume
from forkyard.store.database import Database, record_event
from forkyard.store.tables import sandboxes, volumes


@dataclass(frozen=True)
class VolumeRecord:
    id: str
    name: str
    size_mib: int
    key_id: str | None
    writer: str | None
    created_at: datetime


class VolumeQueries(Database):
    async def add_volume(
        self, volume_id: str, name: str, size_mib: int, *, key_id: str | None, quota_mib: int | None
    ) -> VolumeRecord:
        """Not ready yet. `Conflict` if the name is taken; `quota_mib`: what all volumes of a key may have together."""
        now = datetime.now(UTC)
        row = {"id": volume_id, "name": name, "size_mib": size_mib, "key_id": key_id, "writer": None}

        def work(connection: sa.Connection) -> VolumeRecord:
            if connection.execute(sa.select(volumes.c.id).where(volumes.c.name == name)).scalar() is not None:
                raise Conflict(f"there is a volume {name!r} already; choose another name, or use it", name=name)
            total = sa.select(sa.func.coalesce(sa.func.sum(volumes.c.size_mib), 0))
            used_mib = connection.execute(total.where(volumes.c.key_id.is_not_distinct_from(key_id))).scalar_one()
            if quota_mib is not None and used_mib + size_mib > quota_mib:
                raise QuotaExceeded(
                    f"the volumes of this API key have {used_mib} MiB, and may have {quota_mib}; {size_mib} more do not "
                    "fit: delete some, or raise FORKYARD_QUOTA_VOLUMES_GIB"
                )
            connection.execute(volumes.insert(), {**row, "ready": False, "created_at": now})
            return VolumeRecord(volume_id, name, size_mib, key_id, None, now)

        return await self._write(work)

    async def finish_volume(self, volume_id: str) -> None:
        def work(connection: sa.Connection) -> None:
            connection.execute(volumes.update().where(volumes.c.id == volume_id).values(ready=True))
            record_event(connection, datetime.now(UTC), None, "volume.created", data={"volume_id": volume_id})

        await self._write(work)

    async def volume(self, id_or_name: str) -> VolumeRecord | None:
        table = volumes.c
        query = volumes.select().where(table.ready, sa.or_(table.id == id_or_name, table.name == id_or_name))
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else _volume(found)

    async def list_volumes(self, *, ready: bool = True) -> list[VolumeRecord]:
        """By name."""
        query = volumes.select().where(volumes.c.ready == ready).order_by(volumes.c.name)
        return await self._read(lambda connection: [_volume(row) for row in connection.execute(query).mappings()])

    async def retire_volume(self, volume_id: str) -> bool:
        """From now on nobody finds it. False if a sandbox writes to it, or somebody else retired it before."""
        update = volumes.update().where(volumes.c.id == volume_id, volumes.c.ready, volumes.c.writer.is_(None))

        def work(connection: sa.Connection) -> bool:
            if connection.execute(update.values(ready=False)).rowcount != 1:
                return False
            record_event(connection, datetime.now(UTC), None, "volume.deleted", data={"volume_id": volume_id})
            return True

        return await self._write(work)

    async def forget_volume(self, volume_id: str) -> None:
        delete = volumes.delete().where(volumes.c.id == volume_id)
        await self._write(lambda connection: connection.execute(delete).rowcount)


def take_volumes(connection: sa.Connection, sandbox_id: str, wanted: Iterable[SandboxVolume]) -> None:
    """In the transaction that adds the sandbox: those it writes to are its own until it ends."""
    for one in wanted:
        if one.mode != "rw":  # a copy needs nobody's leave, and outlives the volume
            continue
        here = (volumes.c.id == one.volume_id, volumes.c.ready)
        take = volumes.update().where(*here, volumes.c.writer.is_(None)).values(writer=sandbox_id)
        if connection.execute(take).rowcount == 1:
            continue
        writer = connection.execute(sa.select(volumes.c.writer).where(*here)).scalar()
        if writer is None:
            raise VolumeNotFound(f"volume {one.name!r} was deleted meanwhile")
        labels = connection.execute(sa.select(sandboxes.c.labels).where(sandboxes.c.id == writer)).scalar() or {}
        raise VolumeInUse(
            f"files are being written to volume {one.name!r}; try again when that is done"
            if FILES_LABEL in labels
            else f"volume {one.name!r} is mounted read-write by sandbox {writer}, and one at a time may; delete that one, or "
            "mount it with mode `cow` or `ro`",
            volume=one.name,
            sandbox_id=writer,
        )


def give_back_volumes(connection: sa.Connection, sandbox_id: str) -> None:
    connection.execute(volumes.update().where(volumes.c.writer == sandbox_id).values(writer=None))


def _volume(row: sa.RowMapping) -> VolumeRecord:
    return VolumeRecord(row["id"], row["name"], row["size_mib"], row["key_id"], row["writer"], row["created_at"])
