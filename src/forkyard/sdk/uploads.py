"""What of a spec is too large to travel inside it: contexts of Dockerfiles and archives of images. Blocking.

Owns: their archives and hashes. An archive of a directory is the same whenever its files are: times and owners are left
out, so that what was uploaded once is not uploaded again.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from forkyard.errors import InvalidRequest
from forkyard.sdk.archive import read_chunks
from forkyard.sdk.ignore import Ignore


@dataclass(frozen=True)
class Upload:
    digest: str
    path: Path


class _Spool:
    """A file that is gone with the last spec that needs it."""

    def __init__(self) -> None:
        fd, name = tempfile.mkstemp(prefix="forkyard-")
        os.close(fd)
        self.path = Path(name)
        self._end = weakref.finalize(self, self.path.unlink, missing_ok=True)


@dataclass(frozen=True)
class SpooledUpload(Upload):
    spool: _Spool


def image_source(image: str | os.PathLike[str]) -> tuple[dict[str, str], Upload | None]:
    """What names an image for the daemon: a local archive or OCI layout is to be uploaded first."""
    path = Path(image)
    try:
        there = path.exists()
    except OSError as error:
        raise InvalidRequest(f"{str(image)[:80]!r} is neither an image nor a file: {error.strerror}") from None
    if isinstance(image, str) and not there:
        if image.startswith((".", "/", "~")):
            raise InvalidRequest(f"there is no file {image}; an image of a registry is named registry/name:tag")
        return {"ref": image}, None
    if path.is_dir():
        if not (path / "oci-layout").is_file():
            if isinstance(image, str) and not image.startswith((".", "/", "~")):
                return {"ref": image}, None  # a directory that only happens to be called like it
            raise InvalidRequest(f"{path} is no OCI layout: it has no file oci-layout")
        upload: Upload = directory(path)
    else:
        upload = file(path)
    return {"upload": upload.digest}, upload


def file(path: Path) -> Upload:
    try:
        return Upload(_digest(path), path.absolute())
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None


def directory(root: Path, ignore: Ignore | None = None, *, always: tuple[str, ...] = ()) -> Upload:
    """What is in `root`, but for what is left out. `always`: paths that nothing leaves out."""
    spool = _Spool()
    try:
        with spool.path.open("wb") as out, tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path, name in _walk(root, "", ignore or Ignore(""), always):
                _pack(archive, path, name)
    except OSError as error:
        raise InvalidRequest(f"{error.filename or root} cannot be read: {error.strerror}") from None
    return SpooledUpload(_digest(spool.path), spool.path, spool)


def context(root: Path, dockerfile: Path | None = None) -> Upload:
    """The context of a Dockerfile, without what `.dockerignore` names."""
    if not root.is_dir():
        raise InvalidRequest(f"the context {root} is no directory")
    named = [] if dockerfile is None else [dockerfile.with_name(f"{dockerfile.name}.dockerignore")]
    found = next((path for path in (*named, root / ".dockerignore") if path.is_file()), None)
    try:
        ignored = "" if found is None else found.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{found} cannot be read: {error}") from None
    return directory(root, Ignore(ignored))


def _walk(directory: Path, prefix: str, ignore: Ignore, always: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        name = prefix + entry.name
        left_out = ignore.leaves_out(name) and name not in always
        is_directory = entry.is_dir(follow_symlinks=False)
        if not left_out:
            yield Path(entry.path), name
        if is_directory and (not left_out or ignore.takes_in):
            yield from _walk(Path(entry.path), f"{name}/", ignore, always)


def _pack(archive: tarfile.TarFile, path: Path, name: str) -> None:
    status = path.lstat()
    info = tarfile.TarInfo(name)
    info.mode = stat.S_IMODE(status.st_mode)
    content: IO[Any] | None = None
    if stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, str(path.readlink())
    elif stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISREG(status.st_mode):
        content = path.open("rb")
        info.size = os.fstat(content.fileno()).st_size
    else:
        return  # sockets and devices
    try:
        archive.addfile(info, content)
    finally:
        if content is not None:
            content.close()


def _digest(path: Path) -> str:
    hashed = hashlib.sha256()
    for chunk in read_chunks(path):
        hashed.update(chunk)
    return f"sha256:{hashed.hexdigest()}"
