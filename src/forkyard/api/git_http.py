"""`/git/NAME.git/…`: what `git clone`, `git push` and git-lfs talk to. Outside `/api/v1`, with credentials of its own.

Owns: Basic and Bearer credentials of git clients (the password is an API key or a token; any user name will do), what
each request needs, answers a git client can show to its user. The work is `git.transfer`'s and `git.lfs`'s.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from forkyard.api.access import address_of
from forkyard.api.git_lfs import LfsApi, lfs_problem
from forkyard.api.inputs import UPLOAD_IDLE_S
from forkyard.api.problem import known
from forkyard.control.identities import Principal
from forkyard.errors import Forbidden, NotFound, RepoNotFound, Unauthenticated
from forkyard.git.hosting import GitHosting
from forkyard.git.repositories import Repo
from forkyard.git.transfer import Ask, Gone, Service
from forkyard.models.git import Permission

PATH = re.compile(
    r"/git/(?P<repo>[^/]+?)(?:\.git)?/(?:(?P<refs>info/refs)|(?P<service>git-(?:upload|receive)-pack)|info/lfs/(?P<lfs>.*))"
)
#: None: nobody in particular.
Who = Callable[[Headers], Awaitable[Principal | None]]
#: The log has one line for the several requests of a fetch, and one for a fetch that leaves out the first of them.
FETCH_S = 3600.0
_MOST_FETCHERS = 10_000
_SERVICES: dict[str, Service] = {"git-upload-pack": "git-upload-pack", "git-receive-pack": "git-receive-pack"}


class GitHttp:
    """An ASGI application."""

    def __init__(self, hosting: GitHosting, who: Who | None = None) -> None:
        """`who` knows whose request it is; else its credential says so."""
        self._hosting = hosting
        self._who = who or self._by_credential
        self._lfs = LfsApi(hosting)
        self._fetched: dict[tuple[Principal, str | None, str], float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = PATH.fullmatch(scope["path"])
        request = Request(scope, receive)
        try:
            if found is None:
                raise NotFound(f"there is nothing at {scope['path']!r}; repositories are at /git/NAME.git")
            if found["lfs"] is not None:
                response = await self._large(request, found["repo"], found["lfs"])
                await response(scope, receive, send)
                return
            await self._transfer(request, found, scope, receive, send)
        except Exception as raised:
            error = known(raised)
            if scope.get("state", {}).get("git_started"):
                raise
            if found is not None and found["lfs"] is not None:
                await lfs_problem(error)(scope, receive, send)
                return
            headers = {"www-authenticate": 'Basic realm="Forkyard"'} if isinstance(error, Unauthenticated) else {}
            await PlainTextResponse(error.message + "\n", error.status, headers)(scope, receive, send)

    # ── who ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _by_credential(self, headers: Headers) -> Principal | None:
        credential = presented(headers)
        return None if credential is None else await self._hosting.identities.authenticate(credential)

    async def _opened(
        self, request: Request, name: str, wanted: Permission, action: str
    ) -> tuple[Repo, Principal | None]:
        """Who nobody knows hears the same of a private repository as of one that is not there."""
        identities = self._hosting.identities
        who = await self._who(request.headers)
        try:
            repo = await self._hosting.repositories.get(name)
        except RepoNotFound:
            if who is None:
                raise Unauthenticated("this repository needs a token; give it as the password") from None
            raise
        public = repo.record.visibility == "public"
        if who is None:
            if wanted == "write" or not public:
                raise Unauthenticated("this repository needs a token; give it as the password")
            return repo, None
        try:
            await identities.authorize_repo(who, wanted, repo.id, public=public)
        except (Forbidden, RepoNotFound):
            await identities.record(who, action, repo.id, allowed=False, address=address_of(request))
            raise
        return repo, who

    # ── fetch and push ───────────────────────────────────────────────────────────────────────────────────────────

    async def _transfer(
        self, request: Request, found: re.Match[str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        advertise = found["refs"] is not None
        if request.method not in (("GET", "HEAD") if advertise else ("POST",)):
            raise NotFound(f"{request.method} is not for this address")
        name = QueryParams(scope["query_string"]).get("service", "") if advertise else found["service"]
        if name not in _SERVICES:
            raise Forbidden("this server speaks only git's smart protocol; use git 1.6.6 or newer")
        service = _SERVICES[name]
        push = service == "git-receive-pack"
        repo, who = await self._opened(request, found["repo"], "write" if push else "read", _action(push))
        headers = request.headers
        ask = Ask(
            service=service,
            advertise=advertise,
            content_type=headers.get("content-type", "")[:200],
            content_encoding="gzip" if headers.get("content-encoding", "") in ("gzip", "x-gzip") else "",
            content_length=headers.get("content-length", "") if headers.get("content-length", "").isdigit() else "",
            protocol=_protocol(headers.get("git-protocol", "")),
            user="anonymous" if who is None else who.id,
            address=address_of(request) or "",
        )
        if who is not None and not push:
            await self._record_fetch(request, who, repo, first=advertise)
        whole = asyncio.Event()
        by = None if who is None else who.id
        serving = asyncio.create_task(self._pump(repo, ask, _body(receive, whole), by, scope, send))
        gone = asyncio.create_task(_until_gone(receive, whole))
        try:
            await asyncio.wait([serving, gone], return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() and not push:
                serving.cancel()
            changes = await serving
        except asyncio.CancelledError:
            if not gone.done():
                raise
            return  # the client of a fetch went away, and so nobody needs the rest
        finally:
            for task in (serving, gone):
                task.cancel()
            await asyncio.gather(serving, gone, return_exceptions=True)
        if push and not advertise and who is not None:
            await self._record(request, who, "git.push", repo, {"refs": changes})

    async def _pump(
        self, repo: Repo, ask: Ask, body: AsyncIterator[bytes], by: str | None, scope: Scope, send: Send
    ) -> list[dict[str, str]]:
        async with self._hosting.transfer.serve(repo, ask, body, by) as (answer, changes):
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
            scope.setdefault("state", {})["git_started"] = True
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            async with aclosing(answer.chunks) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return [vars(change) for change in changes]

    async def _record(self, request: Request, who: Principal, action: str, repo: Repo, data: dict[str, object]) -> None:
        await self._hosting.identities.record(who, action, repo.id, address=address_of(request), data=data)

    async def _record_fetch(self, request: Request, who: Principal, repo: Repo, *, first: bool) -> None:
        by, now = (who, address_of(request), repo.id), time.monotonic()
        if first or now - self._fetched.get(by, -FETCH_S) >= FETCH_S:
            await self._record(request, who, "git.fetch", repo, {})
            if len(self._fetched) >= _MOST_FETCHERS:
                self._fetched.clear()
            self._fetched[by] = now

    # ── large files ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _large(self, request: Request, name: str, rest: str) -> Response:
        wanted = await self._lfs.wanted(request, rest)
        repo, who = await self._opened(request, name, wanted, f"git.lfs.{wanted}")
        if who is not None and not who.admin:
            await self._record(request, who, f"git.lfs.{wanted}", repo, {"what": rest[:100]})
        return await self._lfs.answer(request, repo, who, rest)


def presented(headers: Headers) -> str | None:
    """None: no credential at all."""
    scheme, _, rest = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() == "basic":
        try:
            user, _, password = base64.b64decode(rest.strip(), validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            raise Unauthenticated("the Authorization header is not understood") from None
        return password or user
    return headers.get("x-api-key")


def _action(push: bool) -> str:
    return "git.push" if push else "git.fetch"


def _protocol(header: str) -> str:
    return header if re.fullmatch(r"[A-Za-z0-9=:._-]{1,100}", header) else ""


async def _body(receive: Receive, whole: asyncio.Event) -> AsyncIterator[bytes]:
    """`Gone` if the client leaves before its end, or stands still."""
    while True:
        try:
            async with asyncio.timeout(UPLOAD_IDLE_S):
                message = await receive()
        except TimeoutError:
            raise Gone from None
        if message["type"] == "http.disconnect":
            raise Gone
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body", False):
            whole.set()
            return


async def _until_gone(receive: Receive, whole: asyncio.Event) -> None:
    await whole.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
