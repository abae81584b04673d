"""Finding and copying the memory of another process: this one in QEMU's place, or a child of it."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard.errors import HostFailure, SnapshotFailed, VmCrashed
from forkyard.vmm.qemu import pages, shim
from forkyard.vmm.qemu.native import ensure_native
from forkyard.vmm.qemu.pages import PAGE, LayerFile, PageTable, Ram, RamReader

SIZE = 64 * PAGE
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="other processes' memory is root's to see")

MAPS = """\
55d0a7e00000-55d0a8000000 r--p 00000000 fe:00 1001 /usr/bin/qemu-system-x86_64
55d0a8000000-55d0a8040000 rw-p 00200000 fe:00 1001 /usr/bin/qemu-system-x86_64
55d0a9000000-55d0a9100000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0000001000 rw-p 00000000 00:19 5 /dev/shm/a b/t.ram
7f0000001000-7f0000004000 rw-p 00001000 00:19 7 /dev/shm/a b/layer (deleted)
7f0000004000-7f0000020000 rw-p 00004000 00:19 5 /dev/shm/a b/t.ram
7f0000020000-7f0000021000 rw-p 00020000 00:19 7 /dev/shm/a b/layer (deleted)
7f0000021000-7f0000022000 rw-p 00000000 fe:00 8 /var/lib/a b/pages
7f0000022000-7f0000040000 rw-p 00022000 00:19 5 /dev/shm/a b/t.ram
7f0000041000-7f0000081000 rw-s 00000000 00:19 9 /dev/shm/shared
"""


def test_ram_is_found_in_all_its_pieces() -> None:
    base = 0x7F0000000000
    ram = pages.find_ram(MAPS, 0x40000, Path("/dev/shm/a b/t.ram"))
    assert ram == Ram(base, 0x40000, ((base + 0x1000, base + 0x4000), (base + 0x20000, base + 0x22000)))


def test_shared_memory_or_another_size_is_not_ram() -> None:
    for size in (0x80000, 0x30000):
        with pytest.raises(HostFailure, match="no private memory"):
            pages.find_ram(MAPS, size, Path("/dev/shm/a b/t.ram"))


def test_pages_that_stand_one_behind_the_other_are_found_and_the_last_of_each_counts() -> None:
    nowhere = Path("/nowhere")
    assert pages.places(nowhere, [(1, 2), (9, 1)]) == [(PAGE, 3 * PAGE, 0), (9 * PAGE, 10 * PAGE, 2 * PAGE)]
    assert pages.places(nowhere, [(4, 3), (5, 1)]) == [
        (4 * PAGE, 5 * PAGE, 0),
        (5 * PAGE, 6 * PAGE, 3 * PAGE),
        (6 * PAGE, 7 * PAGE, 2 * PAGE),
    ]
    before, behind = pages.split(pages.places(nowhere, [(0, 3), (9, 1)]), PAGE)
    assert before == [(0, PAGE, 0)]
    assert behind == [(PAGE, 3 * PAGE, PAGE), (9 * PAGE, 10 * PAGE, 3 * PAGE)]


def test_runs_are_merged_over_small_gaps_only() -> None:
    assert pages.merge([(8, 9), (1, 3), (3, 4), (2, 3)]) == [(1, 4), (8, 9)]
    assert pages.merge([(1, 4), (8, 9), (10, 11)], 2) == [(1, 4), (8, 11)]
    assert pages.merge([(1, 9), (2, 3)], 2) == [(1, 9)]
    assert pages.merge([]) == []


@pytest.fixture
def template() -> Iterator[Path]:
    """A file on tmpfs, as a template's RAM is."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="forkyard-test-") as file:
        file.write(b"t" * SIZE)
        file.flush()
        yield Path(file.name)


class Memory:
    """A private mapping of the template in this process."""

    def __init__(self, template: Path) -> None:
        with template.open("rb") as file:
            self.bytes = mmap.mmap(file.fileno(), SIZE, flags=mmap.MAP_PRIVATE)
        self._anchor = ctypes.c_char.from_buffer(self.bytes)
        self.ram = Ram(ctypes.addressof(self._anchor), SIZE, ())

    def run(self, first: int, last: int) -> tuple[int, int]:
        return self.ram.address + first * PAGE, self.ram.address + last * PAGE

    def touch(self, page: int) -> None:
        self.bytes[page * PAGE] = ord("w")


