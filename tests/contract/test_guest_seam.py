"""What every guest does, the real agent and the fake one: the seam that the layers above rely on."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forkyard.errors import (
    CommandNotFound,
    Conflict,
    ExecNotFound,
    FileConflict,
    FileMissing,
    InvalidPath,
)
from forkyard.guest.base import ExecSpec, Exit, Guest, Lost, Output
from forkyard.guest.client import connect
from forkyard.guest.fake import FakeGuest
from forkyard.guest.local import LocalAgent

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["agent", "fake"])
async def guest(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Guest]:
    if request.param == "fake":
        fake = FakeGuest()
        await fake.mkdir(str(tmp_path))
        yield fake
        return
    async with LocalAgent(tmp_path) as agent:
        guest = await connect(agent.socket, timeout_s=10)
        yield guest
        await guest.aclose()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return f"{tmp_path}/files"


async def run(guest: Guest, spec: ExecSpec) -> tuple[bytes, bytes, Exit]:
    out = {"stdout": b"", "stderr": b""}
    async with guest.execute(spec) as execution:
        async for item in execution:
            if isinstance(item, Output):
                assert item.offset == len(out[item.stream])
                out[item.stream] += item.data
            elif isinstance(item, Exit):
                return out["stdout"], out["stderr"], item
    raise AssertionError("no exit")


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def content(guest: Guest, path: str, **options: int) -> bytes:
    async with guest.read_file(path, **options) as chunks:
        return b"".join([chunk async for chunk in chunks])


async def test_a_command_gives_both_streams_apart_and_its_exit_code(guest: Guest) -> None:
    stdout, stderr, ended = await run(guest, ExecSpec("echo out; echo err >&2; exit 3"))
    assert (stdout, stderr, ended.exit_code, ended.signal) == (b"out\n", b"err\n", 3, None)


async def test_a_list_is_run_without_a_shell(guest: Guest) -> None:
    assert (await run(guest, ExecSpec(["echo", "a;b", "c"])))[0] == b"a;b c\n"


async def test_a_timeout_ends_the_command(guest: Guest) -> None:
    _, _, ended = await run(guest, ExecSpec("sleep 60", timeout_s=0.2))
    assert (ended.timed_out, ended.signal, ended.exit_code) == (True, 9, None)
    assert 200 <= ended.duration_ms < 10_000


async def test_stdin_is_streamed_and_closed(guest: Guest) -> None:
    async with guest.execute(ExecSpec("cat", stdin=True)) as execution:
        await guest.write_stdin(execution.id, b"one ")
        await guest.write_stdin(execution.id, b"two", close=True)
        items = [item async for item in execution]
    assert b"".join(item.data for item in items if isinstance(item, Output)) == b"one two"
    with pytest.raises(Conflict):
        await guest.write_stdin(execution.id, b"three")


async def test_a_background_exec_is_listed_attached_to_and_signalled(guest: Guest) -> None:
    info = await guest.start(ExecSpec("echo ready; sleep 60", label="server", trace_id="trace-1"))
    assert info.trace_id == (await guest.exec_info(info.id)).trace_id == "trace-1"
    assert info.running and info.pid
    assert [(item.id, item.label) for item in await guest.execs()] == [(info.id, "server")]
    async with guest.attach(info.id) as execution:
        items = aiter(execution)
        first = await anext(items)
        assert first == Output("stdout", 0, b"ready\n")
        await guest.signal(info.id, 15)
        ended = await anext(items)
    assert isinstance(ended, Exit) and ended.signal == 15
    info = await guest.exec_info(info.id)
    assert (info.running, info.signal, info.stdout_bytes) == (False, 15, 6)
    with pytest.raises(Conflict):
        await guest.signal(info.id, 15)


async def test_attaching_again_replays_from_the_offsets_asked_for(guest: Guest) -> None:
    info = await guest.start(ExecSpec("echo -n 0123456789; echo -n abcdef >&2"))
    async with guest.attach(info.id) as execution:
        assert isinstance([item async for item in execution][-1], Exit)
    async with guest.attach(info.id, stdout_offset=4, stderr_offset=6) as execution:
        items: list[Output | Lost | Exit] = [item async for item in execution]
    assert items[:-1] == [Output("stdout", 4, b"456789")]


async def test_leaving_an_exec_does_not_end_it(guest: Guest) -> None:
    async with guest.execute(ExecSpec("cat", stdin=True)) as execution:
        exec_id = execution.id
    assert (await guest.exec_info(exec_id)).running
    await guest.write_stdin(exec_id, b"still here", close=True)
    async with guest.attach(exec_id) as again:
        items = [item async for item in again]
    assert isinstance(items[0], Output) and items[0].data == b"still here"


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (ExecSpec("true", user="nobodyhere"), CommandNotFound),
        (ExecSpec("true", cwd="/no/such/place"), CommandNotFound),
    ],
)
async def test_what_cannot_be_started_says_why(guest: Guest, spec: ExecSpec, error: type[Exception]) -> None:
    with pytest.raises(error):
        await guest.start(spec)
    assert await guest.execs() == []


async def test_a_socket_that_is_not_there_has_no_owner(guest: Guest) -> None:
    assert await guest.socket_owner("tcp", 1, "203.0.113.5", 80) is None
    assert await guest.socket_owner("udp", 1, "203.0.113.5", 53) is None
    assert all(0 < port < 65536 for port in (await guest.connections()).values())
    await guest.disconnect([])


async def test_what_is_mounted_nowhere_is_flushed_and_what_is_not_frozen_goes_on(guest: Guest) -> None:
    await guest.thaw()
    await asyncio.gather(guest.flush([]), guest.flush([0x17]))
    await guest.thaw()


async def test_unknown_execs_are_not_found(guest: Guest) -> None:
    for ask in (guest.exec_info("x"), guest.signal("x", 9), guest.resize("x", 1, 1), guest.write_stdin("x", b"")):
        with pytest.raises(ExecNotFound):
            await ask
    with pytest.raises(ExecNotFound):
        async with guest.attach("x"):
            pass


async def test_what_is_not_there_is_named_when_it_is_asked_for(guest: Guest, root: str) -> None:
    with pytest.raises(FileMissing, match=f"{root}/none: "):
        await guest.stat(f"{root}/none")


async def test_a_file_is_written_read_and_described(guest: Guest, root: str) -> None:
    info = await guest.write_file(f"{root}/a/b.bin", pieces(b"\0\xff", b"tail"), mode=0o640)
    assert (info.name, info.path, info.type, info.size, info.mode) == ("b.bin", f"{root}/a/b.bin", "file", 6, 0o640)
    assert await content(guest, f"{root}/a/b.bin") == b"\0\xfftail"
    assert await content(guest, f"{root}/a/b.bin", offset=1, length=2) == b"\xfft"
    assert await content(guest, f"{root}/a/b.bin", offset=99) == b""
    assert await guest.stat(f"{root}/a/b.bin") == info


async def test_an_overwrite_keeps_the_mode_and_append_adds(guest: Guest, root: str) -> None:
    path = f"{root}/script"
    await guest.write_file(path, pieces(b"one"), mode=0o755)
    await guest.write_file(path, pieces(b"two"))
    info = await guest.write_file(path, pieces(b"!"), append=True)
    assert (info.mode, await content(guest, path)) == (0o755, b"two!")


async def test_a_write_whose_source_fails_changes_nothing(guest: Guest, root: str) -> None:
    await guest.write_file(f"{root}/kept", pieces(b"old"))

    async def broken() -> AsyncIterator[bytes]:
        yield b"new"
        raise RuntimeError("client went away")

    with pytest.raises(RuntimeError):
        await guest.write_file(f"{root}/kept", broken())
    assert await content(guest, f"{root}/kept") == b"old"
    assert [item.name for item in await guest.list_dir(root)] == ["kept"]


async def test_directories_are_made_listed_moved_and_removed(guest: Guest, root: str) -> None:
    await guest.mkdir(f"{root}/one/two", mode=0o700)
    await guest.mkdir(f"{root}/one/two")
    await guest.write_file(f"{root}/one/two/file", pieces(b"x"))
    assert {item.path for item in await guest.list_dir(root)} == {f"{root}/one"}
    assert {item.name for item in await guest.list_dir(root, depth=3)} == {"one", "two", "file"}
    await guest.move(f"{root}/one", f"{root}/uno")
    assert not await guest.exists(f"{root}/one")
    assert await content(guest, f"{root}/uno/two/file") == b"x"
    with pytest.raises(FileConflict):
        await guest.remove(f"{root}/uno")
    await guest.remove(f"{root}/uno", recursive=True)
    assert await guest.list_dir(root) == []


async def test_chmod_changes_the_mode(guest: Guest, root: str) -> None:
    await guest.write_file(f"{root}/f", pieces(b""))
    await guest.chmod(f"{root}/f", 0o4711)
    assert (await guest.stat(f"{root}/f")).mode == 0o4711


async def test_wrong_paths_get_the_right_error(guest: Guest, root: str) -> None:
    await guest.write_file(f"{root}/file", pieces(b""))
    with pytest.raises(FileMissing):
        await content(guest, f"{root}/nothing")
    with pytest.raises(FileMissing):
        await guest.remove(f"{root}/nothing")
    with pytest.raises(FileMissing):
        await guest.write_file(f"{root}/no/parent", pieces(b""), parents=False)
    with pytest.raises(FileConflict):
        await content(guest, root)
    with pytest.raises(FileConflict):
        await guest.write_file(root, pieces(b""))
    with pytest.raises(FileConflict):
        await guest.list_dir(f"{root}/file")
    with pytest.raises(FileConflict):
        await guest.mkdir(f"{root}/file", parents=False)
    await guest.write_file(f"{root}/other", pieces(b""))
    with pytest.raises(FileConflict):
        await guest.move(f"{root}/file", f"{root}/other", overwrite=False)
    for bad in ("", "a\0b"):
        with pytest.raises(InvalidPath):
            await guest.stat(bad)


async def test_a_directory_goes_out_and_in_as_a_tar_stream(guest: Guest, root: str) -> None:
    await guest.write_file(f"{root}/src/deep/a.txt", pieces(b"alpha"))
    async with guest.download_tar(f"{root}/src") as chunks:
        archive = b"".join([chunk async for chunk in chunks])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert "./deep/a.txt" in tar.getnames()
    await guest.upload_tar(f"{root}/copy", pieces(archive[:700], archive[700:]))
    assert await content(guest, f"{root}/copy/deep/a.txt") == b"alpha"


async def test_a_watch_tells_what_happens(guest: Guest, root: str) -> None:
    await guest.mkdir(root)
    async with guest.watch(root) as events, asyncio.timeout(10):
        await guest.mkdir(f"{root}/new", parents=False)
        event = await anext(events)
        assert (event.type, event.path) == ("created", f"{root}/new")
        await guest.move(f"{root}/new", f"{root}/newer")
        while event.type != "moved":
            event = await anext(events)
        assert (event.path, event.to) == (f"{root}/new", f"{root}/newer")
        await guest.remove(f"{root}/newer")
        while event.type != "deleted":
            event = await anext(events)
        assert event.path == f"{root}/newer"
