"""A QEMU process: how it is started, watched and ended.

Owns: the launcher's command line, and a `pidfd` per process. A `pidfd` cannot come to mean another process, becomes
readable when the process ends, and works for processes that are not our children: VMs outlive the daemon, and the next
one must be able to watch them.
Never does: pipes to a VM. Its input and output are /dev/null, its errors go to a file, so nothing ends with the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Confinement:
    """What a VM's process is allowed to be. `jail.c` applies it."""

    uid: int
    directory: Path
    cgroup_entrances: Sequence[Path] = ()
    keep_fds: Sequence[int] = ()
    netns: Path | None = None  # None: a new one, with nothing in it
    tap: tuple[str, int] | None = None  # name of the tap in there, and as which descriptor it is passed
    file_size_bytes: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)


def jail_argv(jail: Path, confinement: Confinement, argv: Sequence[str]) -> list[str]:
    options: list[tuple[str, str]] = [
        ("--uid", str(confinement.uid)),
        ("--gid", str(confinement.uid)),
        ("--netns", str(confinement.netns or "new")),
        ("--chdir", str(confinement.directory)),
        ("--rlimit", "core=0"),
        ("--rlimit", "nofile=1024"),
        # If the host runs out of memory, a VM dies before the daemon does.
        ("--oom-score-adj", "500"),
        *(("--cgroup", str(path)) for path in confinement.cgroup_entrances),
        *(("--keep-fd", str(fd)) for fd in confinement.keep_fds),
        *(("--setenv", f"{name}={value}") for name, value in confinement.env.items()),
    ]
    if confinement.tap is not None:
        options.append(("--tap", f"{confinement.tap[0]}={confinement.tap[1]}"))
    if confinement.file_size_bytes is not None:
        options.append(("--rlimit", f"fsize={confinement.file_size_bytes}"))
    return [str(jail), *(word for option in options for word in option), "--", *argv]


def spawn(argv: Sequence[str], keep_fds: Sequence[int], log: Path) -> int:
    """Start the launcher; returns its pid, which becomes QEMU's. Blocks for about a millisecond."""
    with Path(os.devnull).open("r+b") as null, log.open("ab") as errors:
        return os.posix_spawn(
            argv[0],
            list(argv),
            {},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, null.fileno(), 0),
                (os.POSIX_SPAWN_DUP2, null.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, errors.fileno(), 2),
                # Onto itself: clears close-on-exec in the child only, so that no other child can inherit it.
                *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in keep_fds),
            ],
            setsigmask=[],
            setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
        )


@dataclass(frozen=True)
class Status:
    """How a process ended; both None if it was not our child, so that nobody told us."""

    code: int | None = None
    signal: int | None = None

    def __str__(self) -> str:
        if self.signal is not None:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(self.signal).name}"
            return f"was ended by signal {self.signal}"
        if self.code is not None:
            return f"exited with status {self.code}"
        return "is gone"


class Process:
    """Watches one process until it ends. Belongs to the loop it was made on."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd: int | None = pidfd
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Status] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._on_end)

    @classmethod
    def open(cls, pid: int) -> Self:
        """Raises ProcessLookupError if there is no such process."""
        return cls(pid, os.pidfd_open(pid))

    @property
    def ended(self) -> bool:
        return self._ended.done()

    @property
    def watched(self) -> bool:
        return self._pidfd is not None

    async def wait(self) -> Status:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching; the process goes on."""
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _on_end(self) -> None:
        assert self._pidfd is not None
        status = Status()
        with contextlib.suppress(ChildProcessError):
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if result is not None and result.si_code == os.CLD_EXITED:
                status = Status(code=result.si_status)
            elif result is not None:
                status = Status(signal=result.si_status)
        self.close()
        if not self._ended.done():
            self._ended.set_result(status)


def is_vm(pid: int, name: Sequence[str]) -> bool:
    """Whether this process is the QEMU (or still the launcher) that was started with these words on its command line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    wanted = [os.fsencode(word) for word in name]
    return any(words[at : at + len(wanted)] == wanted for at in range(len(words)))


def kill_now(pid: int, *, timeout_s: float) -> None:
    """Blocking: kill a process, wait until it is gone, and reap it if it was our child."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        with contextlib.suppress(ChildProcessError):  # not our child: its parent reaps it
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    finally:
        os.close(pidfd)
