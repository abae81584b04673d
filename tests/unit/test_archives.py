"""Archives of strangers: however small they are, what they come to is bounded."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from forkyard.builds import copying
from forkyard.builds.copying import Archive, Owner
from forkyard.errors import InvalidRequest, NoCapacity
from forkyard.images import archives
from forkyard.images.archives import Bounded

Fill = Callable[[tarfile.TarFile], object]


class Zeros(io.RawIOBase):
    def read(self, size: int = -1) -> bytes:
        return bytes(size)


def file(archive: tarfile.TarFile, name: str, size: int, **fields: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, Zeros() if size else None)


def packed(fill: Fill) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        fill(archive)
    return out.getvalue()


def context(path: Path, fill: Fill) -> Path:
    path.write_bytes(packed(fill))
    return path


def repack(path: Path, sources: list[str], most_bytes: int = 2**30) -> bytes:
    out = io.BytesIO()
    with Archive(path) as archive:
        archive.repack(sources, "/to/", Bounded(out, path.parent, most_bytes), owner=None, mode=None, extract=True)
    return out.getvalue()


def test_an_archive_in_an_archive_is_unpacked_up_to_a_bound(tmp_path: Path) -> None:
    inner = packed(lambda archive: file(archive, "zeros", 64 * 2**20))

    def fill(archive: tarfile.TarFile) -> None:
        member = tarfile.TarInfo("inner.tar.gz")
        member.size = len(inner)
        archive.addfile(member, io.BytesIO(inner))

    path = context(tmp_path / "context", fill)
    assert path.stat().st_size < 2**20
    assert len(repack(path, ["inner.tar.gz"])) > 64 * 2**20
    out = io.BytesIO()
    with Archive(path) as archive, pytest.raises(InvalidRequest, match="more than 1048576 bytes"):
        bounded = Bounded(out, tmp_path, 2**20)
        archive.repack(["inner.tar.gz"], "/to/", bounded, owner=None, mode=None, extract=True)
    assert out.tell() <= 2**20


def test_room_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "RESERVE_BYTES", 2**60)
    path = context(tmp_path / "context", lambda archive: file(archive, "a", 5))
    with pytest.raises(NoCapacity, match="no room on the disk"):
        repack(path, ["a"])


@pytest.mark.parametrize(
    ("fill", "why"),
    [
        (lambda archive: [file(archive, f"{n}", 0) for n in range(200)], "at most 100 files"),
        (lambda archive: file(archive, "a", 2 * 2**20), "at most 1048576 bytes when it is unpacked"),
        (lambda archive: file(archive, "h", 2 * 2**20, type=tarfile.XHDTYPE), "a header has 2097152 bytes"),
        (lambda archive: file(archive, "h", 2 * 2**20, type=tarfile.GNUTYPE_LONGNAME), "a header has 2097152 bytes"),
        (lambda archive: file(archive, "s", 0, type=tarfile.GNUTYPE_SPARSE), "a sparse file"),
    ],
    ids=["files", "bytes", "headers", "names", "sparse"],
)
def test_what_is_read_of_an_archive_is_bounded(
    fill: Fill, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "MAX_MEMBERS", 100)
    monkeypatch.setattr(copying, "MAX_BYTES", 2**20)
    with pytest.raises(InvalidRequest, match=why), Archive(context(tmp_path / "context", fill)):
        pass


def test_headers_one_after_the_other_are_refused(tmp_path: Path) -> None:
    path = context(
        tmp_path / "context", lambda archive: [file(archive, f"{n}", 0, type=tarfile.XGLTYPE) for n in range(3000)]
    )
    with pytest.raises(InvalidRequest, match="no whole tar archive"), Archive(path):
        pass


def test_names_and_attributes_of_all_files_together_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_HEADERS_BYTES", 10_000)
    long = {"SCHILY.xattr.user.a": "x" * 6000}
    path = context(tmp_path / "context", lambda archive: [file(archive, n, 0, pax_headers=long) for n in "ab"])
    with pytest.raises(InvalidRequest, match="headers of an archive"), Archive(path):
        pass


def test_the_same_files_are_not_taken_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MAX_MEMBERS", 100)
    path = context(tmp_path / "context", lambda archive: [file(archive, f"d/{n}", 5) for n in range(60)])
    with Archive(path) as archive:
        assert len(archive.pick(["d"])) == 61, "and the directory itself"
        with pytest.raises(InvalidRequest, match="more than 100 files"):
            archive.pick(["d", "d"])
        monkeypatch.setattr(copying, "MAX_BYTES", 200)
        with pytest.raises(InvalidRequest, match="more than 200 bytes"):
            archive.pick(["d"])


@pytest.mark.parametrize("target", ["missing", "a"])
def test_a_link_to_nothing_is_named(target: str, tmp_path: Path) -> None:
    path = context(tmp_path / "context", lambda archive: file(archive, "a", 0, type=tarfile.LNKTYPE, linkname=target))
    with pytest.raises(InvalidRequest, match=f"'a' is a link to '{target}'"):
        repack(path, ["a"])


def link(archive: tarfile.TarFile, name: str, target: str) -> None:
    file(archive, name, 0, type=tarfile.SYMTYPE, linkname=target)


def linked(archive: tarfile.TarFile) -> None:
    file(archive, "d/f", 5)
    file(archive, "d/sub/g", 6)
    for name, target in {
        "file": "d/f",
        "dir": "./d",
        "d/up": "../dir/sub",
        "root": "/d/f",
        "beyond": "../../../d/f",
        "chain": "file",
        "none": "missing",
        "loop": "loop",
    }.items():
        link(archive, name, target)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("file", [("d/f", "file")]),
        ("chain", [("d/f", "chain")]),
        ("root", [("d/f", "root")]),
        ("beyond", [("d/f", "beyond")]),
        ("dir/f", [("d/f", "f")]),
        ("dir/up/g", [("d/sub/g", "g")]),
        ("d/up", [("d/sub", ""), ("d/sub/g", "g")]),
        ("dir/f*", [("d/f", "f")]),
        ("d", [("d", ""), ("d/f", "f"), ("d/sub/g", "sub/g"), ("d/up", "up")]),
        ("[fnl]*", [("d/f", "file"), ("loop", "loop"), ("none", "none")]),
    ],
)
def test_links_that_are_named_are_followed_inside_of_their_archive(
    source: str, found: list[tuple[str, str]], tmp_path: Path
) -> None:
    with Archive(context(tmp_path / "context", linked)) as archive:
        assert [(pick.member.name, pick.name) for pick in archive.pick([source])] == found


@pytest.mark.parametrize("name", ["none", "loop"])
def test_a_link_that_leads_nowhere_is_told(name: str, tmp_path: Path) -> None:
    with Archive(context(tmp_path / "context", linked)) as archive, pytest.raises(InvalidRequest, match="is a link to"):
        archive.pick([name])
    with Archive(tmp_path / "context", follow=False) as archive:
        assert [pick.member.name for pick in archive.pick([name])] == [name]


def test_following_links_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MAX_FOLLOWED_CHARS", 10_000)
    path = context(tmp_path / "context", lambda archive: [link(archive, f"l{n}", "x/" * 100) for n in range(100)])
    with Archive(path) as archive, pytest.raises(InvalidRequest, match="too many links"):
        archive.pick(["l*"])


@pytest.mark.parametrize(
    ("sources", "made"),
    [
        (["d"], {"a": (0o755, 7), "a/b": (0o1777, 7), "a/b/f": (0o644, 7)}),
        (["d/f", "e"], {"a": (0o755, 7), "a/b": (0o755, 7), "a/b/f": (0o644, 7)}),
        (["e"], {"a": (0o755, 7), "a/b": (0o700, 7)}),
        (["."], {"a": (0o755, 7), "a/b": (0o755, 7), "a/b/d": (0o1777, 7), "a/b/d/f": (0o644, 7), "a/b/e": (0o700, 7)}),
    ],
)
def test_directories_that_are_made_are_as_those_that_are_copied(
    sources: list[str], made: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    def fill(archive: tarfile.TarFile) -> None:
        file(archive, "d", 0, type=tarfile.DIRTYPE, mode=0o1777)
        file(archive, "d/f", 5)
        file(archive, "e", 0, type=tarfile.DIRTYPE, mode=0o700)

    out = io.BytesIO()
    with Archive(context(tmp_path / "context", fill)) as archive:
        assert archive.is_directory(sources, extract=False)
        bounded = Bounded(out, tmp_path, 2**20)
        where = {"to": "/a/b/", "missing": ["/a", "/a/b"]}
        archive.repack(sources, **where, out=bounded, owner=Owner(7, 7), mode=None, extract=False)  # type: ignore[arg-type]
    out.seek(0)
    with tarfile.open(fileobj=out) as found:
        assert {member.name: (member.mode, member.uid) for member in found} == made


def test_contents_that_cannot_be_unpacked_are_refused(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        file(archive, "a", 300_000)
    whole = gzip.compress(out.getvalue(), 0)
    path = tmp_path / "context"
    path.write_bytes(whole[:1000] + b"\xff" * 100_000 + whole[101_000:])
    with pytest.raises(InvalidRequest, match="no whole tar archive"), Archive(path) as archive:
        archive.digest(["a"])


def test_what_counts_for_a_cache_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    one = context(tmp_path / "one", lambda archive: [file(archive, f"d/{n}", n) for n in (1, 2)])
    two = context(tmp_path / "two", lambda archive: [file(archive, f"d/{n}", n) for n in (2, 1)])
    other = context(tmp_path / "other", lambda archive: [file(archive, f"d/{n}", 3) for n in (1, 2)])
    digests = []
    for path in (one, two, other):
        with Archive(path) as archive:
            digests.append(archive.digest(["d"]))
    assert digests[0] == digests[1] != digests[2]
