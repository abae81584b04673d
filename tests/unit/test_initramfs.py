"""The initramfs is read by the kernel, so these tests read it as the kernel does: record by record."""

from __future__ import annotations

import stat
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from forkyard.images.initramfs import (
    Entry,
    agent_archive,
    base_archive,
    cpio_newc,
    directory,
    module_order,
    regular_file,
)


def unpack(archive: bytes) -> dict[str, Entry]:
    """All archives of a concatenation, as Linux's initramfs code walks them: headers 4-byte aligned, zeros between."""
    found: dict[str, Entry] = {}
    at = 0
    while at < len(archive):
        if archive[at] == 0:
            at += 4
            continue
        assert at % 4 == 0
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = archive[at + 110 : at + 110 + name_size]
        assert name.endswith(b"\0")
        data_at = (at + 110 + name_size + 3) // 4 * 4
        if name != b"TRAILER!!!\0":
            path = name[:-1].decode()
            assert path.rpartition("/")[0] in ("", *found), f"{path} comes before its directory"
            found[path] = Entry(path, mode, archive[data_at : data_at + size])
        at = (data_at + size + 3) // 4 * 4
    return found


@given(st.dictionaries(st.text("abc.é_-", min_size=1, max_size=40), st.binary(max_size=600), max_size=8))
def test_what_is_packed_comes_out_again(files: dict[str, bytes]) -> None:
    archive = cpio_newc(regular_file(name, data) for name, data in files.items())
    assert {name: entry.data for name, entry in unpack(archive).items()} == files


@given(st.binary(max_size=700), st.binary(max_size=700))
def test_a_second_archive_can_follow_the_first_at_once(first: bytes, second: bytes) -> None:
    both = cpio_newc([regular_file("a", first)]) + cpio_newc([regular_file("b", second)])
    assert {name: entry.data for name, entry in unpack(both).items()} == {"a": first, "b": second}


def test_equal_entries_give_equal_bytes_whatever_the_clock_says(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text("pass\n")
    (tmp_path / "forkyard-agent.service").write_text("[Unit]\n")
    before = agent_archive(tmp_path, {"front": b"front"})
    (tmp_path / "__main__.py").touch()
    (tmp_path / "__main__.py").chmod(0o700)
    assert agent_archive(tmp_path, {"front": b"front"}) == before


def test_modes_say_what_is_a_directory_and_what_can_run() -> None:
    entries = unpack(cpio_newc([directory("d"), regular_file("d/f", b""), regular_file("x", b"", executable=True)]))
    assert stat.filemode(entries["d"].mode) == "drwxr-xr-x"
    assert stat.filemode(entries["d/f"].mode) == "-rw-r--r--"
    assert stat.filemode(entries["x"].mode) == "-rwxr-xr-x"


def test_the_agent_travels_with_its_packages_and_its_unit_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "__pycache__").mkdir()
    for name in ("__main__.py", "files/watch.py", "forkyard-agent.service", "PROTOCOL.md", "__pycache__/x.pyc"):
        (tmp_path / name).write_text(name)
    entries = unpack(agent_archive(tmp_path, {"front": b"front"}))
    assert {name for name, entry in entries.items() if stat.S_ISREG(entry.mode)} == {
        "forkyard/agent/__main__.py",
        "forkyard/agent/files/watch.py",
        "forkyard/agent/forkyard-agent.service",
        "forkyard/agent/front",
    }
    assert entries["forkyard/agent/files/watch.py"].data == b"files/watch.py"


def test_the_base_initramfs_loads_modules_in_the_order_given() -> None:
    entries = unpack(base_archive(busybox=b"ELF", init=b"#!", modules={"virtio.ko": b"1", "virtio_blk.ko": b"2"}))
    assert entries["modules/order"].data == b"virtio.ko\nvirtio_blk.ko\n"
    assert entries["modules/virtio_blk.ko"].data == b"2"
    assert entries["init"].mode & 0o111
    assert {"dev", "proc", "sys", "newroot"} <= set(entries)


MODULES_DEP = """\
kernel/drivers/block/virtio_blk.ko: kernel/drivers/virtio/virtio_ring.ko kernel/drivers/virtio/virtio.ko
kernel/drivers/virtio/virtio_ring.ko: kernel/drivers/virtio/virtio.ko
kernel/drivers/virtio/virtio.ko:
kernel/crypto/crc32c-generic.ko.xz:
kernel/drivers/net/unrelated.ko:
"""


def test_a_module_comes_after_all_it_needs_and_only_once() -> None:
    assert module_order(MODULES_DEP, ["virtio_blk", "virtio"]) == [
        "kernel/drivers/virtio/virtio.ko",
        "kernel/drivers/virtio/virtio_ring.ko",
        "kernel/drivers/block/virtio_blk.ko",
    ]


def test_a_module_is_found_whatever_dash_or_suffix_its_file_has_and_one_built_in_is_left_out() -> None:
    assert module_order(MODULES_DEP, ["ext4", "crc32c_generic"]) == ["kernel/crypto/crc32c-generic.ko.xz"]
