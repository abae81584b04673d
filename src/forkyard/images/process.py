"""Programs run by the image builder.

Owns: starting one, reading its output line by line, and making sure that it and all it started end when the builder
ends, however that happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections import deque
from collections.abc import Callable, Mapping

from forkyard.errors import ImageBuildFailed

_LINE_LIMIT_BYTES = 4 << 20
_TAIL_LINES = 25

# Dies with the thread that started it, even by SIGKILL. The umask is ours, not that of whoever runs us: modes end up in
# the image.
_TIED = ("sh", "-c", 'umask 022 && exec setpriv --pdeathsig KILL -- "$@"', "sh")
# A pid namespace dies with its first process. The mount namespace keeps what is mounted in a half-built root (among it
# /dev) out of reach of whoever deletes that root.
_CONTAINED = (
    *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--"),
)


async def run(
    *argv: str,
    timeout_s: float,
    on_line: Callable[[str], None] | None = None,
    contained: bool = False,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a program to its end and return what it printed.

    `on_line` sees its stdout and stderr as they come, and only the tail is returned. `contained` is for programs that
    start others and mount file systems.
    """
    if shutil.which(argv[0]) is None:
        raise ImageBuildFailed(f"`{argv[0]}` is not installed on this host. `make setup` installs all that is needed.")
    process = await asyncio.create_subprocess_exec(
        *_TIED,
        *(_CONTAINED if contained else ()),
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT if on_line else asyncio.subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
        limit=_LINE_LIMIT_BYTES,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            if on_line:
                output, errors = await _follow(process, on_line), ""
            else:
                stdout, stderr = await process.communicate()
                output, errors = stdout.decode(errors="replace"), stderr.decode(errors="replace")
            code = await process.wait()
    except TimeoutError:
        raise ImageBuildFailed(f"`{argv[0]}` was not done after {timeout_s:.0f} s and was ended.") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if code:
        tail = "\n".join((errors or output).splitlines()[-_TAIL_LINES:])
        raise ImageBuildFailed(f"`{' '.join(argv[:3])} …` failed with status {code}:\n{tail}", status=code)
    return output


async def _follow(process: asyncio.subprocess.Process, on_line: Callable[[str], None]) -> str:
    assert process.stdout is not None
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    async for raw in process.stdout:
        line = raw.decode(errors="replace").rstrip()
        tail.append(line)
        on_line(line)
    return "\n".join(tail)
