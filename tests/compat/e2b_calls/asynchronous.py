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


async def _a_sleep(y: Yard, _: Any) -> None:
    made = await y.e2b.AsyncSandbox.create(timeout=300)
    await made.set_timeout(600)
    pause = getattr(made, "pause", None) or made.beta_pause
    await pause()
    assert not await made.is_running()
    made = await y.e2b.AsyncSandbox.connect(made.sandbox_id, timeout=300)
    assert (await made.commands.run("echo back")).stdout == "back\n"
    assert await made.kill()


async def _a_copies(y: Yard, sbx: Any) -> None:
    snapshot = await sbx.create_snapshot()
    pages = sbx.list_snapshots()
    assert snapshot.snapshot_id in [one.snapshot_id for one in await pages.next_items()]
    assert await y.e2b.AsyncSandbox.delete_snapshot(snapshot.snapshot_id)
    (child,) = await sbx.fork()
    assert (await child.commands.run("echo fork")).stdout == "fork\n"
    assert await child.kill()


async def _a_more_files(y: Yard, sbx: Any) -> None:
    assert await sbx.files.make_dir(y.path("amade"))
    await sbx.files.write_files([{"path": y.path("amade/a"), "data": "a"}, {"path": y.path("amade/b"), "data": b"b"}])
    await sbx.files.rename(y.path("amade/a"), y.path("amade/c"))
    assert (await sbx.files.get_info(y.path("amade/c"))).size == 1
    await sbx.files.remove(y.path("amade/c"))
    assert await sbx.files.exists(y.path("amade/b"))
    assert not await sbx.files.exists(y.path("amade/c"))


async def _a_processes(y: Yard, sbx: Any) -> None:
    handle = await sbx.commands.run("sleep 60", background=True)
    assert handle.pid in [one.pid for one in await sbx.commands.list()]
    assert await sbx.commands.kill(handle.pid) is True
    assert await sbx.commands.kill(handle.pid) is False
    handle = await sbx.commands.run("sleep 0.7; echo late", background=True)
    await handle.disconnect()
    again = await sbx.commands.connect(handle.pid)
    assert (await again.wait()).stdout == "late\n"


async def _a_template(y: Yard, _: Any) -> None:
    name = f"{y.template}-async"
    await y.e2b.AsyncTemplate.build(y.e2b.AsyncTemplate().from_base_image().run_cmd("true"), alias=name)
    made = await y.e2b.AsyncSandbox.create(name, timeout=300)
    assert await made.kill()


for _name, _work in (
    ("AsyncSandbox.create, is_running, get_info, kill", _a_create),
    ("AsyncSandbox.list", _a_list),
    ("async commands.run", _a_run),
    ("async commands.run: background, send_stdin", _a_background),
    ("async files.write, read, list", _a_files),
    ("async files.watch_dir", _a_watch),
    ("async pty.create, send_stdin", _a_pty),
    ("AsyncSandbox.set_timeout, pause, connect", _a_sleep),
    ("async files.make_dir, write_files, rename, get_info, remove, exists", _a_more_files),
    ("async commands.list, kill, connect", _a_processes),
    ("AsyncTemplate.build", _a_template),
):
    call(_name)(_async(_work))
call("AsyncSandbox.create_snapshot, list_snapshots, delete_snapshot, fork", "2.34")(_async(_a_copies))
