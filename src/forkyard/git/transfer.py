"""Clone, fetch and push: `git http-backend`, fed and read as bytes flow, whatever their number.

Owns: the CGI request git expects, what a push changed, how many transfers run at once. A push whose client goes away
half-way leaves nothing: git writes into a quarantine. One that arrived whole is finished, heard or not. Never does:
HTTP, or who may do it (`api.git_http`).
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from forkyard.errors import HostFailure, OperationTimeout
from forkyard.git.process import Git, end
from forkyard.git.repositories import RefChange, Repo, Repositories, Room

log = structlog.get_logger(__name__)

Service = Literal["git-upload-pack", "git-receive-pack"]

FETCHES_AT_ONCE = 24
PUSHES_AT_ONCE = 12
#: A transfer in which nothing moves for this long is given up. (Git itself says "still there" every 5 s.)
IDLE_S = 300.0
_CHUNK_BYTES = 2**18
_MAX_HEADER_BYTES = 2**14
#: What is still read of a push that git has refused, so that its client gets to hear why.
MAX_DRAIN_BYTES = 2**30
#: A push is a little more than its pack; of one that is too large by itself git shall be the one to say so.
_SLACK_BYTES = 2**16


@dataclass(frozen=True)
class Ask:
    """One request of a git client."""

    service: Service
    #: `GET …/info/refs`, or the service itself.
    advertise: bool
    content_type: str = ""
    content_encoding: str = ""
    content_length: str = ""
    protocol: str = ""
    user: str = ""
    address: str = ""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    chunks: AsyncIterator[bytes]


class Gone(Exception):
    """The client went away before its request was whole."""


class Transfer:
    def __init__(self, repositories: Repositories) -> None:
        self._repositories = repositories
        self._git: Git = repositories.git
        self._turns = {
            "git-upload-pack": asyncio.Semaphore(FETCHES_AT_ONCE),
            "git-receive-pack": asyncio.Semaphore(PUSHES_AT_ONCE),
        }

    @contextlib.asynccontextmanager
    async def serve(
        self, repo: Repo, ask: Ask, body: AsyncIterator[bytes], by: str | None
    ) -> AsyncIterator[tuple[Answer, list[RefChange]]]:
        """The list is filled when a push is done, which is when the chunks have ended."""
        changes: list[RefChange] = []
        async with self._turns[ask.service]:
            if ask.service == "git-upload-pack" or ask.advertise:
                async with self._backend(repo, ask, body, {}) as answer:
                    yield answer, changes
                return
            async with self._repositories.writing(repo) as room:
                with tempfile.NamedTemporaryFile(prefix="push-", dir=repo.path) as received:
                    try:
                        extra = {"FORKYARD_RECEIVED": received.name}
                        async with self._backend(repo, ask, body, extra, room) as answer:
                            yield answer, changes
                    finally:
                        text = await asyncio.to_thread(Path(received.name).read_text, "utf-8", "replace")
                        changes += _changes(text)
                        if changes:
                            await asyncio.shield(self._repositories.changed(repo, changes, by))

    @contextlib.asynccontextmanager
    async def _backend(
        self, repo: Repo, ask: Ask, body: AsyncIterator[bytes], extra: Mapping[str, str], room: Room | None = None
    ) -> AsyncIterator[Answer]:
        limits = {} if room is None else {"receive.maxInputSize": str(max(1, room.left_bytes))}
        env = self._git.env({**_cgi(repo, ask), **extra}, limits)
        async with self._git.process(repo.path, "http-backend", stdin=asyncio.subprocess.PIPE, env=env) as process:
            feeding = asyncio.create_task(_feed(process, body, ask, room))
            errors = asyncio.create_task(_errors(process))
            try:
                status, headers = await _headers(process)
                yield Answer(status, headers, _chunks(process, feeding))
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
                if ask.service == "git-receive-pack":
                    # What arrived whole may be moving refs right now, and what did not ends by itself.
                    await asyncio.shield(_finished(process))
                errors.cancel()
                await asyncio.gather(errors, return_exceptions=True)


def _cgi(repo: Repo, ask: Ask) -> dict[str, str]:
    """PATH_INFO is ours, made of an id: nothing of the client's URL reaches git. There is no CONTENT_LENGTH: told one,
    the backend waits for that many bytes and spins for ever at the end of a cut request; without, it reads to the end.
    """
    what = "info/refs" if ask.advertise else ask.service
    given = {
        "GATEWAY_INTERFACE": "CGI/1.1",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "GIT_PROJECT_ROOT": str(repo.path.parent),
        "GIT_HTTP_EXPORT_ALL": "1",
        "PATH_INFO": f"/{repo.path.name}/{what}",
        "REQUEST_METHOD": "GET" if ask.advertise else "POST",
        "QUERY_STRING": f"service={ask.service}" if ask.advertise else "",
        "CONTENT_TYPE": ask.content_type,
        "HTTP_CONTENT_ENCODING": ask.content_encoding,
        "GIT_PROTOCOL": ask.protocol,
        "REMOTE_USER": ask.user,
        "REMOTE_ADDR": ask.address,
    }
    return {name: value for name, value in given.items() if value}


async def _feed(process: asyncio.subprocess.Process, body: AsyncIterator[bytes], ask: Ask, room: Room | None) -> None:
    """A client that goes away during a fetch ends it; during a push git sees the end of the input and drops it. So it does
    if several pushes together are too much: git itself knows only how large one may be."""
    stdin = process.stdin
    assert stdin is not None
    refused_bytes = 0
    try:
        async for chunk in body:
            if stdin.is_closing():
                refused_bytes += len(chunk)
                if refused_bytes > MAX_DRAIN_BYTES:
                    return
                continue
            fits = room is None or room.take(len(chunk), slack_bytes=_SLACK_BYTES)
            try:
                stdin.write(chunk)
                await stdin.drain()
                if not fits:
                    stdin.close()
            except (BrokenPipeError, ConnectionResetError):
                stdin.close()
    except Gone:
        if ask.service == "git-upload-pack":
            end(process)
    finally:
        stdin.close()


async def _errors(process: asyncio.subprocess.Process) -> None:
    """What git says goes to its client by itself; the rest is for the log."""
    assert process.stderr is not None
    kept = b""
    while chunk := await process.stderr.read(2**14):
        kept = (kept + chunk)[-2000:]
    if kept.strip():
        log.info("git said", text=kept.decode("utf-8", "replace").strip())


async def _headers(process: asyncio.subprocess.Process) -> tuple[int, list[tuple[str, str]]]:
    assert process.stdout is not None
    status, size = 200, 0
    headers: list[tuple[str, str]] = []
    while True:
        line = await _within(process.stdout.readline())
        size += len(line)
        if not line or size > _MAX_HEADER_BYTES:
            raise HostFailure("git http-backend gave no answer; the daemon's log says why")
        text = line.decode("latin-1").rstrip("\r\n")
        if not text:
            return status, headers
        name, _, value = text.partition(":")
        if name.lower() == "status":
            status = int(value.split()[0])
        else:
            headers.append((name.strip().lower(), value.strip()))


async def _chunks(process: asyncio.subprocess.Process, feeding: asyncio.Task[None]) -> AsyncIterator[bytes]:
    assert process.stdout is not None
    while chunk := await _within(process.stdout.read(_CHUNK_BYTES)):
        yield chunk
    # Git may be done before its client has said everything: let it, or it would not read the answer.
    await asyncio.wait([feeding], timeout=IDLE_S)


async def _within(reading: Awaitable[bytes]) -> bytes:
    try:
        async with asyncio.timeout(IDLE_S):
            return await reading
    except TimeoutError:
        raise OperationTimeout(f"nothing moved for {IDLE_S:.0f} s") from None


async def _finished(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(IDLE_S):
            assert process.stdout is not None
            while await process.stdout.read(_CHUNK_BYTES):
                pass
            await process.wait()


def _changes(text: str) -> list[RefChange]:
    found = []
    for line in text.splitlines():
        old, _, rest = line.partition(" ")
        new, _, ref = rest.partition(" ")
        if len(old) == len(new) == 40 and ref:
            found.append(RefChange(ref, old, new))
    return found
