"""Files in a volume that no sandbox has: looked at from inside a machine that is made for it, and gone afterwards.

What is in a volume was written by guests, so nothing on this host ever reads its file system. Owns: that machine, and that
it is the volume that is read and written, whatever links are in there.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import structlog

from forkyard.control.sandboxes import Sandboxes
from forkyard.control.volumes import Volumes
from forkyard.errors import FileConflict, FileMissing, ForkyardError, InvalidPath
from forkyard.guest.base import Guest
from forkyard.lifecycle import Cause
from forkyard.models import FileInfo, SandboxCreate
from forkyard.models.labels import marked
from forkyard.models.network import EgressPolicy, NetworkPolicy
from forkyard.models.volumes import FILES_LABEL, Volume, VolumeCommit

log = structlog.get_logger(__name__)

#: It is deleted after this, whatever happens to the daemon.
MACHINE_TTL_S = 24 * 3600.0
#: Where the volume is in it: a name that no path of a volume begins with by chance.
ROOT = "/forkyard-volume"
#: As many as the kernel follows; and so many parts of paths, each of which is a question to the guest.
_MAX_LINKS, _MAX_PARTS = 40, 4096


class VolumeFiles:
    def __init__(self, volumes: Volumes, sandboxes: Sandboxes) -> None:
        self._volumes = volumes
        self._sandboxes = sandboxes

    @asynccontextmanager
    async def opened(
        self, id_or_name: str, *, write: bool = False, version: int | None = None, key_id: str = ""
    ) -> AsyncIterator[Guest]:
        """A guest that has the volume; where a path is in there, `inside` says. What is written is the volume's newest
        version after the block, and nothing of it is if the block fails."""
        record = await self._volumes.find(id_or_name)
        mode: Volume = Volume(record.name, mode="rw" if write else "ro", version=version)
        wanted = SandboxCreate(
            name=f"files of {record.name}",
            volumes={ROOT: mode},
            persistence="ephemeral",
            ttl_s=MACHINE_TTL_S,
            idle_timeout_s=None,
            network=NetworkPolicy(egress=EgressPolicy(preset="none")),
        )
        made = await self._sandboxes.create(marked(wanted, {FILES_LABEL: record.id}), api_key_id=key_id)
        try:
            async with self._sandboxes.use(made.id) as guest:
                with _paths_of_the_volume():
                    yield guest
                if write:
                    await self._volumes.commit(record.id, VolumeCommit(sandbox_id=made.id), kept=False)
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


async def inside(guest: Guest, path: str, *, follow: bool = True) -> str:
    """Where a path of the volume is in that machine. Links are followed, its last part only with `follow`; one that leads
    out of the volume, or may lead elsewhere where the volume is mounted, is refused. Nobody else writes to it meanwhile."""
    left = deque(_parts(posixpath.normpath("/" + path)))
    found: list[str] = []
    links = parts = 0
    while left:
        part = left.popleft()
        parts += 1
        if links > _MAX_LINKS or parts > _MAX_PARTS:
            raise InvalidPath(f"{path}: leads through too many links", field="path")
        if part == "..":
            if not found:
                raise InvalidPath(f"{path}: leads out of the volume, through a link with too many `..`", field="path")
            found.pop()
            continue
        target = await _target(guest, _place([*found, part])) if left or follow else None
        if target is None:
            found.append(part)
            continue
        links += 1
        if target.startswith("/"):
            link = "/" + "/".join([*found, part])
            raise InvalidPath(f"{path}: leads out of the volume, for {link} is a link to {target}", field="path")
        left.extendleft(reversed(_parts(target)))
    return _place(found)


async def _target(guest: Guest, place: str) -> str | None:
    """If it is a link."""
    try:
        return (await guest.stat(place)).target
    except (FileMissing, FileConflict):  # whoever wants it finds that too
        return None


async def described(guest: Guest, path: str) -> FileInfo:
    """A link is described, not followed."""
    try:
        return seen(await guest.stat(await inside(guest, path, follow=False)))
    except FileMissing:
        raise FileMissing(f"{path}: there is no such file or directory in the volume") from None


def seen(info: FileInfo) -> FileInfo:
    """As the volume's own."""
    inside = info.path.removeprefix(ROOT) or "/"
    return info.model_copy(update={"path": inside, "name": info.name if inside != "/" else "/"})


@contextlib.contextmanager
def _paths_of_the_volume() -> Iterator[None]:
    """What goes wrong is told with paths of the volume, not of that machine."""
    try:
        yield
    except ForkyardError as error:
        error.message = error.message.replace(f"{ROOT}/", "/").replace(ROOT, "/")
        error.args = (error.message,)
        raise


def _place(parts: list[str]) -> str:
    return "/".join([ROOT, *parts])


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
