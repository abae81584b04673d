"""Directories as tar streams: faithful there and back, and harmless when the sender is not."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from forkyard.errors import InvalidPath
from forkyard.sdk import archive


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / ("x" * 120) / "empty").mkdir(parents=True)
    (source / "deep" / "odd-size").write_bytes(os.urandom(700_001))
    (source / "block").write_bytes(b"b" * 512)
    (source / "none").write_bytes(b"")
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("deep/odd-size")
    (source / "dangling").symlink_to("/nowhere")
    Path(os.fsdecode(os.fsencode(source) + b"/caf\xe9")).write_text("latin")

    packed = io.BytesIO(b"".join(archive.pack(source)))
    archive.unpack(packed, tmp_path / "target")

    def tree(root: Path) -> dict[str, tuple[int, object]]:
        return {
            str(path.relative_to(root)): (
                path.lstat().st_mode,
                path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None,
            )
            for path in root.rglob("*")
        }

    assert tree(tmp_path / "target") == tree(source)


def test_the_stream_is_a_tar_archive_that_others_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("content")
    with tarfile.open(fileobj=io.BytesIO(b"".join(archive.pack(tmp_path))), mode="r|") as tar:
        assert [info.name for info in tar] == ["a"]


def test_sockets_and_pipes_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    with tarfile.open(fileobj=io.BytesIO(b"".join(archive.pack(tmp_path)))) as tar:
        assert tar.getnames() == ["file"]


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/evil", "a/.."])
def test_names_that_lead_outside_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidPath, match="unsafe"):
        archive.unpack(archive_of((member(name), b"x")), tmp_path / "target")
    assert not (tmp_path / "evil").exists()


def test_nothing_is_written_through_a_link_of_the_same_archive(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    evil = archive_of((member("door", tarfile.SYMTYPE, str(tmp_path / "outside")), b""), (member("door/evil"), b"x"))
    with pytest.raises(InvalidPath, match="link"):
        archive.unpack(evil, tmp_path / "target")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_file_never_overwrites_what_a_link_points_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    evil = archive_of((member("a", tarfile.SYMTYPE, str(tmp_path / "precious")), b""), (member("a"), b"theirs"))
    archive.unpack(evil, tmp_path / "target")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "target" / "a").read_text() == "theirs"


def test_a_hard_link_to_a_file_outside_the_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    evil = archive_of((member("a", tarfile.LNKTYPE, str(tmp_path / "precious")), b""))
    with pytest.raises(InvalidPath, match="hard link"):
        archive.unpack(evil, tmp_path / "target")


def test_devices_and_set_uid_bits_do_not_come_through(tmp_path: Path) -> None:
    archive.unpack(archive_of((member("null", tarfile.CHRTYPE), b""), (member("su", mode=0o4755), b"x")), tmp_path)
    assert not (tmp_path / "null").exists()
    assert (tmp_path / "su").stat().st_mode & 0o7777 == 0o755


def test_a_read_only_directory_can_still_be_filled(tmp_path: Path) -> None:
    archive.unpack(archive_of((member("d", tarfile.DIRTYPE, mode=0o555), b""), (member("d/f"), b"x")), tmp_path)
    assert (tmp_path / "d" / "f").read_text() == "x"
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o555


def test_a_download_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(RuntimeError), archive.incoming(target, 0o600) as out:
        out.write(b"half")
        raise RuntimeError
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]