def test_only_pages_that_were_written_are_private(template: Path) -> None:
    memory = Memory(template)
    assert memory.bytes[5 * PAGE] == ord("t")  # reading does not make it private
    for page in (0, 1, 9, 63):
        memory.touch(page)
    expected = [memory.run(0, 2), memory.run(9, 10), memory.run(63, 64)]
    with PageTable(os.getpid()) as table:
        assert table.private_slowly(memory.ram.run) == expected
        if pages.why_not_live() is None:
            assert pages.merge(table.private(memory.ram.run)) == expected


@as_root
def test_a_layer_holds_what_was_saved_zeros_too_and_holes_elsewhere(template: Path, tmp_path: Path) -> None:
    memory = Memory(template)
    memory.bytes[3 * PAGE : 5 * PAGE] = bytes(2 * PAGE)
    memory.bytes[20 * PAGE : 21 * PAGE] = b"y" * PAGE
    path = Path("/dev/shm", f"{template.name}-layer")
    try:
        with LayerFile(path, SIZE) as layer:
            RamReader(os.getpid(), memory.ram, layer).save([memory.run(3, 5), memory.run(20, 21)])
        assert pages.data_runs(path) == [(3 * PAGE, 5 * PAGE), (20 * PAGE, 21 * PAGE)]
        assert path.stat().st_size == SIZE
        assert path.stat().st_mode & 0o777 == 0o444

        other = Memory(template)
        pages.copy_into(os.getpid(), other.ram, path, pages.places(path, None))
        assert other.bytes[:] == memory.bytes[:]
    finally:
        path.unlink()


