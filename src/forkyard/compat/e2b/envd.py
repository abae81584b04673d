"""What a client says to one sandbox, as if envd ran in it: who may, the Connect services, and the plain HTTP routes.

Owns: the token of a sandbox (derived, so nothing is stored), and signatures of file URLs. Never
reachable: what E2B keeps to itself (`/init`, `/freeze` …).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from forkyard.compat.e2b import connect, users
from forkyard.compat.e2b.code import CodeInterpreter
from forkyard.compat.e2b.errors import Failed, Refused, answer, not_running, status_of
from forkyard.compat.e2b.filesystem import Files
from forkyard.compat.e2b.measuring import measured
from forkyard.compat.e2b.notes import Note, is_up
from forkyard.compat.e2b.process import Processes
from forkyard.compat.e2b.traffic import Traffic
from forkyard.compat.e2b.transfers import Transfers
from forkyard.compat.e2b.waking import is_awake
from forkyard.compat.e2b.watching import Watches
from forkyard.control.plane import ControlPlane
from forkyard.errors import ForkyardError, SandboxEnded, SandboxNotFound
from forkyard.lifecycle import ENDED, State
from forkyard.models import SandboxInfo

PORT = 49983
_SIGNING = (State.RUNNING, State.PAUSED, State.RESUMING, State.PAUSING)
#: A page of anywhere may use what it was given: every request says by what it may.
_ANYWHERE = {"Access-Control-Allow-Origin": "*"}
_PREFLIGHT = {
    **_ANYWHERE,
    "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
    "Access-Control-Allow-Headers": "*, Authorization",
    "Access-Control-Max-Age": "7200",
}
_SERVICES = ("/process.Process/", "/filesystem.Filesystem/")

Unary = Callable[[str, Request, connect.Message], Awaitable[connect.Message]]
Streaming = Callable[[str, Request], Awaitable[Response]]


class Envd:
    def __init__(self, control: ControlPlane, traffic: Traffic, default_user: str) -> None:
        self._control = control
        self._default_user = default_user
        self._users = users.Users(control, default_user)
        self._code = CodeInterpreter(control, traffic)
        process, files = Processes(control), Files(control)
        self._watches = watches = Watches(control)
        transfers = Transfers(control, watches, self._users)
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
            ("GET", "/files"): transfers.download,
            ("HEAD", "/files"): transfers.head,
            ("POST", "/files"): transfers.upload,
            ("POST", "/files/compose"): transfers.compose,
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
        cursor = None
        while True:
            page = await self._control.sandboxes.list(states=_SIGNING, limit=1000, cursor=cursor)
            found = next((one.id for one in page.items if self._signed(one.id, request)), None)
            cursor = page.next_cursor
            if found is not None or cursor is None:
                return found

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
        if request.method == "OPTIONS" and "access-control-request-method" in request.headers and not code:
            return Response(status_code=204, headers=_PREFLIGHT)
        response = await self._serve(sandbox_id, request, code=code)
        if "origin" in request.headers and not code:
            response.headers.update(_ANYWHERE)
        return response

    async def _serve(self, sandbox_id: str, request: Request, *, code: bool) -> Response:
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
            default = users.User((note and note.user) or self._default_user, None if note is None else note.workdir)
            if not await is_awake(self._control, info):
                return not_running(sandbox_id)
            if service:
                return await self._call(sandbox_id, request, default)
            request.state.user = await self._users.find(sandbox_id, request, default)
            if code:
                return await self._code.serve(sandbox_id, request)
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
        except ForkyardError as error:
            return answer(status_of(error), error.message)

    async def _call(self, sandbox_id: str, request: Request, default: users.User) -> Response:
        path = request.url.path
        unary, streaming = self._unary.get(path), self._streams.get(path)
        if unary is None and streaming is None:
            return connect.error_answer(Failed("unimplemented", f"{path[:200]} is not served here"))
        if request.method != "POST":
            return JSONResponse({"code": "unimplemented", "message": "send a POST"}, 405, {"Allow": "POST"})
        try:
            request.state.user = await self._users.find(sandbox_id, request, default)
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
