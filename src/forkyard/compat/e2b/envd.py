"""What a client says to one sandbox, as if envd ran in it: who may, the Connect services, and the plain HTTP routes.

Owns: the token of a sandbox (derived, so nothing is stored), signatures of file URLs, uploads and downloads. Never
reachable: what E2B keeps to itself (`/init`, `/freeze` …).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from forkyard.compat.e2b import connect, metadata, users
from forkyard.compat.e2b.code import CodeInterpreter
from forkyard.compat.e2b.errors import Failed, Refused, answer, not_running, status_of
from forkyard.compat.e2b.filesystem import Files
from forkyard.compat.e2b.measuring import measured
from forkyard.compat.e2b.notes import Note, is_up
from forkyard.compat.e2b.process import Processes
from forkyard.compat.e2b.traffic import Traffic
from forkyard.compat.e2b.waking import is_awake
from forkyard.compat.e2b.watching import Watches
from forkyard.control.plane import ControlPlane
from forkyard.errors import CommandNotFound, FileConflict, ForkyardError, NotFound, SandboxEnded, SandboxNotFound
from forkyard.guest.base import Guest
from forkyard.lifecycle import ENDED, State
from forkyard.models import SandboxInfo

PORT = 49983
MAX_UPLOADS = 1000
_PIECE_BYTES = 2**18
_SERVICES = ("/process.Process/", "/filesystem.Filesystem/")

Unary = Callable[[str, Request, connect.Message], Awaitable[connect.Message]]
Streaming = Callable[[str, Request], Awaitable[Response]]


class Envd:
    def __init__(self, control: ControlPlane, traffic: Traffic, default_user: str) -> None:
        self._control = control
        self._default_user = default_user
        self._code = CodeInterpreter(control, traffic)
        process, files = Processes(control), Files(control)
        self._watches = watches = Watches(control)
        self._unary: dict[str, Unary] = {
            "/process.Process/List": process.listed,
            "/process.Process/SendInput": process.send_input,
            "/process.Process/CloseStdin": process.close_stdin,
            "/process.Process/SendSignal": process.send_signal,
            "/process.Process/Update": process.update,
            "/filesystem.Filesystem/Stat": files.stat,
            "/filesystem.Filesystem/ListDir": files.list_dir,
            "/filesystem.Filesystem/MakeDir": files.make_dir,
            "/filesystem.Filesystem/Move": files.move,
            "/filesystem.Filesystem/Remove": files.remove,
            "/filesystem.Filesystem/CreateWatcher": watches.create,
            "/filesystem.Filesystem/GetWatcherEvents": watches.events,
            "/filesystem.Filesystem/RemoveWatcher": watches.remove,
        }
        self._streams: dict[str, Streaming] = {
            "/process.Process/Start": process.start,
            "/process.Process/Connect": process.connect,
            "/process.Process/StreamInput": process.stream_input,
            "/filesystem.Filesystem/WatchDir": watches.watch_dir,
        }
        self._plain: dict[tuple[str, str], Callable[[SandboxInfo, Request], Awaitable[Response]]] = {
            ("GET", "/files"): self._download,
            ("POST", "/files"): self._upload,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/envs"): self._envs,
        }

    async def aclose(self) -> None:
        await self._watches.aclose()

    # ── who may ──────────────────────────────────────────────────────────────────────────────────────────────────

    def token(self, sandbox_id: str) -> str:
        """Says whose it is: some clients send nothing else to tell."""
        return f"{sandbox_id}_{self._control.secrets.digest(f'envd of {sandbox_id}')}"

    async def signed_for(self, request: Request) -> str | None:
        """The sandbox a signed URL is of, if the URL does not say: the one whose token made the signature."""
        page = await self._control.sandboxes.list(states=[State.RUNNING, State.PAUSED], limit=1000)
        return next((one.id for one in page.items if self._signed(one.id, request)), None)

    def _signed(self, sandbox_id: str, request: Request) -> bool:
        query = request.query_params
        act = "read" if request.method in ("GET", "HEAD") else "write"
        parts = [query.get("path", ""), act, query.get("username", ""), self.token(sandbox_id)]
        if "signature_expiration" in query:
            parts.append(query["signature_expiration"])
        digest = hashlib.sha256(":".join(parts).encode("utf-8", "replace")).digest()
        wanted = "v1_" + base64.b64encode(digest).decode("ascii").rstrip("=")
        return hmac.compare_digest(wanted, query.get("signature", "").encode("ascii", "replace").decode())

    def _admit(self, sandbox_id: str, request: Request) -> None:
        given = request.headers.get("x-access-token")
        if given is not None:
            if not hmac.compare_digest(given.encode("utf-8", "replace"), self.token(sandbox_id).encode()):
                raise Refused(
                    401, "unauthorized access, please provide a valid access token or method signing if supported"
                )
            return
        if request.url.path != "/files":
            raise Refused(
                401, "unauthorized access, please provide a valid access token or method signing if supported"
            )
        if "signature" not in request.query_params:
            raise Refused(401, "missing signature query parameter")
        if not self._signed(sandbox_id, request):
            raise Refused(401, "invalid signature")
        expires = request.query_params.get("signature_expiration", "")
        if expires and (
            not (expires.isascii() and expires.isdigit()) or len(expires) > 15 or int(expires) < time.time()
        ):
            raise Refused(401, "signature is already expired")

    # ── one request ──────────────────────────────────────────────────────────────────────────────────────────────

    async def serve(self, sandbox_id: str, request: Request, *, code: bool = False) -> Response:
        """`code`: it is for the code interpreter."""
        path = request.url.path
        service = path.startswith(_SERVICES) and not code
        try:
            try:
                info = await self._control.sandboxes.get(sandbox_id)
            except SandboxNotFound:
                return not_running(sandbox_id)
            if info.state in ENDED or info.state is State.DELETING:
                return not_running(sandbox_id)
            if path == "/health" and not code:
                return Response(status_code=204) if is_up(info.state) else not_running(sandbox_id)
            if not (code and self._code.is_open(info, request)):
                self._admit(sandbox_id, request)
            note = Note.of(info)
            request.state.default_user = users.User(
                (note and note.user) or self._default_user, None if note is None else note.workdir
            )
            if not await is_awake(self._control, info):
                return not_running(sandbox_id)
            if code:
                return await self._code.serve(sandbox_id, request)
            if service:
                return await self._call(sandbox_id, request)
            handler = self._plain.get((request.method, path))
            if handler is None:
                return answer(404, f"{request.method} {path[:200]} is not served here")
            return await handler(info, request)
        except (SandboxEnded, SandboxNotFound):
            return not_running(sandbox_id)
        except Refused as error:
            if service:
                return connect.error_answer(Failed("unauthenticated", error.message))
            return answer(error.status, error.message)
        except Failed as error:
            return answer(401 if error.code == "unauthenticated" else 400, error.message)
        except CommandNotFound as error:  # the only name a plain route looks up is a user's
            return answer(401, error.message)
        except ForkyardError as error:
            return answer(status_of(error), error.message)

    async def _call(self, sandbox_id: str, request: Request) -> Response:
        path = request.url.path
        unary, streaming = self._unary.get(path), self._streams.get(path)
        if unary is None and streaming is None:
            return connect.error_answer(Failed("unimplemented", f"{path[:200]} is not served here"))
        if request.method != "POST":
            return JSONResponse({"code": "unimplemented", "message": "send a POST"}, 405, {"Allow": "POST"})
        try:
            if unary is not None:
                return await connect.unary(request, partial(unary, sandbox_id))
            assert streaming is not None
            return await streaming(sandbox_id, request)
        except ClientDisconnect:
            raise
        except Exception as raised:
            error = connect.known(raised)
            if error.code == "unavailable":
                state = (await self._control.sandboxes.get(sandbox_id)).state
                if not is_up(state):
                    return not_running(sandbox_id)
            if unary is not None or not request.headers.get("content-type", "").startswith("application/connect+"):
                return connect.error_answer(error)
            return connect.broken(request, error)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _user(self, request: Request) -> users.User:
        name = request.query_params.get("username")
        return users.named(name) if name else users.of_header(request)

    async def _download(self, info: SandboxInfo, request: Request) -> Response:
        path = self._user(request).path(request.query_params.get("path", ""))
        opened = AsyncExitStack()
        guest = await opened.enter_async_context(self._control.sandboxes.use(info.id))
        try:
            found = await guest.stat(path)
            if found.type == "directory":
                raise Refused(400, f"path '{path}' is a directory")
            try:
                chunks = await opened.enter_async_context(guest.read_file(path))
            except FileConflict as error:
                raise Refused(400, error.message) from None
        except NotFound:
            await opened.aclose()
            raise Refused(404, f"path '{path}' does not exist") from None
        except BaseException:
            await opened.aclose()
            raise
        headers = {"Content-Disposition": f"inline; filename*=UTF-8''{quote(found.name, errors='replace')}"}
        # Clients that only can, and did not ask for it, are sent it as it is: the way is short.
        packed = request.headers.get("accept-encoding", "").strip().lower() == "gzip"
        if packed:
            headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
            chunks = _packed(chunks)
        return StreamingResponse(_until_end(opened, chunks), headers=headers, media_type="application/octet-stream")

    async def _upload(self, info: SandboxInfo, request: Request) -> Response:
        user, noted = self._user(request), metadata.of_headers(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        path = request.query_params.get("path")
        async with self._control.sandboxes.use(info.id) as guest:
            if kind == "multipart/form-data":
                return JSONResponse(await self._upload_form(guest, user, path, noted, request))
            if not path:
                raise Refused(400, "path is missing")
            chunks: AsyncIterator[bytes] = request.stream()
            encoding = request.headers.get("content-encoding", "identity").lower()
            if encoding == "gzip":
                chunks = _unpacked(chunks)
            elif encoding != "identity":
                raise Refused(400, f"Content-Encoding {encoding[:40]!r} is not served here; gzip is")
            return JSONResponse([await _write(guest, user, path, noted, chunks)])

    async def _upload_form(
        self, guest: Guest, user: users.User, path: str | None, noted: dict[str, str], request: Request
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
                written.append(await _write(guest, user, to, noted, _pieces(part)))
            return written
        finally:
            await form.close()

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _metrics(self, info: SandboxInfo, _request: Request) -> Response:
        found = await measured(self._control, info)
        return JSONResponse(
            {
                "ts": found.at,
                "cpu_count": found.cpu_count,
                "cpu_used_pct": found.cpu_used_pct,
                "mem_total": found.mem_total,
                "mem_used": found.mem_used,
                "mem_cache": found.mem_cache,
                "disk_used": found.disk_used,
                "disk_total": found.disk_total,
            }
        )

    async def _envs(self, info: SandboxInfo, _request: Request) -> Response:
        return JSONResponse(dict((await self._control.ground.record(info.id)).env))


async def _write(
    guest: Guest, user: users.User, path: str, noted: dict[str, str], chunks: AsyncIterator[bytes]
) -> dict[str, Any]:
    to = user.path(path)
    if to.endswith("/"):
        raise Refused(400, f"path '{to}' is a directory")
    try:
        written = await guest.write_file(to, chunks, user=user.name, attributes=noted)
    except FileConflict as error:
        raise Refused(400, f"path is a directory: {error.message}") from None
    return {"name": written.name, "type": "file", "path": written.path, **metadata.told(written)}


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
