"""HTTP exchanges on disk: stored under a name, found again by what was asked.

Owns: `recordings/<name>/` in the state directory: an index, one line for each exchange, appended and synced when its
answer is whole; and bodies, each in a file named by its hash. Values of secrets do not come here: they are taken out of
answers before, and of requests only what the guest sent is kept, as a hash. Never does: HTTP.

A recording is replayed by each sandbox from its beginning: of requests that are the same, the first gets the first
answer, the second the second, and when they are used up the last.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from forkyard.errors import HostFailure, NotFound
from forkyard.models.network import RecordedExchange, RecordingInfo
from forkyard.net.places import Places

MAX_BODY_BYTES = 2**30
_CHUNK_BYTES = 256 * 1024
_INDEX = "index.jsonl"
_BODIES = "bodies"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: It is read into memory as a whole.
_MAX_INDEX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Room:
    """How many bytes recordings may have on disk."""

    each: int
    all: int


NO_LIMIT = Room(2**62, 2**62)


@dataclass(frozen=True)
class Asked:
    """What makes two requests the same."""

    method: str
    url: str
    body_sha256: str
    range: str | None = None


@dataclass(frozen=True)
class Answered:
    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    body_sha256: str
    body_bytes: int


@dataclass(frozen=True)
class _Loaded:
    size_bytes: int  # of the index when it was read
    answers: dict[Asked, list[Answered]]
    hosts: frozenset[str]


class Recordings:
    def __init__(self, directory: Path, room: Room = NO_LIMIT) -> None:
        self._directory = directory
        self._writing: dict[str, asyncio.Lock] = {}
        self._loaded: dict[str, _Loaded] = {}
        self._places = Places(directory)
        self._room = room
        #: Bytes of each on disk, those that are coming in included. None: not looked at yet.
        self._sizes: Counter[str] | None = None

    def exists(self, name: str) -> bool:
        return bool(_NAME.fullmatch(name)) and (self._directory / name / _INDEX).exists()

    # ── store ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def full(self, name: str) -> str | None:
        """Why nothing more can be recorded under this name, if so."""
        if self._sizes is None:
            sizes = await asyncio.to_thread(_sizes, self._directory)
            self._sizes = sizes if self._sizes is None else self._sizes
        path = self._directory / name / _INDEX
        long = path.exists() and path.stat().st_size >= _MAX_INDEX_BYTES
        if self._sizes[name] >= self._room.each or long:
            return (
                f"the recording {name!r} is full; record under another name, remove it (`forkyard recordings rm {name}`) "
                "or, if it is the bytes, raise FORKYARD_RECORDING_MIB"
            )
        if self._sizes.total() >= self._room.all:
            return (
                "all recordings together have no more room; remove some (`forkyard recordings rm`) or raise "
                "FORKYARD_RECORDINGS_MIB"
            )
        return None

    def take(self, name: str, size: int) -> bool:
        """Room for so many bytes. False: there is none."""
        sizes = self._sizes if self._sizes is not None else Counter()
        if sizes[name] + size > self._room.each or sizes.total() + size > self._room.all:
            return False
        self.changed(name, size)
        return True

    def changed(self, name: str, size: int) -> None:
        if self._sizes is not None:
            self._sizes[name] += size

    def begin(self, name: str) -> Taking:
        return Taking(self, name)

    async def keep(self, name: str, asked: Asked, answered: Answered, body: Path) -> None:
        line = json.dumps({"at": datetime.now(UTC).isoformat(), "asked": asdict(asked), "answered": asdict(answered)})
        async with self._writing.setdefault(name, asyncio.Lock()):
            known = await asyncio.to_thread(_append, self._directory / name, line, body, answered.body_sha256)
        self.changed(name, len(line) + 1 - (answered.body_bytes if known else 0))

    def temporary(self, name: str) -> tuple[BinaryIO, Path]:
        """A file for a body that is coming in. Blocking, but quick."""
        directory = self._directory / name / _BODIES
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f".new-{os.urandom(8).hex()}"
        return path.open("xb"), path

    # ── replay ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def find(self, name: str, sandbox_id: str, asked: Asked) -> Answered | None:
        """What answers this request of this sandbox now."""
        answers = (await self._load(name)).answers.get(asked)
        if not answers:
            return None
        if len(answers) == 1:
            return answers[0]
        question = hashlib.sha256(json.dumps(asdict(asked)).encode()).hexdigest()[:16]
        try:
            return answers[await self._places.next(name, sandbox_id, question, len(answers))]
        except OSError as error:
            raise HostFailure(f"how far {sandbox_id} is in recording {name!r} cannot be kept: {error}") from error

    async def has_host(self, name: str, host: str) -> bool:
        return host in (await self._load(name)).hosts

    async def body(self, name: str, answered: Answered) -> AsyncGenerator[bytes, None]:
        path = self._directory / name / _BODIES / answered.body_sha256
        try:
            file = await asyncio.to_thread(path.open, "rb")
            try:
                while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                    yield chunk
            finally:
                file.close()
        except OSError as error:
            raise HostFailure(f"recording {name!r} is damaged: {error}; record it again") from error

    async def _load(self, name: str) -> _Loaded:
        path = self._directory / name / _INDEX
        try:
            size = path.stat().st_size
            known = self._loaded.get(name)
            if known is None or known.size_bytes != size:
                answers = await asyncio.to_thread(_read_index, path)
                hosts = frozenset(urlsplit(asked.url).hostname or "" for asked in answers)
                known = self._loaded[name] = _Loaded(size, answers, hosts)
            return known
        except FileNotFoundError:
            return _Loaded(0, {}, frozenset())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HostFailure(f"recording {name!r} is damaged: {error}; record it again") from error

    # ── look, delete ─────────────────────────────────────────────────────────────────────────────────────────────

    async def exchanges(self, name: str) -> list[RecordedExchange]:
        self._require(name)
        return await asyncio.to_thread(_exchanges, self._directory / name / _INDEX)

    async def list(self) -> list[RecordingInfo]:
        return await asyncio.to_thread(_list, self._directory)

    async def delete(self, name: str) -> None:
        self._require(name)
        self._loaded.pop(name, None)
        self._places.forget(name)
        async with self._writing.setdefault(name, asyncio.Lock()):
            await asyncio.to_thread(shutil.rmtree, self._directory / name, True)
            if self._sizes is not None:
                del self._sizes[name]

    def _require(self, name: str) -> None:
        if not self.exists(name):
            raise NotFound(f"there is no recording {name!r}; `forkyard recordings ls` lists those there are")


class Taking:
    """One answer on its way to disk. If it is not finished, nothing is kept."""

    def __init__(self, recordings: Recordings, name: str) -> None:
        self._recordings = recordings
        self._name = name
        self._file, self._path = recordings.temporary(name)
        self._hash = hashlib.sha256()
        self._size = 0
        self._fits = True
        self._kept = False

    async def write(self, data: bytes) -> None:
        fits = self._size + len(data) <= MAX_BODY_BYTES
        self._fits = self._fits and fits and self._recordings.take(self._name, len(data))
        if self._fits:
            self._size += len(data)
            self._hash.update(data)
            await asyncio.to_thread(self._file.write, data)

    async def finish(self, asked: Asked, status: int, reason: str, headers: tuple[tuple[str, str], ...]) -> bool:
        """False if it was too large to keep, or there was no more room."""
        if not self._fits:
            return False
        await asyncio.to_thread(_close_synced, self._file)
        answered = Answered(status, reason, headers, self._hash.hexdigest(), self._size)
        await self._recordings.keep(self._name, asked, answered, self._path)
        self._kept = True
        return True

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)
        if not self._kept:
            self._recordings.changed(self._name, -self._size)


def _close_synced(file: BinaryIO) -> None:
    with file:
        file.flush()
        os.fsync(file.fileno())


def _append(directory: Path, line: str, body: Path, body_sha256: str) -> bool:
    """Whether the body was there already."""
    kept = directory / _BODIES / body_sha256
    known = kept.exists()
    body.replace(kept)
    with (directory / _INDEX).open("a") as index:
        index.write(line + "\n")
        index.flush()
        os.fsync(index.fileno())
    return known


def _sizes(directory: Path) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for path in directory.glob(f"*/{_INDEX}"):
        bodies = (file.stat().st_size for file in (path.parent / _BODIES).glob("[!.]*"))
        sizes[path.parent.name] = path.stat().st_size + sum(bodies)
    return sizes


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last may be half of one, if the power failed."""
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _read_index(path: Path) -> dict[Asked, list[Answered]]:
    found: dict[Asked, list[Answered]] = {}
    for line in _lines(path):
        answered = line["answered"]
        headers = tuple((str(name), str(value)) for name, value in answered.pop("headers"))
        found.setdefault(Asked(**line["asked"]), []).append(Answered(headers=headers, **answered))
    return found


def _list(directory: Path) -> list[RecordingInfo]:
    found = []
    for path in sorted(directory.glob(f"*/{_INDEX}")):
        lines = _lines(path)
        found.append(
            RecordingInfo(
                name=path.parent.name,
                exchanges=len(lines),
                size_bytes=sum(file.stat().st_size for file in (path.parent / _BODIES).glob("[!.]*")),
                updated_at=datetime.fromtimestamp(path.stat().st_mtime, UTC),
            )
        )
    return found


def _exchanges(path: Path) -> list[RecordedExchange]:
    return [
        RecordedExchange(
            at=line["at"],
            method=line["asked"]["method"],
            url=line["asked"]["url"],
            status=line["answered"]["status"],
            size_bytes=line["answered"]["body_bytes"],
        )
        for line in _lines(path)
    ]
