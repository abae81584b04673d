"""Files brought into a guest: out of an upload, or out of the guest of another stage.

Owns: what lies between `copying`, which knows archives, and guests. What comes out of a guest or an upload is bounded,
and goes to disk on its way.
"""

from __future__ import annotations

import asyncio
import posixpath
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from forkyard.builds.copying import Archive, Owner
from forkyard.builds.dockerfile.instructions import CopyStep
from forkyard.builds.uploads import PARTIAL
from forkyard.errors import FileMissing, InvalidRequest
from forkyard.guest.base import Guest
from forkyard.images.archives import Bounded
from forkyard.models.bases import AddStep

MAX_BYTES = 16 * 2**30
_CHUNK_BYTES = 256 * 1024
_MAX_TABLE_BYTES = 2**20
_MAX_LINKS = 8


@dataclass(frozen=True)
class Materials:
    """What steps may ask for besides the machine they are done in. `scratch`: where files lie on their way."""

    upload: Callable[[str], Path]
    scratch: Path
    stage: Callable[[int], Awaitable[Guest]]
    secrets: Mapping[str, str] = field(default_factory=dict)  # by name, what stands for them inside


async def add(guest: Guest, step: AddStep, workdir: str | None, materials: Materials) -> None:
    to = posixpath.join(workdir or "/root", step.to)
    if not to.endswith("/") and await _is_directory(guest, to):
        to += "/"
    owner = await _owner(guest, step.owner)
    if isinstance(step, CopyStep) and step.stage is not None:
        source = await materials.stage(step.stage)
        for path in step.sources:
            with tempfile.NamedTemporaryFile(dir=materials.scratch, prefix=PARTIAL) as file:
                wanted, called = await _taken(source, path, file, materials.scratch)
                archive = Archive(Path(file.name), follow=False)
                place = to + called if to.endswith("/") else to
                await _put(guest, archive, [wanted], step, place, owner, materials.scratch)
    else:
        assert step.context is not None
        archive = Archive(materials.upload(step.context))
        await _put(guest, archive, step.sources, step, to, owner or Owner(0, 0), materials.scratch)


async def _put(
    guest: Guest, archive: Archive, sources: list[str], step: AddStep, to: str, owner: Owner | None, scratch: Path
) -> None:
    with ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryFile(dir=scratch, prefix=PARTIAL))
        await asyncio.to_thread(stack.enter_context, archive)
        if not to.endswith("/") and await asyncio.to_thread(archive.is_directory, sources, extract=step.extract):
            to += "/"
        missing = await _missing(guest, to)

        def repack() -> None:
            bounded = Bounded(out, scratch, MAX_BYTES)
            archive.repack(sources, to, bounded, owner=owner, mode=step.mode, extract=step.extract, missing=missing)
            out.seek(0)

        await asyncio.to_thread(repack)
        await guest.upload_tar("/", _chunks(out), owners=True)


async def _missing(guest: Guest, to: str) -> list[str]:
    """The directories of a path that are not there yet, the outermost first."""
    path, found = posixpath.normpath(posixpath.dirname(to)), list[str]()
    while not await _is_directory(guest, path):
        if await guest.exists(path):
            raise InvalidRequest(f"{path} in the machine is no directory, and nothing can be copied into it")
        found.append(path)
        path = posixpath.dirname(path)
    return found[::-1]


async def _taken(source: Guest, path: str, to: IO[bytes], scratch: Path) -> tuple[str, str]:
    """An archive with what is at `path` in another machine is written. Returns what that is called in it; and, of a file,
    how it was named, which may be a link to it."""
    path = posixpath.normpath(posixpath.join("/", path))
    # A pattern is for the archive: what is above it is fetched.
    parts = path.strip("/").split("/")
    plain = next((at for at, part in enumerate(parts) if any(char in part for char in "*?[")), len(parts))
    fetched, wanted = "/" + "/".join(parts[:plain]), "/".join(parts[plain:])
    try:
        fetched = await _followed(source, fetched)
        info = await source.stat(fetched)
    except FileMissing:
        raise InvalidRequest(f"there is nothing called {path} in the stage to copy from") from None
    called = ""
    if info.type != "directory":
        wanted, called = posixpath.basename(fetched), posixpath.basename(path)
    bounded = Bounded(to, scratch, MAX_BYTES)
    async with source.download_tar(fetched, attributes=True) as chunks:
        async for chunk in chunks:
            await asyncio.to_thread(bounded.write, chunk)
    await asyncio.to_thread(to.flush)
    return wanted or ".", called


async def _is_directory(guest: Guest, path: str) -> bool:
    try:
        return (await guest.stat(await _followed(guest, path))).type == "directory"
    except FileMissing:
        return False


async def _followed(guest: Guest, path: str) -> str:
    """Where links lead to."""
    for _ in range(_MAX_LINKS):
        info = await guest.stat(path)
        if info.type != "symlink" or not info.target:
            break
        path = posixpath.normpath(posixpath.join(posixpath.dirname(path), info.target))
    return path


async def _owner(guest: Guest, named: str | None) -> Owner | None:
    if named is None:
        return None
    user, _, group = named.partition(":")
    uid, own_gid = await _number(guest, "/etc/passwd", user)
    gid = own_gid if not group else (await _number(guest, "/etc/group", group))[0]
    return Owner(uid, uid if gid is None else gid)


async def _number(guest: Guest, table: str, name: str) -> tuple[int, int | None]:
    """Of a user or group, by name or number; and the group of a user."""
    if name.isdigit():
        return int(name), None
    content = bytearray()
    try:
        async with guest.read_file(table, length=_MAX_TABLE_BYTES) as chunks:
            async for chunk in chunks:
                content += chunk
    except FileMissing:
        pass
    for line in content.decode(errors="replace").splitlines():
        fields = line.split(":")
        if fields[0] == name and len(fields) >= 3 and fields[2].isdigit():
            group = fields[3] if len(fields) > 3 and table.endswith("passwd") else ""
            return int(fields[2]), int(group) if group.isdigit() else None
    raise InvalidRequest(f"{table} of the machine has no {name!r}; make it in a step before")


async def _chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
        yield chunk
