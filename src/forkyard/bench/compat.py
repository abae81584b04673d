"""Clients of other services: a machine and its first command through their published packages, beside the same through our
own SDK, by turns.

Owns: the table of packages, how each is installed and asked. Which calls work is `tests/compat`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from forkyard import AsyncForkyard
from forkyard.bench import yard
from forkyard.bench.figures import Sample
from forkyard.errors import HostFailure

Say = Callable[[str], None]

INSTALL_S = 300.0
ROUND_S = 60.0
#: Until the pool is full again.
REFILL_S = 4.0

_FREESTYLE = """
import { createInterface } from 'node:readline'
import { Freestyle } from 'freestyle'
const client = new Freestyle()
for await (const _ of createInterface({ input: process.stdin })) {
  const began = performance.now()
  const { vm } = await client.vms.create()
  await vm.exec('true')
  const took = performance.now() - began
  await vm.delete()
  console.log(took)
}
"""
_E2B = """
import sys, time
import e2b
for _ in sys.stdin:
    began = time.perf_counter()
    made = e2b.Sandbox.create()
    made.commands.run("true")
    took = time.perf_counter() - began
    made.kill()
    print(took * 1000, flush=True)
"""


@dataclass(frozen=True)
class Package:
    """`urls`: the variables that say where the service is. `exec`: what its first command is, in our words."""

    service: Literal["freestyle", "e2b"]
    kind: Literal["npm", "pypi"]
    wanted: str
    program: str
    key: str
    urls: tuple[str, ...]
    exec: dict[str, Any]

    @property
    def figure(self) -> str:
        return f"{self.service}_create_ratio"


PACKAGES = (
    Package(
        "freestyle",
        "npm",
        "freestyle@0.1",
        _FREESTYLE,
        "FREESTYLE_API_KEY",
        ("FREESTYLE_API_URL",),
        {"command": "true"},
    ),
    Package(
        "e2b",
        "pypi",
        "e2b==2.*",
        _E2B,
        "E2B_API_KEY",
        ("E2B_API_URL", "E2B_SANDBOX_URL"),
        {"command": ["/bin/bash", "-l", "-c", "true"], "user": "user"},
    ),
)


async def compat(n: int | None, say: Say) -> dict[str, Sample]:
    found: dict[str, Sample] = {}
    async with yard.daemon() as fy:
        url = await _url(fy)
        for package in PACKAGES:
            say(f"compat: installing {package.wanted}")
            key = (await fy.keys.create(f"bench {package.service}", format=package.service)).key
            env = {package.key: key, **dict.fromkeys(package.urls, url)}
            async with _client(package, env) as theirs:
                found |= await _by_turns(fy, package, theirs, n or 10, say)
    return found


async def _by_turns(
    fy: AsyncForkyard, package: Package, theirs: asyncio.subprocess.Process, n: int, say: Say
) -> dict[str, Sample]:
    with_theirs: list[float] = []
    with_ours: list[float] = []
    for i in range(n + 1):
        say(f"compat: {package.service} and our own SDK {i}")
        await asyncio.sleep(REFILL_S)
        first = await _theirs_ms(theirs)
        await asyncio.sleep(REFILL_S)
        second = await _ours_ms(fy, package.exec)
        if i:  # the first of each warms what the rest find
            with_theirs.append(first)
            with_ours.append(second)
    sample = Sample(with_theirs)
    return {
        f"{package.service}_create_exec": sample,
        f"{package.service}_own_create_exec": Sample(with_ours),
        package.figure: Sample([sample.p50 / Sample(with_ours).p50], "×"),
    }


async def _ours_ms(fy: AsyncForkyard, command: dict[str, Any]) -> float:
    began = time.perf_counter()
    made = await fy.sandboxes.create()
    await made.exec(**command)
    took_ms = (time.perf_counter() - began) * 1000
    await made.delete()
    return took_ms


async def _theirs_ms(client: asyncio.subprocess.Process) -> float:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(b"\n")
    async with asyncio.timeout(ROUND_S):
        said = await client.stdout.readline()
    try:
        return float(said)
    except ValueError:
        raise HostFailure(f"the client ended without an answer: {said.decode(errors='replace')[:200]!r}") from None


async def _url(fy: AsyncForkyard) -> str:
    """Where the daemon listens: its previews are there too."""
    async with await fy.sandboxes.create() as sandbox:
        return f"http://127.0.0.1:{urlsplit(await sandbox.url(80)).port}"


@contextlib.asynccontextmanager
async def _client(package: Package, env: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    with tempfile.TemporaryDirectory(prefix="fyc-") as directory:
        command = await _installed(package, Path(directory))
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _installed(package: Package, home: Path) -> list[str]:
    """The command that runs its program."""
    if package.kind == "npm":
        program = home / "main.mjs"
        await _run(["npm", "install", "--prefix", str(home), "--silent", "--no-audit", "--no-fund", package.wanted])
        command = ["node", str(program)]
    else:
        program, python = home / "main.py", home / "venv" / "bin" / "python"
        await _run([sys.executable, "-m", "venv", str(home / "venv")])
        await _run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", package.wanted])
        command = [str(python), str(program)]
    program.write_text(package.program)
    return command


async def _run(argv: list[str]) -> None:
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    except FileNotFoundError:
        raise HostFailure(f"there is no {argv[0]} to install the clients with (Debian: apt install npm)") from None
    try:
        async with asyncio.timeout(INSTALL_S):
            _, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        raise HostFailure(f"{' '.join(argv[:3])} did not end within {INSTALL_S:.0f} s") from None
    if process.returncode:
        raise HostFailure(f"{' '.join(argv[:3])} failed: {errors.decode(errors='replace').strip()[-300:]}")
