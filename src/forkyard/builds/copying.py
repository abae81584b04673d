"""COPY and ADD: which files of an archive are meant, and the archive that puts them where they belong. Blocking.

Owns: names and patterns, destinations, owners and modes. Nothing of an archive is ever unpacked on this host: what comes
out is another archive, for a guest. Archives come from clients and from guests, and may be anything.
"""

from __future__ import annotations

import bisect
import fnmatch
import hashlib
import posixpath
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forkyard.errors import InvalidRequest
from forkyard.images.archives import BROKEN, Bounded, Member, members

MAX_MEMBERS = 500_000
#: Of an archive when it is unpacked, and of what is taken out of it at once.
MAX_BYTES = 32 * 2**30
#: Of names that are gone through while links are followed: a few can lead through each other again and again.
MAX_FOLLOWED_CHARS = 2**28
_MAX_LINKS = 8
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Pick:
    """A member, and the name it gets below a destination directory; `""` is that directory itself."""

    member: tarfile.TarInfo
    name: str


@dataclass(frozen=True)
class Owner:
    uid: int
    gid: int


class Archive:
    def __init__(self, path: Path, *, follow: bool = True) -> None:
        """`follow`: links that are named as sources; for that it must be all there is."""
        self._path, self._follow = path, follow
        self._members: dict[str, tarfile.TarInfo] = {}
        self._names: list[str] = []
        self._left_chars = MAX_FOLLOWED_CHARS

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
        self._names = sorted(self._members)

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def pick(self, sources: Sequence[str]) -> list[Pick]:
        """What these mean: of a directory itself and its contents, of a file itself. A pattern matches names, not `/`."""
        found: list[Pick] = []
        self._left_chars = MAX_FOLLOWED_CHARS
        for source in sources:
            matches = self._matching(_name(source))
            if not matches:
                raise self._missing(source)
            for name, member_name in matches:
                found += self._one(member_name, posixpath.basename(name))
                if len(found) > MAX_MEMBERS:
                    raise InvalidRequest(f"more than {MAX_MEMBERS} files are too many to copy at once")
        if sum(pick.member.size for pick in found) > MAX_BYTES:
            raise InvalidRequest(f"more than {MAX_BYTES} bytes are too many to copy at once")
        return found

    def _one(self, name: str, called: str) -> Iterator[Pick]:
        member = self._members.get(name) or _directory(name)
        if not member.isdir():
            yield Pick(member, called)
            return
        yield Pick(member, "")
        prefix = f"{name}/" if name else ""
        for other, member in self._members.items():
            if other.startswith(prefix) and other != name:
                yield Pick(member, other[len(prefix) :])

    def _matching(self, pattern: str) -> list[tuple[str, str]]:
        """Names, and those of what they lead to."""
        parts = pattern.split("/")
        plain = next((at for at, part in enumerate(parts) if any(char in part for char in "*?[")), len(parts))
        begin = self._followed("/".join(parts[:plain]))
        if begin is None or plain == len(parts):
            return [] if begin is None else [(pattern, begin)]
        above, globs = begin.split("/") if begin else [], parts[plain:]
        size = len(above) + len(globs)
        heads = (name.split("/")[:size] for name in self._members)
        names = {
            "/".join(head)
            for head in heads
            if len(head) == size
            and head[: len(above)] == above
            and all(fnmatch.fnmatchcase(*pair) for pair in zip(head[len(above) :], globs, strict=True))
        }
        # What a pattern finds and leads nowhere is copied as the link it is.
        return [(name, name if (led := self._followed(name)) is None else led) for name in sorted(names)]

    def _followed(self, name: str) -> str | None:
        """Where the links in a name lead to, if anything is there. They never lead out: the archive is all there is."""
        reached: list[str] = []
        left, links = name.split("/")[::-1], 0
        while left:
            part = left.pop()
            if part in ("", "."):
                continue
            if part == "..":
                del reached[-1:]
                continue
            reached.append(part)
            here = "/".join(reached)
            member = self._members.get(here)
            target = member.linkname if self._follow and member is not None and member.issym() else ""
            self._left_chars -= len(here) + len(target)
            if self._left_chars < 0:
                raise InvalidRequest("there are too many links in what is copied; name what they lead to")
            if target:
                links += 1
                if links > _MAX_LINKS:
                    return None
                reached = [] if target.startswith("/") else reached[:-1]
                left += target.split("/")[::-1]
        found = "/".join(reached)
        return found if self._is_there(found) else None

    def _is_there(self, name: str) -> bool:
        if name == "" or name in self._members:
            return True
        below = f"{name}/"
        at = bisect.bisect_left(self._names, below)
        return at < len(self._names) and self._names[at].startswith(below)

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

    def is_directory(self, sources: Sequence[str], *, extract: bool) -> bool:
        """Whether the destination must be one."""
        first, *others = self.pick(sources)
        if others or first.member.isdir():
            return True
        inner = self._inner(first.member) if extract and first.member.isreg() else None
        if inner is not None:
            inner.close()
        return inner is not None

    def repack(
        self,
        sources: Sequence[str],
        to: str,
        out: Bounded,
        *,
        owner: Owner | None,
        mode: int | None,
        extract: bool,
        missing: Sequence[str] = (),
    ) -> None:
        """An archive for `/`. `to` with a `/` at its end is a directory. Without an `owner` it is as in the archive.
        `missing`: directories that lead there, and are made."""
        base = posixpath.normpath(to).lstrip("/")
        picks = self.pick(sources)
        renamed: dict[str, str] = {}
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as made:  # type: ignore[call-overload]
            for path in missing:
                name = posixpath.normpath(path).lstrip("/")
                if name == base and picks[0].member.isdir():
                    made.addfile(_placed(picks[0].member, name, owner, mode))
                else:
                    made.addfile(_placed(_directory(name), name, owner, None))
            for pick in picks:
                member, name = pick.member, pick.name
                if not name:
                    continue  # the destination is made, or there already
                if extract and member.isreg() and self._unpacked(member, base, made, owner):
                    continue
                target = posixpath.normpath(posixpath.join(base, name)) if to.endswith("/") else base
                copy = _placed(member, target, owner, mode)
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
        inner = self._inner(member)
        if inner is None:
            return False
        with inner:
            try:
                for one in members(inner, most=MAX_MEMBERS, most_bytes=MAX_BYTES):
                    copy = _placed(one, posixpath.normpath(posixpath.join(base, _name(one.name))), owner, None)
                    if one.islnk():
                        copy.linkname = posixpath.normpath(posixpath.join(base, _name(one.linkname)))
                    made.addfile(copy, inner.extractfile(one) if one.isreg() else None)
            except BROKEN as error:
                raise InvalidRequest(f"{member.name} is an archive that cannot be unpacked: {error}") from None
        return True

    def _inner(self, member: tarfile.TarInfo) -> tarfile.TarFile | None:
        """The archive that this file is."""
        content = self._tar.extractfile(member)
        assert content is not None
        try:
            return tarfile.open(fileobj=content, mode="r:*", tarinfo=Member)
        except BROKEN:
            return None

    def _missing(self, source: str) -> InvalidRequest:
        member = self._members.get(_name(source))
        if member is not None and member.issym():
            return InvalidRequest(f"{source!r} is a link to {member.linkname!r}, and that is not in the context")
        return InvalidRequest(f"there is nothing called {source!r} to copy; names are relative to the context")

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


def _directory(name: str) -> tarfile.TarInfo:
    """One that no archive says anything of."""
    made = tarfile.TarInfo(name)
    made.type, made.mode, made.mtime, made.offset = tarfile.DIRTYPE, 0o755, int(time.time()), -1
    return made


def _placed(member: tarfile.TarInfo, name: str, owner: Owner | None, mode: int | None) -> tarfile.TarInfo:
    copy = member.replace(name=name, deep=False)
    if owner is not None:
        copy.uid, copy.gid = owner.uid, owner.gid
    copy.uname = copy.gname = ""
    if mode is not None and not member.issym():
        copy.mode = mode
    return copy


def _name(name: str) -> str:
    """Relative, without `.`; what would lead out is refused."""
    cleaned = posixpath.normpath(name.lstrip("/"))
    if cleaned == ".." or cleaned.startswith("../"):
        raise InvalidRequest(f"{name!r} leads out of its archive")
    return "" if cleaned == "." else cleaned
