"""Files of a sandbox: any size, binary safe. Relative paths start at root's home."""

from __future__ import annotations

import os
import posixpath
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from forkyard.errors import FileConflict, FileMissing, from_problem
from forkyard.models import FileInfo, Page, WatchEvent
from forkyard.sdk import archive, wire
from forkyard.sdk._async import runtime
from forkyard.sdk._async.transport import AsyncTransport

Progress = Callable[[int], None]
"""Called with the number of bytes just moved."""


class AsyncFiles:
    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._path = f"/sandboxes/{sandbox_id}/files"

    # ── one file ────────────────────────────────────────────────────────────────────────────────────────────────

    async def read(self, path: str, *, encoding: str = "utf-8", errors: str = "strict") -> str:
        """A text file. What is no text in this encoding raises `UnicodeDecodeError`; `read_bytes` reads anything."""
        return (await self.read_bytes(path)).decode(encoding, errors)

    async def read_bytes(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """A file, or a part of it, as it is."""
        params = {"path": path, "offset": offset or None, "length": length}
        answer = await self._transport.request("GET", self._path, params=params)
        return answer.content

    async def read_stream(self, path: str, *, offset: int = 0, length: int | None = None) -> runtime.Flow[bytes]:
        """A file's content piece by piece, for files that should not be in memory as a whole."""
        params = {"path": path, "offset": offset or None, "length": length}
        async with self._transport.stream("GET", self._path, params=params) as chunks:
            async for chunk in chunks:
                yield chunk

    async def write(
        self, path: str, data: str | bytes, *, mode: int | None = None, user: str | None = None, parents: bool = True
    ) -> FileInfo:
        """Write a whole file. After an error it has its old content. Missing directories are made."""
        content = data.encode() if isinstance(data, str) else data
        return await self._put(path, content, mode=mode, user=user, parents=parents, again=True)

    async def append(
        self, path: str, data: str | bytes, *, mode: int | None = None, user: str | None = None, parents: bool = True
    ) -> FileInfo:
        """Add to the end of a file, which is made if it is missing."""
        content = data.encode() if isinstance(data, str) else data
        return await self._put(path, content, mode=mode, user=user, parents=parents, append=True)

    async def write_stream(
        self,
        path: str,
        chunks: AsyncIterable[bytes] | Iterable[bytes],
        *,
        mode: int | None = None,
        user: str | None = None,
        parents: bool = True,
        append: bool = False,
    ) -> FileInfo:
        """Like `write`, from pieces. If `chunks` raises, the file is left as it was."""
        content = runtime.body(chunks)
        return await self._put(path, content, mode=mode, user=user, parents=parents, append=append)

    async def _put(
        self,
        path: str,
        content: bytes | AsyncIterator[bytes],
        *,
        mode: int | None,
        user: str | None,
        parents: bool,
        append: bool = False,
        again: bool = False,
    ) -> FileInfo:
        params = {
            "path": path,
            "mode": None if mode is None else f"{mode:o}",
            "user": user,
            "append": append,
            "parents": parents,
        }
        answer = await self._transport.request("PUT", self._path, params=params, content=content, again=again)
        return wire.parse(FileInfo, answer.content)

    # ── the tree ────────────────────────────────────────────────────────────────────────────────────────────────

    async def list(self, path: str, *, depth: int = 1) -> list[FileInfo]:
        """What is in a directory; with `depth`, also in those below it."""
        answer = await self._transport.request("GET", f"{self._path}/list", params={"path": path, "depth": depth})
        return wire.parse(Page[FileInfo], answer.content).items

    async def stat(self, path: str, *, follow_symlinks: bool = False) -> FileInfo:
        """What is at a path; of a symlink, the link itself unless it shall be followed."""
        for _ in range(_MAX_LINKS):
            answer = await self._transport.request("GET", f"{self._path}/stat", params={"path": path})
            info = wire.parse(FileInfo, answer.content)
            if not (follow_symlinks and info.type == "symlink" and info.target):
                return info
            path = posixpath.join(posixpath.dirname(info.path), info.target)
        raise FileConflict(f"{path} is a chain of more than {_MAX_LINKS} symlinks.", path=path)

    async def exists(self, path: str) -> bool:
        answer = await self._transport.request("GET", f"{self._path}/exists", params={"path": path})
        return bool(answer.json()["exists"])

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = True, user: str | None = None) -> None:
        """Make a directory; with `parents`, those above it too, and one that exists is fine."""
        body = {"path": path, "mode": mode, "parents": parents, "user": user}
        await self._transport.request("POST", f"{self._path}/mkdir", body=body, again=parents)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; with `recursive`, a directory and all in it."""
        params = {"path": path, "recursive": recursive}
        await self._transport.request("DELETE", self._path, params=params, again=False)

    async def move(self, source: str, destination: str, *, overwrite: bool = True) -> None:
        body = {"source": source, "destination": destination, "overwrite": overwrite}
        await self._transport.request("POST", f"{self._path}/move", body=body)

    async def chmod(self, path: str, mode: int) -> None:
        await self._transport.request("POST", f"{self._path}/chmod", body={"path": path, "mode": mode}, again=True)

    def watch(self, path: str, *, recursive: bool = False) -> AsyncWatch:
        """Changes as they happen. Inside a `with` block the watch is armed from the block's first line on."""
        return AsyncWatch(self._transport, f"{self._path}/watch", {"path": path, "recursive": recursive})

    # ── to and from this machine ────────────────────────────────────────────────────────────────────────────────

    async def upload(
        self, local: str | os.PathLike[str], path: str, *, user: str | None = None, progress: Progress | None = None
    ) -> None:
        """Copy a local file to the file `path`, or what is in a local directory into the directory `path`."""
        source = Path(local)
        if await runtime.blocking(source.is_dir):
            content = runtime.body(counted(archive.pack(source), progress))
            params = {"path": path, "user": user}
            await self._transport.request("PUT", f"{self._path}/tar", params=params, content=content)
            return
        try:
            mode = (await runtime.blocking(source.stat)).st_mode & 0o777
        except OSError as exc:
            raise FileMissing(f"{source} cannot be read on this machine: {exc.strerror}.", path=str(source)) from exc
        await self.write_stream(path, counted(archive.read_chunks(source), progress), mode=mode, user=user)

    async def download(self, path: str, local: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
        """Copy the file `path` to the local file, or what is in the directory `path` into the local directory."""
        info, target = await self.stat(path, follow_symlinks=True), Path(local)
        try:
            if info.type == "directory":
                await self._download_directory(info.path, target, progress)
            else:
                await self._download_file(info.path, target, info.mode & 0o777, progress)
        except OSError as exc:
            raise FileConflict(
                f"{target} cannot be written on this machine: {exc.strerror}.", path=str(target)
            ) from exc

    async def _download_file(self, path: str, target: Path, mode: int, progress: Progress | None) -> None:
        with archive.incoming(target, mode) as part:
            async with aclosing(self.read_stream(path)) as chunks:
                await spool(chunks, part, progress)

    async def _download_directory(self, path: str, target: Path, progress: Progress | None) -> None:
        with archive.spool_beside(target) as part:
            async with self._transport.stream("GET", f"{self._path}/tar", params={"path": path}) as chunks:
                await spool(chunks, part, progress)
            await runtime.blocking(archive.unpack, part, target)


class AsyncWatch:
    """Iterate it for changes. It ends when what is watched is gone."""

    def __init__(self, transport: AsyncTransport, path: str, params: dict[str, Any]) -> None:
        self._lines = transport.lines("GET", path, params=params)

    async def __aenter__(self) -> Self:
        async for line in self._lines:
            if line is not None and self._take(line) is None:
                break
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._lines.aclose()

    async def __aiter__(self) -> AsyncIterator[WatchEvent]:
        async for line in self._lines:
            event = self._take(line) if line is not None else None
            if event is not None:
                yield event

    def _take(self, line: dict[str, Any]) -> WatchEvent | None:
        match line.get("type"):
            case "ready":
                return None
            case "error":
                raise from_problem(line.get("problem") or {})
        return WatchEvent.model_validate(line)


_MAX_LINKS = 40


async def spool(chunks: AsyncIterator[bytes], out: IO[bytes], progress: Progress | None) -> None:
    async for chunk in chunks:
        await runtime.blocking(out.write, chunk)
        if progress is not None:
            progress(len(chunk))
    await runtime.blocking(out.flush)


def counted(chunks: Iterable[bytes], progress: Progress | None) -> Iterable[bytes]:
    for chunk in chunks:
        yield chunk
        if progress is not None:
            progress(len(chunk))
