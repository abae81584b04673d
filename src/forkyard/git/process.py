"""Running git: with a configuration of our own and nothing else's, with deadlines, and with bounded output.

Owns: the environment of every git process (no system or user configuration, no prompts, no hooks but ours, only
protocols that reach over the network), and how many run at once. Never does: HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from forkyard.errors import HostFailure, InternalError, OperationTimeout

SHORT_S = 30.0
MAX_OUTPUT_BYTES = 64 * 2**20
#: Short ones. Transfers are counted by whoever starts them.
AT_ONCE = 8
_GRACE_S = 5.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_CONFIG = """\
[safe]
    directory = *
[init]
    defaultBranch = main
[user]
    name = Forkyard
    email = git@forkyard.invalid
[core]
    hooksPath = {hooks}
    fsync = all
    protectHFS = true
    protectNTFS = true
    bigFileThreshold = 32m
    logAllRefUpdates = false
[transfer]
    fsckObjects = true
    unpackLimit = 1
    hideRefs = refs/forkyard
[fsck]
    zeroPaddedFilemode = ignore
    missingSpaceBeforeDate = ignore
    badTimezone = ignore
[receive]
    autogc = false
    advertiseAtomic = true
    keepAlive = 5
[fetch "fsck"]
    zeroPaddedFilemode = ignore
    missingSpaceBeforeDate = ignore
    badTimezone = ignore
[receive "fsck"]
    zeroPaddedFilemode = ignore
    missingSpaceBeforeDate = ignore
    badTimezone = ignore
[uploadpack]
    allowFilter = true
    allowAnySHA1InWant = true
[http]
    receivepack = true
    lowSpeedLimit = 1
    lowSpeedTime = 60
[gc]
    auto = 2000
    autoPackLimit = 40
    autoDetach = false
    pruneExpire = 2.weeks.ago
[repack]
    writeBitmaps = true
[pack]
    threads = 2
    windowMemory = 128m
    deltaCacheSize = 64m
[protocol]
    version = 2
[advice]
    detachedHead = false
"""

#: What a push changed, for those who want to know. Git gives a line per ref.
_POST_RECEIVE = '#!/bin/sh\n[ -z "$FORKYARD_RECEIVED" ] || exec cat > "$FORKYARD_RECEIVED"\n'


@dataclass(frozen=True)
class Done:
    code: int
    stdout: bytes
    stderr: bytes
    #: There was more than was wanted.
    cut: bool = False

    @property
    def error(self) -> str:
        return self.stderr.decode("utf-8", "replace").strip()[-2000:]


class Git:
    """One per daemon. `root` is where its configuration and hooks are."""

    def __init__(self, root: Path) -> None:
        self._config = root / "gitconfig"
        self._hooks = root / "hooks"
        self._turn = asyncio.Semaphore(AT_ONCE)

    def install(self) -> None:
        """Blocking, once at start."""
        self._hooks.mkdir(parents=True, exist_ok=True)
        self._config.write_text(_CONFIG.format(hooks=self._hooks))
        hook = self._hooks / "post-receive"
        hook.write_text(_POST_RECEIVE)
        hook.chmod(0o755)

    def env(self, extra: Mapping[str, str] | None = None, config: Mapping[str, str] | None = None) -> dict[str, str]:
        settings = dict(config or {})
        numbered = {f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(settings)}
        numbered |= {f"GIT_CONFIG_VALUE_{number}": value for number, value in enumerate(settings.values())}
        return {
            "PATH": _PATH,
            "HOME": "/nonexistent",
            "LC_ALL": "C.UTF-8",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": str(self._config),
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "/bin/false",
            "SSH_ASKPASS": "/bin/false",
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
            "GIT_ALLOW_PROTOCOL": "http:https:git:ssh",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_LITERAL_PATHSPECS": "0",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_CONFIG_COUNT": str(len(settings)),
            **numbered,
            **(extra or {}),
        }

    async def run(
        self,
        repo: Path,
        *args: str,
        stdin: bytes | IO[bytes] | None = None,
        ok: tuple[int, ...] = (0,),
        timeout_s: float = SHORT_S,
        max_bytes: int = MAX_OUTPUT_BYTES,
        may_cut: bool = False,
        env: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> Done:
        """To its end. `may_cut`: more output than `max_bytes` ends it, and is no error."""
        async with self._turn:
            done = await self._run(repo, args, stdin, timeout_s, max_bytes, env, prefix)
        if done.cut and not may_cut:
            raise InternalError(f"git {args[0]} gave more than {max_bytes} bytes")
        if done.code not in ok and not done.cut:
            raise HostFailure(f"git {args[0]} failed with {done.code}: {done.error or 'it said nothing'}")
        return done

    async def _run(
        self,
        repo: Path,
        args: tuple[str, ...],
        stdin: bytes | IO[bytes] | None,
        timeout_s: float,
        max_bytes: int,
        env: Mapping[str, str] | None,
        prefix: tuple[str, ...],
    ) -> Done:
        given = asyncio.subprocess.PIPE if isinstance(stdin, bytes) else (stdin or asyncio.subprocess.DEVNULL)
        async with self.process(repo, *args, stdin=given, env=env, prefix=prefix) as process:
            try:
                async with asyncio.timeout(timeout_s):
                    feeding = asyncio.create_task(_feed(process, stdin if isinstance(stdin, bytes) else None))
                    errors = asyncio.create_task(_read(process.stderr, 2**16))
                    try:
                        stdout, cut = await _read(process.stdout, max_bytes, stop=True)
                        if cut:
                            end(process, signal.SIGKILL)
                        code = await process.wait()
                        stderr, _ = await errors
                    finally:
                        for task in (feeding, errors):
                            task.cancel()
                        await asyncio.gather(feeding, errors, return_exceptions=True)
            except TimeoutError:
                raise OperationTimeout(f"git {args[0]} was not done after {timeout_s:.0f} s and was ended") from None
        return Done(code, stdout, stderr, cut)

    @contextlib.asynccontextmanager
    async def process(
        self,
        repo: Path,
        *args: str,
        stdin: int | IO[bytes] = asyncio.subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """It and what it started are gone when this is left."""
        try:
            process = await asyncio.create_subprocess_exec(
                *prefix,
                "git",
                *args,
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=repo,
                env=env or self.env({"GIT_DIR": str(repo)}),
                start_new_session=True,
                limit=2**20,
            )
        except OSError as error:
            raise HostFailure(f"git cannot be started: {error}; is it installed?") from error
        try:
            yield process
        finally:
            await ended(process)


def end(process: asyncio.subprocess.Process, number: int = signal.SIGTERM) -> None:
    """It and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        end(process)
        try:
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
        except TimeoutError:
            end(process, signal.SIGKILL)
            await process.wait()
    if process.stdin is not None:
        process.stdin.close()


async def _feed(process: asyncio.subprocess.Process, data: bytes | None) -> None:
    if process.stdin is None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        if data:
            process.stdin.write(data)
            await process.stdin.drain()
        process.stdin.close()


async def _read(stream: asyncio.StreamReader | None, most: int, *, stop: bool = False) -> tuple[bytes, bool]:
    """All of it, of which the first `most` bytes are kept; with `stop`, no more than these are read."""
    assert stream is not None
    kept = bytearray()
    cut = False
    while chunk := await stream.read(2**18):
        room = most - len(kept)
        kept += chunk[:room]
        cut = cut or len(chunk) > room
        if cut and stop:
            break
    return bytes(kept), cut
