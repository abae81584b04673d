"""Volumes: named disks that outlive sandboxes, their versions, and files in them.

A file in a volume is read and written by a machine that is made for the call, so each takes as long as a create.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query, Request, Response

from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute, Control, QueryPath, raw_body, upload
from forkyard.api.problem import documented
from forkyard.api.streams import ByteStream, TarStream, non_empty, opened
from forkyard.control.volume_files import described, inside, seen
from forkyard.errors import (
    Conflict,
    FileConflict,
    FileMissing,
    GuestDiskFull,
    HostFailure,
    NoCapacity,
    OperationTimeout,
    QuotaExceeded,
    SandboxNotFound,
    VolumeChanged,
    VolumeInUse,
    VolumeNotFound,
)
from forkyard.models import FileInfo, Page
from forkyard.models.volumes import VolumeCommit, VolumeCreate, VolumeInfo, VolumeVersionInfo

_ERRORS = documented(VolumeNotFound, HostFailure, NoCapacity, OperationTimeout)
_FILE_ERRORS = documented(FileMissing, FileConflict, VolumeInUse, GuestDiskFull)
router = APIRouter(prefix="/volumes", tags=["volumes"], route_class=BoundedRoute, responses=_ERRORS)
streams = APIRouter(prefix="/volumes", tags=["volumes"], responses=_ERRORS | _FILE_ERRORS)

_EXAMPLE = {
    "id": "vol-q7m2v9x4k1c8b3n6d5f0",
    "name": "datasets",
    "size_mib": 1024,
    "version": 3,
    "stored_bytes": 41943040,
    "writer": None,
    "used_by": [],
    "created_at": "2026-01-01T12:00:00Z",
}
_SHOWN: dict[str, Any] = {"content": {"application/json": {"example": _EXAMPLE}}}
_Name = Annotated[str, Path(max_length=64, description="Name or id of a volume.")]
_Version = Annotated[int | None, Query(ge=1, description="Default: the newest.")]


@router.post(
    "",
    status_code=201,
    response_model=VolumeInfo,
    summary="Make a volume",
    responses=documented(Conflict, QuotaExceeded) | {201: {"description": "It is there, empty.", **_SHOWN}},
)
async def create(
    request: Request, control: Control, body: Annotated[VolumeCreate, Body(examples=[{"name": "datasets"}])]
) -> Response:
    return answer(await control.volumes.create(body, key_id=request.state.api_key_id), 201)


@router.get("", response_model=Page[VolumeInfo], summary="List volumes, by name")
async def list_(control: Control) -> Response:
    return answer(Page[VolumeInfo](items=await control.volumes.list()))


@router.get("/{volume}", response_model=VolumeInfo, summary="Get a volume", responses={200: _SHOWN})
async def get(volume: _Name, control: Control) -> Response:
    return answer(await control.volumes.get(volume))


@router.delete("/{volume}", status_code=204, summary="Delete a volume", responses=documented(VolumeInUse))
async def delete(volume: _Name, control: Control) -> Response:
    """Refused while a sandbox has it. Snapshots of sandboxes that had it keep their copies."""
    await control.volumes.delete(volume)
    return done()


@router.get("/{volume}/versions", response_model=Page[VolumeVersionInfo], summary="List its versions, oldest first")
async def versions(volume: _Name, control: Control) -> Response:
    return answer(Page[VolumeVersionInfo](items=await control.volumes.versions(volume)))


@router.post(
    "/{volume}/versions",
    status_code=201,
    response_model=VolumeVersionInfo,
    summary="Keep what is in it now as a version",
)
async def keep(volume: _Name, control: Control) -> Response:
    """Of a volume that a sandbox writes to: what that sandbox has written by now."""
    return answer(await control.volumes.keep(volume), 201)


@router.delete("/{volume}/versions/{version}", status_code=204, summary="Delete a version")
async def drop_version(volume: _Name, version: Annotated[int, Path(ge=1)], control: Control) -> Response:
    """Sandboxes that have a copy of it keep theirs."""
    await control.volumes.drop_version(volume, version)
    return done()


@router.post(
    "/{volume}/commit",
    status_code=201,
    response_model=VolumeVersionInfo,
    summary="Make a sandbox's copy the newest version",
    responses=documented(SandboxNotFound, VolumeChanged, VolumeInUse),
)
async def commit(
    volume: _Name,
    control: Control,
    body: Annotated[VolumeCommit, Body(examples=[{"sandbox_id": "q7m2v9x4k1c8b3n6d5f0"}])],
) -> Response:
    """The sandbox goes on. Unless `force`, `volume_changed` if the volume has a newer version than its copy was made of."""
    return answer(await control.volumes.commit(volume, body), 201)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _bytes(media_type: str, description: str) -> dict[int | str, dict[str, Any]]:
    schema = {"schema": {"type": "string", "format": "binary"}}
    return {200: {"description": description, "content": {media_type: schema}}}


@streams.get(
    "/{volume}/files",
    response_class=ByteStream,
    summary="Read a file of a volume",
    responses=_bytes(ByteStream.media_type, "The bytes of the file."),
)
async def read(
    volume: _Name,
    path: QueryPath,
    request: Request,
    control: Control,
    offset: Annotated[int, Query(ge=0, le=2**63 - 1)] = 0,
    length: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
    version: _Version = None,
) -> Response:
    @asynccontextmanager
    async def reading() -> AsyncIterator[AsyncIterator[bytes]]:
        files = control.volume_files.opened(volume, version=version, key_id=request.state.api_key_id)
        async with files as guest, guest.read_file(await inside(guest, path), offset=offset, length=length) as chunks:
            yield chunks

    stack, chunks = await opened(reading())
    return ByteStream(stack, non_empty(chunks))


@streams.put(
    "/{volume}/files",
    response_model=FileInfo,
    summary="Write a file of a volume",
    openapi_extra=raw_body("The bytes of the file."),
)
async def write(
    volume: _Name,
    path: QueryPath,
    request: Request,
    control: Control,
    mode: Annotated[str | None, Query(pattern=r"^[0-7]{1,4}$", description="Octal, such as 644.")] = None,
    append: bool = False,
    parents: Annotated[bool, Query(description="Make missing directories.")] = True,
) -> Response:
    """`volume_in_use` if a sandbox writes to it: then write there."""
    permissions = None if mode is None else int(mode, 8)
    async with control.volume_files.opened(volume, write=True, key_id=request.state.api_key_id) as guest:
        made = await guest.write_file(
            await inside(guest, path), upload(request), mode=permissions, append=append, parents=parents
        )
    return answer(seen(made))


@streams.get(
    "/{volume}/files/tar",
    response_class=TarStream,
    summary="Download a directory of a volume as tar",
    responses=_bytes(TarStream.media_type, "A tar archive."),
)
async def download(
    volume: _Name, path: QueryPath, request: Request, control: Control, version: _Version = None
) -> Response:
    @asynccontextmanager
    async def reading() -> AsyncIterator[AsyncIterator[bytes]]:
        files = control.volume_files.opened(volume, version=version, key_id=request.state.api_key_id)
        async with files as guest, guest.download_tar(await inside(guest, path)) as chunks:
            yield chunks

    stack, chunks = await opened(reading())
    return TarStream(stack, non_empty(chunks))


@streams.put(
    "/{volume}/files/tar",
    status_code=204,
    summary="Upload a directory to a volume as tar",
    openapi_extra=raw_body("A tar archive, extracted below `path`.", TarStream.media_type),
)
async def upload_tar(volume: _Name, path: QueryPath, request: Request, control: Control) -> Response:
    async with control.volume_files.opened(volume, write=True, key_id=request.state.api_key_id) as guest:
        await guest.upload_tar(await inside(guest, path), upload(request))
    return done()


@router.get(
    "/{volume}/files/list",
    response_model=Page[FileInfo],
    summary="List a directory of a volume",
    responses=_FILE_ERRORS,
)
async def list_files(
    volume: _Name,
    path: QueryPath,
    request: Request,
    control: Control,
    depth: Annotated[int, Query(ge=1, le=64)] = 1,
    version: _Version = None,
) -> Response:
    async with control.volume_files.opened(volume, version=version, key_id=request.state.api_key_id) as guest:
        found = await guest.list_dir(await inside(guest, path), depth=depth)
    return answer(Page[FileInfo](items=[seen(info) for info in found]))


@router.get(
    "/{volume}/files/stat",
    response_model=FileInfo,
    summary="Describe a file or directory of a volume",
    responses=_FILE_ERRORS,
)
async def stat(
    volume: _Name, path: QueryPath, request: Request, control: Control, version: _Version = None
) -> Response:
    async with control.volume_files.opened(volume, version=version, key_id=request.state.api_key_id) as guest:
        return answer(await described(guest, path))


@router.delete(
    "/{volume}/files", status_code=204, summary="Remove a file or directory of a volume", responses=_FILE_ERRORS
)
async def remove(
    volume: _Name, path: QueryPath, request: Request, control: Control, recursive: bool = False
) -> Response:
    async with control.volume_files.opened(volume, write=True, key_id=request.state.api_key_id) as guest:
        await guest.remove(await inside(guest, path, follow=False), recursive=recursive)
    return done()
