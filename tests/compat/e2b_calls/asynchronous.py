"""The async client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from registry import Check, Yard, call


def _async(work: Callable[[Any], Any]) -> Check:
    def run(y: Yard) -> None:
        async def main() -> None:
            sbx = await y.e2b.AsyncSandbox.connect(y.sbx.sandbox_id)
            await work(y, sbx)

        y.loop.run_until_complete(main())

    return run


async def _a_create(y: Yard, _: Any) -> None:
    sbx = await y.e2b.AsyncSandbox.create(timeout=300)
    assert await sbx.is_running()
    assert (await sbx.get_info()).sandbox_id == sbx.sandbox_id
    assert await sbx.kill()


async def _a_run(y: Yard, sbx: Any) -> None:
    results = await asyncio.gather(*(sbx.commands.run(f"echo {n}") for n in range(8)))
    assert [one.stdout for one in results] == [f"{n}\n" for n in range(8)]


async def _a_background(y: Yard, sbx: Any) -> None:
    handle = await sbx.commands.run("read line; echo got $line", background=True, stdin=True)
    await sbx.commands.send_stdin(handle.pid, "it\n")
    assert (await handle.wait()).stdout == "got it\n"


async def _a_files(y: Yard, sbx: Any) -> None:
    await sbx.files.write(y.path("async.txt"), "x")
    assert await sbx.files.read(y.path("async.txt")) == "x"
    assert "async.txt" in [one.name for one in await sbx.files.list(y.dir)]


async def _a_watch(y: Yard, sbx: Any) -> None:
    await sbx.files.make_dir(y.path("awatched"))
    seen: list[Any] = []
    three = asyncio.Event()

    def on_event(event: Any) -> None:
        seen.append(event)
        if len(seen) == 3:
            three.set()

    watch = await sbx.files.watch_dir(y.path("awatched"), on_event=on_event)
    await sbx.files.write(y.path("awatched/seen.txt"), "x")
    await asyncio.wait_for(three.wait(), 10)
    assert [one.type.value for one in seen] == ["create", "chmod", "write"]
    await watch.stop()


async def _a_pty(y: Yard, sbx: Any) -> None:
    seen: list[bytes] = []
    handle = await sbx.pty.create(y.e2b.PtySize(rows=20, cols=60), on_data=seen.append, envs={"HISTFILE": "/dev/null"})
    await sbx.pty.send_stdin(handle.pid, b"stty size; exit\n")
    await handle.wait()
    assert b"20 60" in b"".join(seen)


async def _a_list(y: Yard, sbx: Any) -> None:
    found = await y.e2b.AsyncSandbox.list().next_items()
    assert sbx.sandbox_id in [one.sandbox_id for one in found]


for _name, _work in (
    ("AsyncSandbox.create, is_running, get_info, kill", _a_create),
    ("AsyncSandbox.list", _a_list),
    ("async commands.run", _a_run),
    ("async commands.run: background, send_stdin", _a_background),
    ("async files.write, read, list", _a_files),
    ("async files.watch_dir", _a_watch),
    ("async pty.create, send_stdin", _a_pty),
):
    call(_name)(_async(_work))
