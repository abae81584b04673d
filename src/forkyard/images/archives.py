"""Tar archives of strangers, read. Blocking.

Owns: that reading one takes a bounded amount of memory and time, whatever its headers say; and files that are written
from one without filling the disk. Never says what an archive is for.
"""

from __future__ import annotations

import lzma
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from forkyard.errors import InvalidRequest, NoCapacity

#: What reading an archive that is not whole, or none, raises.
BROKEN = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, RecursionError, ValueError)
#: Of one header: long names, extended attributes.
MAX_HEADER_BYTES = 2**20
#: Of names and extended headers of all members, which are held in memory.
MAX_HEADERS_BYTES = 256 * 2**20
#: Left free on the disk, whatever is unpacked on it.
RESERVE_BYTES = 2**30
_LOOK_BYTES = 64 * 2**20
_EXTENDED = frozenset(
    [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]
)


class Member(tarfile.TarInfo):
    """One whose headers are read into memory only up to a size. For `tarinfo=` of `tarfile.open`."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Member:
        found = super().frombuf(buf, encoding, errors)
        if found.type in _EXTENDED and found.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header has {found.size} bytes, and {MAX_HEADER_BYTES} are the most")
        if found.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("it holds a sparse file; make it without --sparse")
        return found

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise tarfile.ReadError("it holds a sparse file; make it without --sparse")


def members(
    archive: tarfile.TarFile, *, most: int, most_bytes: int, refusal: type[InvalidRequest] = InvalidRequest
) -> Iterator[tarfile.TarInfo]:
    """All of an archive, which was opened with `Member`. `refusal` is raised before anything beyond is read."""
    header_bytes = 0
    for count, member in enumerate(archive, 1):
        header_bytes += len(member.name) + len(member.linkname)
        header_bytes += sum(len(name) + len(value) for name, value in member.pax_headers.items())
        if count > most:
            raise refusal(f"an archive has at most {most} files")
        if header_bytes > MAX_HEADERS_BYTES:
            raise refusal(f"the headers of an archive have at most {MAX_HEADERS_BYTES} bytes")
        # What is skipped is unpacked too, if the archive is a packed one.
        if member.offset_data + member.size > most_bytes:
            raise refusal(
                f"an archive has at most {most_bytes} bytes when it is unpacked; {member.name[:200]!r} has more"
            )
        yield member


class Bounded:
    """A file to write that becomes no larger than it may, and leaves room on the disk it lies on."""

    def __init__(self, file: IO[bytes], directory: Path, most_bytes: int) -> None:
        self._file, self._directory, self._most_bytes = file, directory, most_bytes
        self._written = 0
        self._looked_at = -_LOOK_BYTES

    def write(self, data: bytes) -> int:
        self._written += len(data)
        if self._written > self._most_bytes:
            raise InvalidRequest(f"what is copied has more than {self._most_bytes} bytes when it is unpacked")
        if self._written - self._looked_at >= _LOOK_BYTES:
            self._looked_at = self._written
            if shutil.disk_usage(self._directory).free < RESERVE_BYTES:
                raise NoCapacity("there is no room on the disk for what is copied; delete snapshots, or try later")
        return self._file.write(data)

    def tell(self) -> int:
        return self._written
