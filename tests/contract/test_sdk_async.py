"""The async client against the real API. What both clients share is tested with the sync one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from forkyard import AsyncForkyard, AsyncSandbox, ExecNotFound, OperationTimeout, SandboxNotFound, State

from .sdk_daemon import Daemon

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["socket", "url"])
async def fy(daemon: Daemon, request: pytest.FixtureRequest) -> AsyncIterator[AsyncForkyard]:
    if request.param == "url":
        client = AsyncForkyard(daemon.url, daemon.key)
    else:
        client = AsyncForkyard(socket=daemon.socket, key_file=daemon.key_file)
    async with client:
        yield client


@pytest.fixture
async def sbx(fy: AsyncForkyard) -> AsyncIterator[AsyncSandbox]:
    async with await fy.sandboxes.create() as sandbox:
        yield sandbox


async def test_leaving_the_block_deletes_the_sandbox(fy: AsyncForkyard) -> None:
    async with await fy.sandboxes.create(name="brief") as sandbox:
        assert (await sandbox.exec("echo hello")).stdout == "hello\n"
    assert (await fy.sandboxes.get(sandbox.id)).state == State.DELETED
    with pytest.raises(SandboxNotFound):
        await fy.sandboxes.get("nope")


async def test_commands_run_side_by_side(sbx: AsyncSandbox) -> None:
    results = await asyncio.gather(*(sbx.exec(f"echo {i}; exit {i}") for i in range(20)))
    assert [(result.stdout, result.exit_code) for result in results] == [(f"{i}\n", i) for i in range(20)]


async def test_stdin_comes_from_an_async_source(sbx: AsyncSandbox) -> None:
    async def lines() -> AsyncIterator[bytes]:
        for i in range(3):
            await asyncio.sleep(0.01)
            yield b"%d\n" % i

    stream = sbx.exec_stream("cat", stdin=lines())
    assert b"".join([chunk.data async for chunk in stream]) == b"0\n1\n2\n"
    data = os.urandom(2_000_000)
    assert (await sbx.exec("cat", stdin=data)).stdout_bytes == data


async def test_an_exec_goes_on_over_a_restart_of_the_daemon(daemon: Daemon, sbx: AsyncSandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    printed = b""
    stream = sbx.exec_stream(f"seq 1 20000; cat {tmp_path}/gate; seq 20001 40000")
    async for chunk in stream:
        printed += chunk.data
        if printed.endswith(b"\n20000\n"):
            await asyncio.to_thread(daemon.restart)
            opening = asyncio.create_task(asyncio.to_thread((tmp_path / "gate").write_text, ""))
    await opening
    assert [int(line) for line in printed.split()] == list(range(1, 40001))
    assert stream.exit_code == 0


async def test_a_cancelled_exec_leaves_the_process_running(sbx: AsyncSandbox) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await sbx.exec("sleep 1000", label="left")
    (left,) = [info for info in await sbx.execs() if info.label == "left"]
    process = sbx.process(left.id)
    with pytest.raises(OperationTimeout):
        await process.wait(timeout_s=0.2)
    await process.kill()
    assert (await process.wait(timeout_s=20)).signal == 9
    with pytest.raises(ExecNotFound):
        await sbx.process("nope").info()


async def test_files_move_both_ways(sbx: AsyncSandbox, tmp_path: Path) -> None:
    await sbx.files.write(f"{tmp_path}/a", "text")
    assert await sbx.files.read(f"{tmp_path}/a") == "text"
    piece = os.urandom(50_000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield piece

    assert (await sbx.files.write_stream(f"{tmp_path}/big", pieces())).size == 1_000_000
    async with aclosing(sbx.files.read_stream(f"{tmp_path}/big")) as chunks:
        assert b"".join([chunk async for chunk in chunks]) == piece * 20
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "leaf").write_text("green")
    await sbx.files.upload(tmp_path / "tree", f"{tmp_path}/copy")
    await sbx.files.download(f"{tmp_path}/copy", tmp_path / "back")
    await sbx.files.download(f"{tmp_path}/big", tmp_path / "big-back")
    assert (tmp_path / "back" / "leaf").read_text() == "green"
    assert (tmp_path / "big-back").read_bytes() == piece * 20


async def test_changes_are_watched(sbx: AsyncSandbox, tmp_path: Path) -> None:
    async with sbx.files.watch(str(tmp_path)) as changes:
        (tmp_path / "new").write_text("x")
        async for change in changes:
            assert (change.type, change.path) == ("created", f"{tmp_path}/new")
            break


async def test_a_terminal_runs_to_its_end(sbx: AsyncSandbox) -> None:
    async with sbx.terminal("bash --norc") as terminal:
        await terminal.send(b"stty size; exit 3\n")
        printed = b"".join([data async for data in terminal])
        assert b"24 80" in printed
        assert terminal.end is not None
        assert terminal.end.exit_code == 3


async def test_a_terminal_that_is_silent_times_out_and_goes_on(sbx: AsyncSandbox) -> None:
    async with sbx.terminal("cat") as terminal:
        with pytest.raises(OperationTimeout):
            await terminal.read_until(b"never", timeout_s=0.2)
        await terminal.send(b"ever\n")
        assert (await terminal.read_until(b"ever", timeout_s=20)).endswith(b"ever")


async def test_events_arrive_as_they_happen(fy: AsyncForkyard) -> None:
    after = (await fy.events.list())[-1].id
    async with await fy.sandboxes.create() as sandbox, aclosing(fy.events.follow(after=after)) as events:
        async for event in events:
            assert event.sandbox_id == sandbox.id
            if event.kind == "sandbox.running":
                break
