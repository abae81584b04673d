"""Files in a volume that no sandbox has: looked at from inside a machine that is made for it, and gone afterwards.

What is in a volume was written by guests, so nothing on this host ever reads its file system. Owns: that machine.
"""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from forkyard.control.sandboxes import Sandboxes
from forkyard.control.volumes import FILES_LABEL, Volumes
from forkyard.errors import ForkyardError
from forkyard.guest.base import Guest
from forkyard.lifecycle import Cause
from forkyard.models import FileInfo, SandboxCreate
from forkyard.models.labels import marked
from forkyard.models.network import EgressPolicy, NetworkPolicy
from forkyard.models.volumes import Volume

log = structlog.get_logger(__name__)

#: It is deleted after this, whatever happens to the daemon.
MACHINE_TTL_S = 24 * 3600.0
_ROOT = "/volume"


class VolumeFiles:
    def __init__(self, volumes: Volumes, sandboxes: Sandboxes) -> None:
        self._volumes = volumes
        self._sandboxes = sandboxes

    @asynccontextmanager
    async def opened(
        self, id_or_name: str, *, write: bool = False, version: int | None = None, key_id: str = ""
    ) -> AsyncIterator[Guest]:
        """A guest that has the volume at `place("/")`. What is written is the volume's newest version after the block."""
        record = await self._volumes.find(id_or_name)
        mode: Volume = Volume(record.name, mode="rw" if write else "ro", version=version)
        wanted = SandboxCreate(
            name=f"files of {record.name}",
            volumes={_ROOT: mode},
            persistence="ephemeral",
            ttl_s=MACHINE_TTL_S,
            idle_timeout_s=None,
            network=NetworkPolicy(egress=EgressPolicy(preset="none")),
        )
        made = await self._sandboxes.create(marked(wanted, volume=record.id), api_key_id=key_id)
        try:
            async with self._sandboxes.use(made.id) as guest:
                yield guest
        finally:
            await self._sandboxes.delete(made.id, Cause.TASK_OVER)

    async def sweep(self) -> None:
        """Machines that a daemon before this one did not come to remove."""
        for info in (await self._sandboxes.list(limit=1000)).items:
            if FILES_LABEL in info.labels:
                try:
                    await self._sandboxes.delete(info.id, Cause.TASK_OVER)
                except ForkyardError as error:
                    log.error("machine of a volume not removed", sandbox=info.id, error=error.message)


def place(path: str) -> str:
    """Where a path of the volume is in that machine. Whatever it says, it is below the volume's root."""
    return posixpath.normpath(f"{_ROOT}/{posixpath.normpath('/' + path)}")


def seen(info: FileInfo) -> FileInfo:
    """As the volume's own."""
    inside = info.path.removeprefix(_ROOT) or "/"
    return info.model_copy(update={"path": inside, "name": info.name if inside != "/" else "/"})
