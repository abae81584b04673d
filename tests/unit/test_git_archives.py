"""Archives of strangers that become repositories: what one takes is bounded, however small it is."""

from __future__ import annotations

import gzip
import io
import lzma
import random
import tarfile
import tempfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from forkyard.control.identities import Principal
from forkyard.errors import InvalidRequest
from forkyard.git import archives
from forkyard.git.archives import BROKEN, Archive, imported
from forkyard.git.objects import PackWriter

MIB = 1 << 20
Fill = Callable[[tarfile.TarFile], object]


class Zeros(io.RawIOBase):
    def read(self, size: int = -1) -> bytes:
        return bytes(size)


def file(archive: tarfile.TarFile, name: str, size: int = 0) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    archive.addfile(member, Zeros())  # type: ignore[arg-type]


def link(archive: tarfile.TarFile, name: str, target: str) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.LNKTYPE, target
    archive.addfile(member)


def tar(fill: Fill, mode: Literal["w", "w:gz"] = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=tarfile.GNU_FORMAT) as archive:
        fill(archive)
    return out.getvalue()


def taken(tmp: io.BufferedRandom, data: bytes, kind: Literal["tar", "zip"] = "tar") -> PackWriter:
    tmp.write(data)
    tmp.seek(0)
    pack = PackWriter(io.BytesIO())
    imported(Archive(tmp, kind, 0, "In", None), pack, Principal("key", "key", "key"), 1 << 34)
    return pack


@pytest.fixture
def tmp() -> Iterator[io.BufferedRandom]:

    with tempfile.TemporaryFile() as file:
        yield file  # type: ignore[misc]


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def zipped(size: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("zeros", "w") as content:
        for _ in range(size // MIB):
            content.write(bytes(MIB))
    return out.getvalue()


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_large_file_is_never_in_memory_as_a_whole(tmp: io.BufferedRandom, kind: Literal["tar", "zip"]) -> None:
    data = zipped(96 * MIB) if kind == "zip" else tar(lambda archive: file(archive, "zeros", 96 * MIB))
    assert len(data) < MIB
    assert peak_bytes(lambda: taken(tmp, data, kind)) < 32 * MIB


def test_links_to_a_file_do_not_read_it_again(tmp: io.BufferedRandom) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        file(archive, "zeros", 64 * MIB)
        for n in range(1000):
            link(archive, f"links/{n}", "zeros")

    data = tar(fill)
    started = time.monotonic()
    pack = taken(tmp, data)
    assert len(pack) == 1 + 2 + 1  # a file, two directories, a commit
    assert time.monotonic() - started < 20  # each link unpacked 64 MiB again


def long_name(archive: tarfile.TarFile) -> None:
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 512 * MIB
    archive.addfile(member, Zeros())  # type: ignore[arg-type]


def deep(archive: tarfile.TarFile) -> None:
    for n in range(1100):
        file(archive, f"{n}/" + "a/" * 2000 + "a")


def damaged() -> bytes:
    inside = tar(lambda archive: file(archive, "a", 9000), "w") + random.Random(1).randbytes(9000)
    data = bytearray(lzma.compress(inside))
    data[60:70] = bytes(10)
    return bytes(data)


HOSTILE = {
    "a name of 512 MiB": tar(long_name),
    "2,000,000 directories": tar(deep),
    "damage inside": damaged(),
    "a link to what comes later": tar(lambda archive: (link(archive, "b", "a"), file(archive, "a"))),
    "cut": gzip.compress(tar(lambda archive: file(archive, "a", 9000), "w")[:4000]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_small_archive_that_comes_to_much_or_is_broken_is_refused(name: str, tmp: io.BufferedRandom) -> None:
    assert len(HOSTILE[name]) < MIB

    def refused() -> None:
        with pytest.raises((InvalidRequest, *BROKEN)):
            taken(tmp, HOSTILE[name])

    assert peak_bytes(refused) < 900 * MIB


def test_the_list_of_a_zip_archive_is_bounded(tmp: io.BufferedRandom, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for n in range(100):
            archive.writestr(f"{n:0100}", b"")
    monkeypatch.setattr(archives, "MAX_LIST_BYTES", 10_000)
    with pytest.raises(zipfile.BadZipFile, match="its list of files has more than 10000 bytes"):
        taken(tmp, out.getvalue(), "zip")
