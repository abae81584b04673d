"""COPY and ADD: which files of an archive are meant, and the archive that puts them where they belong. Blocking.

Owns: names and patterns, destinations, owners and modes. Nothing of an archive is ever unpacked on this host: what comes
out is another archive, for a guest. Archives come from clients and from guests, and may be anything.
"""

from __future__ import annotations

import fnmatch
import hashlib
import posixpath
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forkyard.errors import InvalidRequest
from forkyard.images.archives import BROKEN, Bounded, Member, members

MAX_MEMBERS = 500_000
#: Of an archive when it is unpacked, and of what is taken out of it at once.
MAX_BYTES = 32 * 2**30
_MAX_LINKS = 8
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Pick:
    """A member, and the name it gets: below a destination directory, or `""` for the destination itself."""

    member: tarfile.TarInfo
    name: str


@dataclass(frozen=True)
class Owner:
    uid: int
    gid: int


class Archive:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._members: dict[str, tarfile.TarInfo] = {}

    def __enter__(self) -> Archive:
        try:
            self._tar = tarfile.open(self._path, "r:*", tarinfo=Member)
        except BROKEN as error:
            raise _not_whole(error) from None
        try:
            self._read()
        except BaseException as error:
            self._tar.close()
            if isinstance(error, BROKEN):
                raise _not_whole(error) from None
            raise
        return self

    def _read(self) -> None:
        for member in members(self._tar, most=MAX_MEMBERS, most_bytes=MAX_BYTES):
            self._members[_name(member.name)] = member

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def pick(self, sources: Sequence[str]) -> list[Pick]:
        """What these mean: of a directory its contents, of a file itself. A pattern matches names, not `/`."""
        found: list[Pick] = []
        for source in sources:
            matches = self._matching(_name(source))
            if not matches:
                raise InvalidRequest(f"there is nothing called {source!r} to copy; names are relative to the context")
            several = len(matches) > 1 or len(sources) > 1
            for name in matches:
                found += self._one(name, several=several)
                if len(found) > MAX_MEMBERS:
                    raise InvalidRequest(f"more than {MAX_MEMBERS} files are too many to copy at once")
        if sum(pick.member.size for pick in found) > MAX_BYTES:
            raise InvalidRequest(f"more than {MAX_BYTES} bytes are too many to copy at once")
        return found

    def _one(self, name: str, *, several: bool) -> Iterator[Pick]:
        member = self._members.get(name)
        if member is not None and not member.isdir():
            yield Pick(member, posixpath.basename(name) if several else "")
            return
        prefix = f"{name}/" if name else ""
        for other, member in self._members.items():
            if other.startswith(prefix) and other != name:
                yield Pick(member, other[len(prefix) :])

    def _matching(self, pattern: str) -> list[str]:
        if not any(char in pattern for char in "*?["):
            there = pattern == "" or pattern in self._members
            below = any(name.startswith(f"{pattern}/") for name in self._members)
            return [pattern] if there or below else []
        parts = pattern.split("/")
        heads = {"/".join(name.split("/")[: len(parts)]) for name in self._members}
        return sorted(
            name
            for name in heads
            if len(name.split("/")) == len(parts)
            and all(fnmatch.fnmatchcase(*pair) for pair in zip(name.split("/"), parts, strict=True))
        )

    def digest(self, sources: Sequence[str]) -> str:
        """Of all that counts of what these mean. Times do not."""
        picks = self.pick(sources)
        # As they lie in the archive: in a packed one every way back is the whole way again.
        contents = {pick.member.offset: pick.member for pick in picks}
        digests = {offset: self._digest(contents[offset]) for offset in sorted(contents)}
        hashed = hashlib.sha256()
        for pick in sorted(picks, key=lambda pick: pick.name):
            member = pick.member
            hashed.update(
                f"{pick.name}\0{member.type!r}\0{member.mode:o}\0{member.linkname}\0".encode(errors="replace")
            )
            hashed.update(digests[member.offset])
        return hashed.hexdigest()

    def is_directory(self, sources: Sequence[str]) -> bool:
        """Whether the destination must be one."""
        return any(pick.name for pick in self.pick(sources))

    def repack(
        self, sources: Sequence[str], to: str, out: Bounded, *, owner: Owner | None, mode: int | None, extract: bool
    ) -> None:
        """An archive for `/`. `to` with a `/` at its end is a directory. Without an `owner` it is as in the archive."""
        base = posixpath.normpath(to).lstrip("/")
        renamed: dict[str, str] = {}
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as made:  # type: ignore[call-overload]
            for pick in self.pick(sources):
                member, name = pick.member, pick.name
                if not name and to.endswith("/"):
                    name = posixpath.basename(_name(member.name))
                if extract and member.isreg() and self._unpacked(member, base, made, owner):
                    continue
                target = posixpath.normpath(posixpath.join(base, name))
                copy = member.replace(name=target, deep=False)
                if owner is not None:
                    copy.uid, copy.gid = owner.uid, owner.gid
                copy.uname = copy.gname = ""
                if mode is not None and not member.issym():
                    copy.mode = mode
                if member.islnk():
                    there = renamed.get(_name(member.linkname))
                    if there is None:  # its other name is not copied: it becomes a file of its own
                        member = self._linked(member)
                        copy.type, copy.linkname, copy.size = tarfile.REGTYPE, "", member.size
                    else:
                        copy.linkname = there
                renamed[_name(pick.member.name)] = target
                made.addfile(copy, self._tar.extractfile(member) if copy.isreg() else None)

    def _linked(self, member: tarfile.TarInfo) -> tarfile.TarInfo:
        """What a hard link is another name of."""
        found: tarfile.TarInfo | None = member
        for _ in range(_MAX_LINKS):
            if found is None or not found.islnk():
                break
            found = self._members.get(_name(found.linkname))
        if found is None or not found.isreg():
            raise InvalidRequest(f"{member.name!r} is a link to {member.linkname!r}, which is no file of its archive")
        return found

    def _unpacked(self, member: tarfile.TarInfo, base: str, made: tarfile.TarFile, owner: Owner | None) -> bool:
        """Whether it was an archive itself, and is unpacked now."""
        content = self._tar.extractfile(member)
        assert content is not None
        try:
            inner = tarfile.open(fileobj=content, mode="r:*", tarinfo=Member)  # noqa: SIM115
        except BROKEN:
            return False
        with inner:
            try:
                for one in members(inner, most=MAX_MEMBERS, most_bytes=MAX_BYTES):
                    name = posixpath.normpath(posixpath.join(base, _name(one.name)))
                    copy = one.replace(name=name, deep=False)
                    if one.islnk():
                        copy.linkname = posixpath.normpath(posixpath.join(base, _name(one.linkname)))
                    if owner is not None:
                        copy.uid, copy.gid = owner.uid, owner.gid
                    copy.uname = copy.gname = ""
                    made.addfile(copy, inner.extractfile(one) if one.isreg() else None)
            except BROKEN as error:
                raise InvalidRequest(f"{member.name} is an archive that cannot be unpacked: {error}") from None
        return True

    def _digest(self, member: tarfile.TarInfo) -> bytes:
        hashed = hashlib.sha256()
        file = self._tar.extractfile(member) if member.isreg() else None
        try:
            while file is not None and (chunk := file.read(_CHUNK_BYTES)):
                hashed.update(chunk)
        except BROKEN as error:
            raise _not_whole(error) from None
        return hashed.digest()


def _not_whole(error: BaseException) -> InvalidRequest:
    return InvalidRequest(f"this is no whole tar archive: {error}")


def _name(name: str) -> str:
    """Relative, without `.`; what would lead out is refused."""
    cleaned = posixpath.normpath(name.lstrip("/"))
    if cleaned == ".." or cleaned.startswith("../"):
        raise InvalidRequest(f"{name!r} leads out of its archive")
    return "" if cleaned == "." else cleaned