@as_root
def test_more_than_fits_in_one_call_is_saved_whole(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_BUFFER_BYTES", 3 * PAGE)
    monkeypatch.setattr(pages, "_MAX_IOVECS", 2)
    memory = Memory(template)
    for page in range(64):
        memory.bytes[page * PAGE : (page + 1) * PAGE] = bytes([page]) * PAGE
    path = Path("/dev/shm", f"{template.name}-layer")
    try:
        with LayerFile(path, SIZE) as layer:
            RamReader(os.getpid(), memory.ram, layer).save(
                [memory.run(n, n + 1) for n in range(20)] + [memory.run(20, 64)]
            )
        assert path.read_bytes() == memory.bytes[:]
    finally:
        path.unlink()


@as_root
def test_a_process_that_is_gone_is_a_crash_and_a_full_disk_is_not(template: Path, tmp_path: Path) -> None:
    memory = Memory(template)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    with LayerFile(tmp_path / "layer", SIZE) as layer, pytest.raises(VmCrashed):
        RamReader(gone.pid, memory.ram, layer).save([memory.run(0, 1)])
    with pytest.raises(VmCrashed):
        PageTable(gone.pid)
    with pytest.raises(SnapshotFailed, match="No such file"):
        LayerFile(tmp_path / "nowhere" / "layer", SIZE)


SUBJECT = """
import ctypes, mmap, sys
size = 64 * 4096
with open(sys.argv[1], "rb") as file:
    memory = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
memory[7 * 4096] = memory[8 * 4096] = 1
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)
for line in sys.stdin:
    at, _, value = line.partition("=")
    if value:
        memory[int(at)] = int(value)
    print(memory[int(at)], flush=True)
"""


class Subject:
    """A process with the shim in it and the template mapped, as a QEMU has."""

    def __init__(self, process: subprocess.Popen[str], socket: Path) -> None:
        self._process, self.shim, self.pid = process, socket, process.pid
        assert process.stdout is not None
        self.ram = Ram(int(process.stdout.readline()), SIZE, ())

    def poke(self, page: int, value: int | None = None) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{page * PAGE}" + ("" if value is None else f"={value}") + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def run(self, first: int, last: int) -> tuple[int, int]:
        return self.ram.address + first * PAGE, self.ram.address + last * PAGE


@pytest.fixture
def subject(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    native = ensure_native(tmp_path_factory.mktemp("cache"))
    with tempfile.TemporaryDirectory(prefix="fys-") as directory, socket.socket(socket.AF_UNIX) as listener:
        path = Path(directory, "shim.sock")
        listener.bind(str(path))
        listener.listen()
        env = {"LD_PRELOAD": str(native.ramshim), "FORKYARD_SHIM_FD": str(listener.fileno())}
        command = [os.path.realpath(sys.executable), "-c", SUBJECT, str(template)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, env=env, pass_fds=[listener.fileno()], text=True, **pipes) as process:  # type: ignore[call-overload]
            yield Subject(process, path)
            process.kill()


@as_root
def test_the_shim_maps_parts_of_a_file_over_memory(subject: Subject, template: Path) -> None:
    layer = Path("/dev/shm", f"{template.name}-layer")
    try:
        layer.write_bytes(b"L" * SIZE)
        # More than the shim reads at once, and each client is served after the other.
        for _ in range(2):
            shim.map_file(subject.shim, layer, [shim.Range(subject.ram.address + 2 * PAGE, PAGE, 2 * PAGE)] * 600)
        assert [subject.poke(page) for page in (1, 2, 3, 7)] == [ord("t"), ord("L"), ord("t"), 1]
        subject.poke(2, 5)
        assert layer.read_bytes() == b"L" * SIZE
        layer.unlink()
        maps = Path(f"/proc/{subject.pid}/maps").read_text()
        assert pages.find_ram(maps, SIZE, template).layered == (subject.run(2, 3),)
    finally:
        layer.unlink(missing_ok=True)


@as_root
def test_the_shim_says_what_it_could_not_do_and_goes_on(subject: Subject, template: Path) -> None:
    with pytest.raises(HostFailure, match="Invalid argument"):
        shim.map_file(subject.shim, template, [shim.Range(subject.ram.address + 1, PAGE, 0)])
    shim.map_file(subject.shim, template, [shim.Range(subject.ram.address, PAGE, 0)])
    with pytest.raises(VmCrashed, match="does not answer"):
        shim.map_file(subject.shim.with_name("nothing"), template, [])


@as_root
@pytest.mark.skipif(os.geteuid() != 0 or pages.why_not_live() is not None, reason="the kernel cannot")
def test_a_watched_process_tells_what_it_wrote_since_it_was_asked(subject: Subject) -> None:
    assert shim.watch(subject.shim, shim.Range(subject.ram.address, SIZE)) is None
    with PageTable(subject.pid) as table:
        assert pages.merge(table.written(subject.ram.run, ask_again=True)) == [subject.run(7, 9)]
        assert table.written(subject.ram.run, ask_again=True) == []
        subject.poke(7, 2)
        subject.poke(40, 2)
        subject.poke(50)  # only read
        both = [subject.run(7, 8), subject.run(40, 41)]
        assert table.written(subject.ram.run, ask_again=False) == both
        assert table.written(subject.ram.run, ask_again=True) == both
        assert table.written(subject.ram.run, ask_again=True) == []
        assert shim.watch(subject.shim, shim.Range(subject.ram.address, SIZE)) is None
        subject.poke(8, 3)
        assert table.written(subject.ram.run, ask_again=True) == [subject.run(8, 9)]
        assert pages.merge(table.private(subject.ram.run)) == [subject.run(7, 9), subject.run(40, 41)]


@as_root
@pytest.mark.skipif(os.geteuid() != 0 or pages.why_not_live() is not None, reason="the kernel cannot")
def test_memory_mapped_from_a_disk_is_watched_too(subject: Subject, template: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/var/tmp", prefix="forkyard-test-") as saved:
        saved.write(b"A" * PAGE + b"B" * PAGE + b"C" * PAGE)
        saved.flush()
        places = [shim.Range(subject.ram.address + page * PAGE, PAGE, at * PAGE) for at, page in enumerate((9, 5, 30))]
        shim.map_file(subject.shim, Path(saved.name), places)
    assert [subject.poke(page) for page in (9, 5, 30)] == [*b"ABC"]
    ram = pages.find_ram(Path(f"/proc/{subject.pid}/maps").read_text(), SIZE, template)
    assert ram == Ram(subject.ram.address, SIZE, (subject.run(5, 6), subject.run(9, 10), subject.run(30, 31)))
    assert shim.watch(subject.shim, shim.Range(subject.ram.address, SIZE)) is None
    with PageTable(subject.pid) as table:
        table.written(subject.ram.run, ask_again=True)
        subject.poke(5, 1)
        subject.poke(30)  # only read
        assert table.written(subject.ram.run, ask_again=True) == [subject.run(5, 6)]
        assert [run for run in pages.merge(table.private(subject.ram.run)) if run[0] < subject.run(6, 7)[0]] == [
            subject.run(5, 6)
        ]
