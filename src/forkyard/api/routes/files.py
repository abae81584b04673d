"""Files of a sandbox: bytes in and out as they flow, of any size; everything else as small JSON.

Names are bytes: see `api.inputs` for how they are written in queries and in JSON.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from forkyard.api.answers import answer, done
from forkyard.api.inputs import BoundedRoute, Control, QueryPath, RunningGuest, checked_path, raw_body, upload
from forkyard.api.problem import documented
from forkyard.api.streams import ByteStream, NdjsonStream, TarStream, lines, non_empty, opened
from forkyard.errors import (
    FileConflict,
    FileMissing,
    GuestDiskFull,
    GuestFailure,
    GuestPermissionDenied,
    GuestUnreachable,
    HostFailure,
    InvalidPath,
    NoCapacity,
    OperationTimeout,
    QuotaExceeded,
    SandboxEnded,
    SandboxNotFound,
    StateConflict,
)
from forkyard.models import FileChmod, FileExists, FileInfo, FileMkdir, FileMove, Page

_PREFIX = "/sandboxes/{sandbox_id}/files"
_ERRORS = documented(
    GuestFailure,
    GuestPermissionDenied,
    SandboxNotFound,
    FileMissing,
    StateConflict,
    FileConflict,
    SandboxEnded,
    InvalidPath,
    GuestUnreachable,
    NoCapacity,
    QuotaExceeded,
    HostFailure,
    OperationTimeout,
    GuestDiskFull,
)
#: Bodies as large as they like.
streams = APIRouter(prefix=_PREFIX, tags=["files"], responses=_ERRORS)
router = APIRouter(prefix=_PREFIX, tags=["files"], responses=_ERRORS, route_class=BoundedRoute)

_User = Annotated[
    str | None, Query(pattern=r"^[a-z_][a-z0-9_.-]{0,31}$", description="Owner of what is made. Default: root.")
]
_Size = Annotated[int, Query(ge=0, le=2**63 - 1)]


def _bytes(media_type: str, description: str) -> dict[int | str, dict[str, Any]]:
    return {
        200: {
            "description": description,
            "content": {media_type: {"schema": {"type": "string", "format": "binary"}}},
        }
    }


@streams.get(
    "",
    response_class=ByteStream,
    summary="Read a file",
    responses=_bytes(ByteStream.media_type, "The bytes of the file."),
)
async def read(
    path: QueryPath,
    guest: RunningGuest,
    offset: _Size = 0,
    length: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
) -> Response:
    stack, chunks = await opened(guest.read_file(path, offset=offset, length=length))
    return ByteStream(stack, non_empty(chunks))


@streams.put("", response_model=FileInfo, summary="Write a file", openapi_extra=raw_body("The bytes of the file."))
async def write(
    request: Request,
    path: QueryPath,
    guest: RunningGuest,
    mode: Annotated[str | None, Query(pattern=r"^[0-7]{1,4}$", description="Octal, such as 644.")] = None,
    user: _User = None,
    append: bool = False,
    parents: Annotated[bool, Query(description="Make missing directories.")] = True,
) -> Response:
    """Atomic: the file changes when the last byte has arrived, or not at all. Except with `append`."""
    permissions = None if mode is None else int(mode, 8)
    return answer(
        await guest.write_file(path, upload(request), mode=permissions, user=user, append=append, parents=parents)
    )


@streams.get(
    "/tar",
    response_class=TarStream,
    summary="Download a file or directory as tar",
    responses=_bytes(TarStream.media_type, "A tar archive."),
)
async def download(path: QueryPath, guest: RunningGuest) -> Response:
    stack, chunks = await opened(guest.download_tar(path))
    return TarStream(stack, non_empty(chunks))


@streams.put(
    "/tar",
    status_code=204,
    summary="Upload a directory as tar",
    openapi_extra=raw_body("A tar archive, extracted below `path`.", TarStream.media_type),
)
async def upload_tar(request: Request, path: QueryPath, guest: RunningGuest, user: _User = None) -> Response:
    await guest.upload_tar(path, upload(request), user=user)
    return done()


@router.delete("", status_code=204, summary="Remove a file or directory")
async def remove(path: QueryPath, guest: RunningGuest, recursive: bool = False) -> Response:
    await guest.remove(path, recursive=recursive)
    return done()


@router.get("/stat", response_model=FileInfo, summary="Describe a file or directory")
async def stat(path: QueryPath, guest: RunningGuest) -> Response:
    return answer(await guest.stat(path))


@router.get("/exists", response_model=FileExists, summary="Is there something at this path?")
async def exists(path: QueryPath, guest: RunningGuest) -> Response:
    return answer(FileExists(exists=await guest.exists(path)))


@router.get("/list", response_model=Page[FileInfo], summary="List a directory")
async def list_(path: QueryPath, guest: RunningGuest, depth: Annotated[int, Query(ge=1, le=64)] = 1) -> Response:
    return answer(Page[FileInfo](items=await guest.list_dir(path, depth=depth)))


@router.post("/mkdir", status_code=204, summary="Make a directory")
async def mkdir(body: FileMkdir, guest: RunningGuest) -> Response:
    await guest.mkdir(checked_path(body.path), mode=body.mode, parents=body.parents, user=body.user)
    return done()


@router.post("/move", status_code=204, summary="Move or rename")
async def move(body: FileMove, guest: RunningGuest) -> Response:
    source, destination = checked_path(body.source, "source"), checked_path(body.destination, "destination")
    await guest.move(source, destination, overwrite=body.overwrite)
    return done()


@router.post("/chmod", status_code=204, summary="Change permissions")
async def chmod(body: FileChmod, guest: RunningGuest) -> Response:
    await guest.chmod(checked_path(body.path), body.mode)
    return done()


@router.get(
    "/watch",
    response_class=NdjsonStream,
    summary="Follow changes below a path",
    responses={
        200: {
            "description": 'First `{"type":"ready"}`, then one `WatchEvent` per line; an empty line every 15 s.',
            "content": {
                NdjsonStream.media_type: {
                    "schema": {"type": "string"},
                    "example": '{"type":"ready"}\n{"type":"created","path":"/repo/a.py","to":null}\n',
                }
            },
        }
    },
)
async def watch(sandbox_id: str, path: QueryPath, control: Control, recursive: bool = False) -> Response:
    """Does not keep the sandbox awake. After a sleep that ended the watch it goes on with an `overflow`: look again."""
    stack, events = await opened(control.following.watch(sandbox_id, path, recursive=recursive))
    return NdjsonStream(stack, lines(events, first={"type": "ready"}))
