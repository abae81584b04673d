"""Git: clones beside `git daemon`'s, commits through the API, and many pushes at once. With the real git client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from forkyard import AsyncForkyard, AsyncRepo
from forkyard.bench import yard
from forkyard.bench.figures import Sample
from forkyard.errors import HostFailure

Say = Callable[[str], None]

FILES = 10_000
COMMITS = 2_000
TO_MANY = 50
TO_ONE = 20
COMMIT_FILES = 10
CLIENT_S = 600.0


async def git(n: int | None, say: Say) -> dict[str, Sample]:
    scratch = Path(tempfile.mkdtemp(prefix="fyg-", dir="/var/tmp"))
    try:
        async with yard.daemon(pool_size=0, pool_shells=0) as fy:
            bench = _Bench(fy, scratch, say)
            commits = await bench.commits(n or 50)
            ratio = await bench.clones(n or 5)
            lost = await bench.pushes()
    finally:
        await asyncio.to_thread(shutil.rmtree, scratch, True)
    return {
        "git_clone_ratio": Sample([ratio], "×"),
        "git_commit_10_files": Sample(commits),
        "git_pushes_lost": Sample([float(lost)], "pushes"),
    }


class _Bench:
    def __init__(self, fy: AsyncForkyard, scratch: Path, say: Say) -> None:
        self._fy = fy
        self._scratch = scratch
        self._say = say

    async def commits(self, n: int) -> list[float]:
        """Each changes ten files of a repository that has a thousand."""
        repo = await self._fy.git.create(files={f"d{i % 50}/f{i}.txt": f"{i}\n" for i in range(1000)})
        values = []
        for i in range(n):
            self._say(f"git: commit {i + 1}")
            files = {f"d{f}/f{f}.txt": f"{i} {f}\n" for f in range(COMMIT_FILES)}
            started = time.perf_counter()
            await repo.commit(f"commit {i}", files)
            values.append((time.perf_counter() - started) * 1000)
        return values

    async def clones(self, n: int) -> float:
        """How many times longer a clone takes here than from `git daemon`, both of the same packed repository."""
        self._say(f"git: making {FILES} files and {COMMITS} commits")
        source = self._scratch / "source.git"
        await self._git("init", "--quiet", "--bare", "--initial-branch=main", str(source))
        await self._git("fast-import", "--quiet", cwd=source, feed=_history())
        await self._git("gc", "--quiet", cwd=source)
        repo = await self._fy.git.create("bench-clone")
        url = (await repo.token()).clone_url
        self._say("git: pushing it")
        await self._git("push", "--quiet", url, "main", cwd=source)
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        async with self._git_daemon() as plain:
            for i in range(n + 1):
                for name, address in (("ours", url), ("theirs", f"{plain}/source.git")):
                    self._say(f"git: clone {i + 1}, {name}")
                    target = self._scratch / "clone"
                    started = time.perf_counter()
                    await self._git("clone", "--quiet", address, str(target))
                    if i:  # the first warms the caches
                        times[name].append(time.perf_counter() - started)
                    await asyncio.to_thread(shutil.rmtree, target)
        return Sample(times["ours"]).p50 / Sample(times["theirs"]).p50

    async def pushes(self) -> int:
        """How many of all pushes are not there afterwards. Damage counts as all of them."""
        self._say(f"git: {TO_MANY} pushes to {TO_MANY} repositories")
        many = [await self._fy.git.create(f"bench-push-{i}") for i in range(TO_MANY)]
        one = await self._fy.git.create("bench-push-one")
        jobs = [(repo, f"many-{i}") for i, repo in enumerate(many)] + [(one, f"one-{i}") for i in range(TO_ONE)]
        works = [await self._prepared(repo, branch) for repo, branch in jobs]
        for some in (works[:TO_MANY], works[TO_MANY:]):
            self._say(f"git: {len(some)} pushes at once")
            pushing = (self._git("push", "--quiet", url, "HEAD", cwd=path) for path, url, _, _ in some)
            await asyncio.gather(*pushing, return_exceptions=True)
        lost = 0
        for repo, branches in [(repo, [f"many-{i}"]) for i, repo in enumerate(many)] + [
            (one, [f"one-{i}" for i in range(TO_ONE)])
        ]:
            self._say(f"git: checking {repo.name}")
            there = {branch.name: branch.sha for branch in await repo.branches()}
            expected = {branch: sha for _, _, branch, sha in works if branch in branches}
            lost += sum(there.get(branch) != sha for branch, sha in expected.items())
            if not await self._whole(repo):
                return len(jobs)
        return lost

    async def _prepared(self, repo: AsyncRepo, branch: str) -> tuple[Path, str, str, str]:
        path = self._scratch / branch
        url = (await repo.token()).clone_url
        await self._git("init", "--quiet", f"--initial-branch={branch}", str(path))
        await asyncio.to_thread((path / "data").write_bytes, os.urandom(100_000))
        await self._git("add", "-A", cwd=path)
        await self._git("commit", "--quiet", "-m", branch, cwd=path)
        return path, url, branch, (await self._git("rev-parse", "HEAD", cwd=path)).strip()

    async def _whole(self, repo: AsyncRepo) -> bool:
        target = self._scratch / "mirror"
        try:
            await self._git("clone", "--quiet", "--mirror", (await repo.token()).clone_url, str(target))
            await self._git("fsck", "--full", "--strict", cwd=target)
        except HostFailure:
            return False
        finally:
            await asyncio.to_thread(shutil.rmtree, target, True)
        return True

    @contextlib.asynccontextmanager
    async def _git_daemon(self) -> AsyncIterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *("git", "daemon", "--export-all", f"--base-path={self._scratch}", "--reuseaddr"),
            *("--listen=127.0.0.1", f"--port={port}"),
            env=_env(self._scratch),
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(10):
                while True:
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.close()
                        break
                    await asyncio.sleep(0.05)
            yield f"git://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, 15)
            await process.wait()

    async def _git(self, *args: str, cwd: Path | None = None, feed: Iterator[bytes] | None = None) -> str:
        process = await asyncio.create_subprocess_exec(
            "git",
            *args,
            cwd=cwd or self._scratch,
            env=_env(self._scratch),
            stdin=asyncio.subprocess.PIPE if feed else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        if feed is not None and process.stdin is not None:
            for piece in feed:
                process.stdin.write(piece)
                await process.stdin.drain()
            process.stdin.close()
            process.stdin.close()
        async with asyncio.timeout(CLIENT_S):
            out, err = await process.communicate()
        if process.returncode:
            raise HostFailure(f"git {args[0]} failed: {err.decode('utf-8', 'replace').strip()}")
        return out.decode()


def _history() -> Iterator[bytes]:
    """For `git fast-import`: the first commit has all files, each later one changes five of them."""
    for number in range(COMMITS):
        message = f"commit {number}"
        yield f"commit refs/heads/main\ncommitter A <a@b> {1700000000 + number} +0000\n".encode()
        yield f"data {len(message)}\n{message}\n".encode()
        changed = range(FILES) if number == 0 else ((number * 5 + i) * 7919 % FILES for i in range(5))
        for file in changed:
            content = f"file {file}\n" + "".join(f"line {line} of {file} in {number}\n" for line in range(20))
            yield f"M 100644 inline dir{file % 100}/sub{file % 10}/file{file}.txt\ndata {len(content)}\n{content}\n".encode()
        yield b"\n"


def _env(home: Path) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": str(home),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_AUTHOR_NAME": "Bench",
        "GIT_AUTHOR_EMAIL": "bench@forkyard.invalid",
        "GIT_COMMITTER_NAME": "Bench",
        "GIT_COMMITTER_EMAIL": "bench@forkyard.invalid",
    }
