"""Files of a real machine."""

import hashlib
import os
from pathlib import Path

import pytest

from forkyard import Sandbox
from forkyard.errors import FileConflict, FileMissing, GuestDiskFull, InvalidPath


def test_text_and_bytes_round_trip(sbx: Sandbox) -> None:
    sbx.files.write("/root/a/b/c.txt", "grüße\n")
    assert sbx.files.read("/root/a/b/c.txt") == "grüße\n"
    blob = bytes(range(256)) * 1000
    sbx.files.write("/root/blob", blob, mode=0o750)
    assert sbx.files.read_bytes("/root/blob") == blob
    assert sbx.files.stat("/root/blob").mode == 0o750
    sbx.files.append("/root/a/b/c.txt", "more")
    assert sbx.exec("cat /root/a/b/c.txt").stdout == "grüße\nmore"


def test_a_large_file_is_streamed_both_ways(sbx: Sandbox) -> None:
    data = os.urandom(40_000_000)
    sbx.files.write("/root/big", data)
    assert sbx.exec("sha256sum < /root/big").stdout.split()[0] == hashlib.sha256(data).hexdigest()
    assert hashlib.sha256(sbx.files.read_bytes("/root/big")).digest() == hashlib.sha256(data).digest()


def test_list_stat_move_remove_and_exists(sbx: Sandbox) -> None:
    sbx.files.mkdir("/root/d/e")
    sbx.files.write("/root/d/f", "x")
    sbx.exec("ln -s f /root/d/link")
    names = {(f.name, f.type) for f in sbx.files.list("/root/d")}
    assert names == {("e", "directory"), ("f", "file"), ("link", "symlink")}
    assert sbx.files.stat("/root/d/link").target == "f"
    sbx.files.move("/root/d/f", "/root/d/g")
    assert not sbx.files.exists("/root/d/f")
    sbx.files.chmod("/root/d/g", 0o600)
    assert sbx.files.stat("/root/d/g").mode == 0o600
    with pytest.raises(FileConflict):
        sbx.files.remove("/root/d")
    sbx.files.remove("/root/d", recursive=True)
    assert not sbx.files.exists("/root/d")


def test_bad_paths_are_typed_errors(sbx: Sandbox) -> None:
    with pytest.raises(FileMissing):
        sbx.files.read("/no/such")
    with pytest.raises(FileConflict):
        sbx.files.read("/etc")
    with pytest.raises(FileConflict):
        sbx.files.write("/etc", "x")
    with pytest.raises(FileConflict):
        sbx.files.list("/etc/hostname")
    for path in ("", "/a\0b", "/" + "x" * 5000):
        with pytest.raises(InvalidPath):
            sbx.files.write(path, "x")
    sbx.files.write("/root/../root/./dots", "the guest resolves them")
    assert sbx.files.exists("/root/dots")


def test_names_that_are_not_utf8_round_trip(sbx: Sandbox) -> None:
    name = os.fsdecode(b"/root/caf\xe9")
    sbx.files.write(name, "latin")
    assert sbx.files.read(name) == "latin"
    (listed,) = [f.path for f in sbx.files.list("/root") if f.name.startswith("caf")]
    assert sbx.files.read(listed) == "latin", "the name that a listing shows leads back to the file"
    assert sbx.exec("ls /root | od -c | head -1").stdout.count("351") == 1


def test_a_full_disk_is_a_typed_error_and_the_machine_goes_on(sbx: Sandbox) -> None:
    sbx.exec("mount -t tmpfs -o size=1m none /mnt").check()
    with pytest.raises(GuestDiskFull):
        sbx.files.write("/mnt/big", bytes(5_000_000))
    assert sbx.files.list("/mnt") == [], "no half-written file"
    assert sbx.exec("echo on").stdout == "on\n"


def test_directories_travel_as_tar_streams(sbx: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "project"
    (source / "src").mkdir(parents=True)
    (source / "src" / "main.py").write_text("print(1)")
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("src/main.py")
    sbx.files.upload(source, "/root/project")
    assert sbx.exec("python3 /root/project/link").stdout == "1\n"
    assert sbx.files.stat("/root/project/run.sh").mode == 0o755
    sbx.exec("echo made inside > /root/project/new")
    sbx.files.download("/root/project", tmp_path / "back")
    assert (tmp_path / "back" / "new").read_text() == "made inside\n"
    assert (tmp_path / "back" / "link").readlink() == Path("src/main.py")


def test_changes_are_watched(sbx: Sandbox) -> None:
    sbx.files.mkdir("/root/w/deep")
    with sbx.files.watch("/root/w", recursive=True) as events:
        sbx.exec("echo x > /root/w/deep/file; rm /root/w/deep/file")
        seen = []
        for event in events:
            seen.append((event.type, event.path))
            if event.type == "deleted":
                break
    assert ("created", "/root/w/deep/file") in seen
