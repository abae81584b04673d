"""Files over plain HTTP: downloads, uploads, and several of them put together.

An upload appears whole, by a rename.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import quote

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from forkyard.compat.e2b import metadata, models, users
from forkyard.compat.e2b.errors import Refused, about
from forkyard.compat.e2b.watching import Watches
from forkyard.control.plane import ControlPlane
from forkyard.errors import FileConflict, NotFound
from forkyard.guest.base import Guest
from forkyard.models import FileInfo, SandboxInfo

MAX_UPLOADS = 1000
_PIECE_BYTES = 2**18


class Transfers:
    def __init__(self, control: ControlPlane, watches: Watches, found: users.Users) -> None:
        """`watches` are told what is written over: to them it looks like a new file."""
        self._control = control
        self._watches = watches
        self._users = found

    async def head(self, info: SandboxInfo, request: Request) -> Response:
        path = users.of(request).path(request.query_params.get("path", ""))
        async with self._control.sandboxes.use(info.id) as guest:
            found = await _file(guest, path)
        headers = {**_named(found), "Content-Length": str(found.size)} if found.type == "file" else _named(found)
        return Response(headers=headers, media_type="application/octet-stream")

    async def download(self, info: SandboxInfo, request: Request) -> Response:
        path = users.of(request).path(request.query_params.get("path", ""))
        opened = AsyncExitStack()
        guest = await opened.enter_async_context(self._control.sandboxes.use(info.id))
        try:
            found = await _file(guest, path)
            try:
                chunks = await opened.enter_async_context(guest.read_file(path))
            except FileConflict as error:
                raise Refused(400, error.message) from None
            except NotFound:
                raise _missing(path) from None
        except BaseException:
            await opened.aclose()
            raise
        headers = _named(found)
        # Clients that only can, and did not ask for it, are sent it as it is: the way is short.
        packed = request.headers.get("accept-encoding", "").strip().lower() == "gzip"
        if packed:
            headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
            chunks = _packed(chunks)
        return StreamingResponse(_until_end(opened, chunks), headers=headers, media_type="application/octet-stream")

    async def upload(self, info: SandboxInfo, request: Request) -> Response:
        user, noted = users.of(request), metadata.of_headers(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        path = request.query_params.get("path")
        async with self._control.sandboxes.use(info.id) as guest:
            if kind == "multipart/form-data":
                return JSONResponse(await self._upload_form(info.id, guest, user, path, noted, request))
            if not path:
                raise Refused(400, "path is missing")
            chunks: AsyncIterator[bytes] = request.stream()
            encoding = request.headers.get("content-encoding", "identity").lower()
            if encoding == "gzip":
                chunks = _unpacked(chunks)
            elif encoding != "identity":
                raise Refused(400, f"Content-Encoding {encoding[:40]!r} is not served here; gzip is")
            return JSONResponse([await self._write(info.id, guest, user, path, noted, chunks)])

    async def _upload_form(
        self, sandbox_id: str, guest: Guest, user: users.User, path: str | None, noted: dict[str, str], request: Request
    ) -> list[dict[str, Any]]:
        try:
            form: FormData = await request.form(max_files=MAX_UPLOADS, max_fields=MAX_UPLOADS)
        except (MultiPartException, ValueError, KeyError) as error:
            raise Refused(400, f"the form cannot be read: {error}") from None
        except Exception as error:  # Starlette turns its own into an HTTPException inside an app
            detail = getattr(error, "detail", None)
            if detail is None:
                raise
            raise Refused(400, f"the form cannot be read: {detail}") from None
        try:
            files = [part for name, part in form.multi_items() if name == "file" and isinstance(part, UploadFile)]
            if not files:
                raise Refused(400, "the form has no part `file`")
            if path and len(files) > 1:
                raise Refused(400, "a form with several files names each; leave path out")
            written = []
            for part in files:
                to = path or part.filename
                if not to:
                    raise Refused(400, "a file has no path")
                written.append(await self._write(sandbox_id, guest, user, to, noted, _pieces(part)))
            return written
        finally:
            await form.close()

    async def compose(self, info: SandboxInfo, request: Request) -> Response:
        """Its sources are gone then."""
        body, user = await models.read(request, models.Compose), users.of(request)
        if body.username:
            user = await self._users.known(info.id, users.User(body.username))
        sources = [user.path(one, "source_paths") for one in body.sources]
        to = user.path(body.destination, "destination")
        if to in sources:
            raise Refused(400, f"destination '{to}' is one of the source_paths")
        async with self._control.sandboxes.use(info.id) as guest:
            for path in sources:
                await _file(guest, path)
            written = await self._write(info.id, guest, user, to, {}, _one_after_another(guest, sources))
            for path in dict.fromkeys(sources):
                await guest.remove(path)
        return JSONResponse(written)

    async def _write(
        self,
        sandbox_id: str,
        guest: Guest,
        user: users.User,
        path: str,
        noted: dict[str, str],
        chunks: AsyncIterator[bytes],
    ) -> dict[str, Any]:
        to = user.path(path)
        if to.endswith("/"):
            raise Refused(400, f"path '{to}' is a directory")
        if self._watches.watching(sandbox_id) and await guest.exists(to):
            self._watches.written_over(sandbox_id, to)
        try:
            with about(to):
                written = await guest.write_file(to, chunks, user=user.name, attributes=noted)
        except FileConflict as error:
            raise Refused(400, error.message) from None
        return {"name": written.name, "type": "file", "path": written.path, **metadata.told(written)}


async def _file(guest: Guest, path: str) -> FileInfo:
    try:
        with about(path):
            found = await guest.stat(path)
    except NotFound:
        raise _missing(path) from None
    if found.type == "directory":
        raise Refused(400, f"path '{path}' is a directory")
    return found


def _missing(path: str) -> Refused:
    return Refused(404, f"path '{path}' does not exist")


def _named(found: FileInfo) -> dict[str, str]:
    return {"Content-Disposition": f"inline; filename*=UTF-8''{quote(found.name, errors='replace')}"}


async def _one_after_another(guest: Guest, paths: list[str]) -> AsyncIterator[bytes]:
    for path in paths:
        async with guest.read_file(path) as chunks:
            async for chunk in chunks:
                yield chunk


async def _pieces(part: UploadFile) -> AsyncIterator[bytes]:
    while piece := await part.read(_PIECE_BYTES):
        yield piece


async def _until_end(opened: AsyncExitStack, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with opened:
        async for chunk in chunks:
            yield chunk


async def _packed(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    async for chunk in chunks:
        yield packer.compress(chunk)
    yield packer.flush()


async def _unpacked(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    unpacker = zlib.decompressobj(31)
    try:
        async for chunk in chunks:
            while chunk:
                # In pieces: a small upload may be a big file.
                yield unpacker.decompress(chunk, _PIECE_BYTES)
                chunk = unpacker.unconsumed_tail
        yield unpacker.flush()
    except zlib.error:
        raise Refused(400, "the body is not gzip, as its Content-Encoding says") from None
    if not unpacker.eof:
        raise Refused(400, "the gzip body is cut off")
