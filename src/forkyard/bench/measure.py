"""How each figure is measured: as a user would see it, through the async SDK against a daemon of its own."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from forkyard import AsyncForkyard, AsyncSandbox
from forkyard.bench import volumes as volume_bench
from forkyard.bench import yard
from forkyard.bench.compat import compat
from forkyard.bench.figures import Sample
from forkyard.bench.git import git
from forkyard.bench.net import net
from forkyard.bench.spec import spec
from forkyard.daemon import qemu_driver
from forkyard.errors import ForkyardError
from forkyard.images import ensure_base_image
from forkyard.settings import Settings

Say = Callable[[str], None]
Bench = Callable[[int | None, Say], Awaitable[dict[str, Sample]]]

FILE_BYTES = 64_000_000
DENSITY = 50
NO_POOL = {"pool_size": 0, "pool_shells": 0}
#: The pool is full again after that.
REFILLED_S = 6.0


async def reference(settings: Settings, n: int = 15) -> tuple[str, Sample, Sample]:
    """The accelerator, T0 (an idle hypervisor started to its first answer), and the time to its bare greeting."""
    driver = await qemu_driver(settings, await ensure_base_image(settings.cache_dir, lambda *_: None))
    with tempfile.TemporaryDirectory() as scratch:
        starts = [await driver.start_idle_ms(Path(scratch)) for _ in range(n)]
    return driver.accel, Sample([s.answer_ms for s in starts]), Sample([s.greeting_ms for s in starts])


async def timed(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return (time.perf_counter() - started) * 1000


@asynccontextmanager
async def warm_daemon(say: Say, **settings: object) -> AsyncIterator[AsyncForkyard]:
    """Its templates are loaded: one sandbox has come and gone."""
    say("starting a daemon")
    async with yard.daemon(**settings) as fy:
        await (await fy.sandboxes.create()).delete()
        yield fy


async def create(n: int | None, say: Say) -> dict[str, Sample]:
    values = []
    async with warm_daemon(say, **NO_POOL) as fy:
        for i in range(n or 20):
            say(f"create {i + 1}")
            started = time.perf_counter()
            sandbox = await fy.sandboxes.create()
            values.append((time.perf_counter() - started) * 1000)
            await sandbox.delete()
    return {"create_cold": Sample(values)}


async def specs(n: int | None, say: Say) -> dict[str, Sample]:
    """What a machine has when it is asked for: what was built in it, and volumes."""
    return {**await spec(n, say), **await volumes(n, say)}


async def volumes(n: int | None, say: Say) -> dict[str, Sample]:
    async with warm_daemon(say) as fy:
        pooled = await volume_bench.attach(fy, n or 10, say, rest_s=REFILLED_S)
    async with warm_daemon(say, **NO_POOL) as fy:
        alone = await volume_bench.attach(fy, n or 20, say)
    return {"volume_1gib_attach": pooled, "volume_1gib_attach_no_pool": alone}


async def exec_(n: int | None, say: Say) -> dict[str, Sample]:
    async with warm_daemon(say, **NO_POOL) as fy, await fy.sandboxes.create() as sandbox:
        for _ in range(5):  # "used": its first commands have been translated
            await sandbox.exec("true")
        values = []
        for i in range(n or 40):
            say(f"exec {i + 1}")
            values.append(await timed(sandbox.exec("true")))
    return {"exec_true": Sample(values)}


async def files(n: int | None, say: Say) -> dict[str, Sample]:
    data = os.urandom(FILE_BYTES)
    write, read = [], []
    async with warm_daemon(say, **NO_POOL) as fy, await fy.sandboxes.create() as sandbox:
        for i in range(n or 5):
            say(f"files {i + 1}")
            write.append(await timed(sandbox.files.write("/root/bench", data)))
            started = time.perf_counter()
            back = await sandbox.files.read_bytes("/root/bench")
            read.append((time.perf_counter() - started) * 1000)
            if back != data:
                raise ForkyardError("the file read back differs from the file written")
    return {"file_write_64mb": Sample(write), "file_read_64mb": Sample(read)}


async def density(n: int | None, say: Say) -> dict[str, Sample]:
    wanted = n or DENSITY
    sandboxes: list[AsyncSandbox] = []
    at_once = asyncio.Semaphore(4)

    async def one(fy: AsyncForkyard) -> None:
        async with at_once:
            sandboxes.append(await fy.sandboxes.create(idle_timeout_s=None))
            say(f"density: {len(sandboxes)} of {wanted} alive")

    async def answers(sandbox: AsyncSandbox) -> bool:
        async with at_once:
            return (await sandbox.exec(["echo", sandbox.id])).stdout.strip() == sandbox.id

    async with warm_daemon(say, **NO_POOL) as fy:
        await asyncio.gather(*(one(fy) for _ in range(wanted)))
        await asyncio.sleep(2)
        pss = [(await sandbox.usage()).pss_mib for sandbox in sandboxes]
        say("density: an exec in each")
        alive = sum(await asyncio.gather(*(answers(sandbox) for sandbox in sandboxes)))
    return {"idle_pss_mib": Sample(pss, "MiB"), "alive_at_once": Sample([alive], "sandboxes")}


async def dirty(sandbox: AsyncSandbox, mib: int, *, writing: bool = False) -> None:
    """A process that holds so much memory of its own, all of it written; `writing` goes on over it for ever."""
    program = (
        f"import time; x = bytearray({mib} << 20); x[::4096] = b'x' * len(x[::4096]); "
        "open('/dev/shm/dirty', 'w').close(); k = 0\n"
        + (
            "while True:\n k = k % 250 + 1\n for i in range(0, len(x), 4096): x[i] = k\n"
            if writing
            else "time.sleep(1e6)"
        )
    )
    await sandbox.spawn(["python3", "-c", program])
    (await sandbox.exec("until [ -e /dev/shm/dirty ]; do sleep 0.1; done", timeout_s=120)).check()


async def fork(n: int | None, say: Say) -> dict[str, Sample]:
    paused, answers, execs, ten, pss = [], [], [], [], []
    async with warm_daemon(say, pool_size=0, pool_shells=2) as fy, await fy.sandboxes.create() as parent:
        await dirty(parent, 40)
        for i in range(n or 12):
            say(f"fork {i + 1}")
            await asyncio.sleep(1)  # the shells are ready again
            started = time.perf_counter()
            (outcome,) = await parent.fork(1, partial=True)
            answers.append((time.perf_counter() - started) * 1000)
            assert outcome.sandbox is not None
            await outcome.sandbox.exec("true")
            execs.append((time.perf_counter() - started) * 1000)
            paused.append(outcome.paused_ms)
            await outcome.sandbox.delete()
        for i in range(3):
            say(f"fork of ten {i + 1}")
            await asyncio.sleep(1)
            started = time.perf_counter()
            children = await parent.fork(10)
            ten.append((time.perf_counter() - started) * 1000)
            await asyncio.sleep(2)
            pss += [(await child.usage()).pss_mib for child in children]
            await asyncio.gather(*(child.delete() for child in children))
        clean = await _fork_beside_clean_ram(fy, parent, n or 12, say)
    return {
        "fork_clean_ram": Sample([clean], "×"),
        "fork_parent_pause": Sample(paused),
        "fork_child_answers": Sample(answers),
        "fork_child_exec": Sample(execs),
        "fork10_all_answer": Sample(ten),
        "sibling_pss_mib": Sample(pss, "MiB"),
    }


async def _fork_beside_clean_ram(fy: AsyncForkyard, small: AsyncSandbox, n: int, say: Say) -> float:
    """How much longer a fork takes in a guest with more memory that nobody has written."""
    answers: dict[str, list[float]] = {}
    async with await fy.sandboxes.create(memory_mib=1024, timeout_s=600) as large:
        await dirty(large, 40)
        for i in range(n + 1):
            for parent in (small, large):  # by turns: what else goes on is the same for both
                say(f"fork of a small and a large guest {i + 1}")
                await asyncio.sleep(1)
                started = time.perf_counter()
                (child,) = await parent.fork(1)
                if i:  # the first fork of a guest prepares shells for the next
                    answers.setdefault(parent.id, []).append((time.perf_counter() - started) * 1000)
                await child.delete()
    return Sample(answers[large.id]).p50 / Sample(answers[small.id]).p50


async def _create_from_snapshot(fy: AsyncForkyard, n: int, say: Say) -> float:
    """How much longer than from a template, by turns."""
    async with await fy.sandboxes.create() as origin:
        await dirty(origin, 40)
        taken = await origin.snapshot()
    plain: list[float] = []
    from_snapshot: list[float] = []
    for i in range(n):
        for values, wish in ((plain, None), (from_snapshot, taken)):
            say(f"create, plain and from a snapshot {i + 1}")
            started = time.perf_counter()
            sandbox = await fy.sandboxes.create(snapshot=wish)
            values.append((time.perf_counter() - started) * 1000)
            await sandbox.delete()
    await taken.delete()
    return Sample(from_snapshot).p50 / Sample(plain).p50


async def pause(n: int | None, say: Say) -> dict[str, Sample]:
    hot_pause, hot_resume, cold_pause, cold_resume = [], [], [], []
    async with warm_daemon(say, pool_size=0, pool_shells=2) as fy, await fy.sandboxes.create() as sandbox:
        await dirty(sandbox, 40)
        for i in range(n or 12):
            say(f"pause and resume {i + 1}")
            await asyncio.sleep(1)  # the shells are ready again
            hot_pause.append(await timed(sandbox.pause()))
            hot_resume.append(await timed(sandbox.resume()))
            await asyncio.sleep(0.5)
            cold_pause.append(await timed(sandbox.pause(durable=True)))
            await asyncio.sleep(1)
            cold_resume.append(await timed(sandbox.resume()))
            (await sandbox.exec("true")).check()
    return {
        "pause_hot": Sample(hot_pause),
        "resume_hot": Sample(hot_resume),
        "pause_cold": Sample(cold_pause),
        "resume_cold": Sample(cold_resume),
    }


async def snapshot(n: int | None, say: Say) -> dict[str, Sample]:
    values = []
    async with warm_daemon(say, **NO_POOL) as fy:
        say("snapshot: a guest with 400 MB dirty, always writing")
        async with await fy.sandboxes.create(memory_mib=1024, timeout_s=600) as sandbox:
            await dirty(sandbox, 400, writing=True)
            for i in range(n or 5):
                say(f"snapshot {i + 1}")
                taken = await sandbox.snapshot()
                values.append(taken.info.paused_ms)
                await taken.delete()
        ratio = await _create_from_snapshot(fy, n or 10, say)
    return {"snapshot_pause_400mb": Sample(values), "create_snapshot": Sample([ratio], "×")}


async def pool(n: int | None, say: Say) -> dict[str, Sample]:
    creates, execs = [], []
    async with warm_daemon(say, pool_size=2, pool_shells=0) as fy:
        for i in range(n or 10):
            say(f"create from the pool {i + 1}")
            await asyncio.sleep(REFILLED_S)
            started = time.perf_counter()
            sandbox = await fy.sandboxes.create()
            creates.append((time.perf_counter() - started) * 1000)
            execs.append(await timed(sandbox.exec("true")))
            await sandbox.delete()
    return {"create_pool": Sample(creates), "create_pool_exec": Sample(execs)}


async def burst(n: int | None, say: Say) -> dict[str, Sample]:
    values = []
    async with warm_daemon(say, **NO_POOL) as fy:
        for i in range(n or 2):
            say(f"burst {i + 1}: 20 creates at once")
            sandboxes: list[AsyncSandbox] = []

            async def one(made: list[AsyncSandbox] = sandboxes) -> None:
                made.append(await fy.sandboxes.create())

            values += await asyncio.gather(*(timed(one()) for _ in range(20)))
            await asyncio.gather(*(sandbox.delete() for sandbox in sandboxes))
    return {"burst20_create": Sample(values)}


MEASURES: dict[str, Bench] = {
    "create": create,
    "exec": exec_,
    "files": files,
    "density": density,
    "fork": fork,
    "pause": pause,
    "resume": pause,
    "snapshot": snapshot,
    "pool": pool,
    "burst": burst,
    "net": net,
    "git": git,
    "volumes": specs,
    "spec": specs,
    "compat": compat,
}
