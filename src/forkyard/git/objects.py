"""Git's objects as bytes: blobs, trees, commits, tags, and packs of them. Pure, but for the file a pack is written to.

New objects of one change are written as one pack and handed to `git index-pack`, which checks them and makes them
durable with two syncs, however many they are.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Literal

Kind = Literal["commit", "tree", "blob", "tag"]
_NUMBER: dict[Kind, int] = {"commit": 1, "tree": 2, "blob": 3, "tag": 4}

DIRECTORY = 0o040000
FILE = 0o100644
EXECUTABLE = 0o100755
SYMLINK = 0o120000
SUBMODULE = 0o160000
_CHUNK_BYTES = 1 << 20
EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


@dataclass(frozen=True)
class Entry:
    """One line of a tree."""

    mode: int
    sha: str


@dataclass(frozen=True)
class Signature:
    name: str
    email: str
    date: datetime

    def encode(self) -> bytes:
        offset = self.date.utcoffset()
        minutes = 0 if offset is None else int(offset.total_seconds() // 60)
        zone = f"{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}{abs(minutes) % 60:02d}"
        return f"{_plain(self.name)} <{_plain(self.email)}> {int(self.date.timestamp())} {zone}".encode()


def signature(name: str, email: str, date: datetime | None = None) -> Signature:
    return Signature(name, email, date or datetime.now(UTC))


def object_id(kind: Kind, data: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()


def tree_data(entries: dict[str, Entry]) -> bytes:
    """Sorted as git does: a directory as if its name ended with a slash."""

    def key(item: tuple[str, Entry]) -> bytes:
        name = item[0].encode("utf-8", "surrogateescape")
        return name + b"/" if item[1].mode == DIRECTORY else name

    return b"".join(
        f"{entry.mode:o} ".encode() + name.encode("utf-8", "surrogateescape") + b"\0" + bytes.fromhex(entry.sha)
        for name, entry in sorted(entries.items(), key=key)
    )


def tree_entries(data: bytes) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    at = 0
    while at < len(data):
        space = data.index(b" ", at)
        nul = data.index(b"\0", space)
        name = data[space + 1 : nul].decode("utf-8", "surrogateescape")
        entries[name] = Entry(int(data[at:space], 8), data[nul + 1 : nul + 21].hex())
        at = nul + 21
    return entries


def commit_data(tree: str, parents: Iterable[str], author: Signature, committer: Signature, message: str) -> bytes:
    lines = [b"tree " + tree.encode()]
    lines += [b"parent " + parent.encode() for parent in parents]
    lines += [b"author " + author.encode(), b"committer " + committer.encode(), b"", _text(message)]
    return b"\n".join(lines)


def tag_data(target: str, kind: Kind, name: str, tagger: Signature, message: str) -> bytes:
    lines = [f"object {target}".encode(), f"type {kind}".encode(), b"tag " + name.encode()]
    return b"\n".join([*lines, b"tagger " + tagger.encode(), b"", _text(message)])


class PackWriter:
    """Objects in, a pack out. Each object once."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._seen: set[str] = set()
        self.size_bytes = 0
        file.write(_header(0))

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, kind: Kind, data: bytes) -> str:
        sha = object_id(kind, data)
        if sha not in self._seen:
            self._seen.add(sha)
            piece = _object_header(_NUMBER[kind], len(data)) + zlib.compress(data, 1)
            self.size_bytes += len(piece)
            self._file.write(piece)
        return sha

    def add_blob(self, content: IO[bytes], size: int) -> str:
        """Of so many bytes, of which only a piece at a time is in memory."""
        begin = self._file.tell()
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        packer = zlib.compressobj(1)
        self._file.write(_object_header(_NUMBER["blob"], size))
        left = size
        while left and (chunk := content.read(min(left, _CHUNK_BYTES))):
            left -= len(chunk)
            digest.update(chunk)
            self._file.write(packer.compress(chunk))
        if left:
            raise EOFError(f"it ends {left} bytes too early")
        self._file.write(packer.flush())
        sha = digest.hexdigest()
        if sha in self._seen:
            self._file.seek(begin)
            self._file.truncate()
        self._seen.add(sha)
        self.size_bytes += self._file.tell() - begin
        return sha

    def finish(self) -> None:
        """How many there are is known only now; the checksum is over all of it."""
        self._file.seek(0)
        self._file.write(_header(len(self._seen)))
        self._file.seek(0)
        digest = hashlib.sha1(usedforsecurity=False)
        while chunk := self._file.read(2**20):
            digest.update(chunk)
        self._file.write(digest.digest())
        self._file.seek(0)


def _header(count: int) -> bytes:
    return b"PACK" + struct.pack(">II", 2, count)


def _object_header(number: int, size: int) -> bytes:
    head = bytearray()
    byte, size = (number << 4) | (size & 15), size >> 4
    while size:
        head.append(byte | 0x80)
        byte, size = size & 0x7F, size >> 7
    head.append(byte)
    return bytes(head)


def _plain(text: str) -> str:
    """Names and addresses end at these; git drops them too."""
    return "".join(char for char in text if char not in "<>\n\r\0").strip() or "unknown"


def _text(message: str) -> bytes:
    text = message.replace("\0", "")
    return (text if text.endswith("\n") or not text else text + "\n").encode("utf-8", "replace")
