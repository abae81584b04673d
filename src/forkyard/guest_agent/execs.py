"""Execs: one process and all it starts. Owns their life, their output, and the records of those that ended.

An exec knows nothing of the channel: readers (`Attachment`) come and go, and it goes on without them.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import termios
import time

from . import accounts
from .attachment import Attachment
from .cgroups import Cgroup, Cgroups
from .failures import Failure
from .loop import HUP, IN, Loop, Timer
from .output import Output
from .pipes import Inlet
from .spawn import Started, explain, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: How far a reader may be behind before the process is held back, and how much is kept for later ones.
KEEP_BYTES = 1 << 20
_KEEP_WHEN_SHORT_BYTES = 128 << 10
_READ_BYTES = 256 << 10
#: Reads are at least this far apart. The agent is woken by the first bytes a program writes; reading those at once,
#: each time, would turn a flood into a million tiny frames.
_READ_PAUSE_S = 0.003
_DRAIN_READS = 32  # more than a pipe holds: what comes after that was written by somebody else
#: How long the end waits for output when something the process left behind still holds its pipe.
_GRACE_S = 0.2
_KEEP_ENDED = 64
_KEEP_ENDED_S = 600.0
_MAX_RUNNING = 4096
_SHOWN_COMMAND = 4096
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


class ExecSpec:
    """What to run; made from the arguments of a request."""

    __slots__ = (
        "account",
        "argv",
        "cols",
        "command",
        "cwd",
        "env",
        "label",
        "plain",
        "pty",
        "rows",
        "stdin",
        "timeout_s",
        "trace_id",
    )

    argv: list[str]
    plain: list[str] | None
    command: str | list[str]
    cwd: str
    env: dict[str, str]
    account: accounts.Account
    timeout_s: float | None
    stdin: bool
    pty: bool
    rows: int
    cols: int
    label: str | None
    trace_id: str | None


class Exec:
    def __init__(self, exec_id: str, spec: ExecSpec, registry: Execs) -> None:
        self.id = exec_id
        self._spec = spec
        self.trace_id = spec.trace_id
        self._registry = registry
        self._loop = registry.loop
        self.output = Output()
        self.attachments: list[Attachment] = []
        self.running = True
        self.ended_at = 0.0
        self.cgroup: Cgroup | None = None
        self._process: Started | None = None
        self._exit_status: int | None = None
        self._timed_out = False
        self._duration_ms: float | None = None
        self._sources: dict[int, int] = {}  # descriptor -> stream; open ends of its output
        self._held_back = False
        self._read_at = 0.0
        self._master = -1
        self.inlet: Inlet | None = None
        self._timer: Timer | None = None
        self._grace: Timer | None = None
        self._started_at_ns = time.time_ns()
        self._started_at = time.monotonic()

    # ── starting ─────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, report: Callable[[Failure | None], object]) -> None:
        """Start it; `report` is called when the program runs, or with why it does not."""
        spec = self._spec
        self.cgroup = self._registry.cgroups.create(f"exec-{self.id}")
        ours: list[int] = []
        theirs: list[int] = []
        try:
            stdin = self._open_streams(ours, theirs)
            self._process = spawn(
                spec.argv,
                env=spec.env,
                cwd=spec.cwd,
                account=spec.account,
                stdin=stdin,
                stdout=theirs[0],
                stderr=theirs[-1],
                cgroup=self.cgroup,
                terminal=spec.pty,
                plain=spec.plain,
            )
        except BaseException:
            for fd in ours:
                os.close(fd)
            if self.cgroup is not None:
                self.cgroup.remove()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self._sources = dict.fromkeys(ours[:1], 0) | (dict.fromkeys(ours[1:2], 1) if not spec.pty else {})
        if spec.pty:
            self._master = ours[0]
            self.inlet = Inlet(self._loop, os.dup(self._master))
        elif spec.stdin:
            self.inlet = Inlet(self._loop, ours[2])
        self._loop.watch(self._process.report, IN, lambda _: self._on_report(report))

    def _open_streams(self, ours: list[int], theirs: list[int]) -> int | None:
        """Fill in ours as [stdout, stderr, stdin], theirs as [stdout, …, stderr]; a PTY is one for all. Returns their
        stdin."""
        spec = self._spec
        if spec.pty:
            master, slave = os.openpty()
            ours.append(master)
            theirs.append(slave)
            os.set_blocking(master, False)
            _set_size(master, spec.rows, spec.cols)
            os.fchown(slave, spec.account.uid, -1)
            return slave
        for _ in range(2):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read_end, False)
            ours.append(read_end)
            theirs.append(write_end)
            try:
                fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _READ_BYTES)
            except OSError:
                pass  # the user's share of pipe memory is used up
        if not spec.stdin:
            return None
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write_end, False)
        ours.append(write_end)
        theirs.insert(1, read_end)
        return read_end

    def _on_report(self, report: Callable[[Failure | None], object]) -> None:
        assert self._process is not None
        problem = os.read(self._process.report, 2048)
        self._loop.unwatch(self._process.report)
        os.close(self._process.report)
        if problem:
            os.waitpid(self._process.pid, 0)
            os.close(self._process.pidfd)
            self._close_ends()
            self.running = False
            self._registry.forget(self)
            report(explain(problem))
            return
        self._listen()
        self._loop.watch(self._process.pidfd, IN, lambda _: self._on_exit())
        if self._spec.timeout_s is not None:
            self._timer = self._loop.later(self._spec.timeout_s, self._on_timeout)
        report(None)

    # ── output ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _listen(self) -> None:
        for fd in self._sources:
            if not self._held_back and not self._loop.watching(fd):
                self._loop.watch(fd, IN, self._reader(fd))

    def _reader(self, fd: int) -> Callable[[int], None]:
        return lambda events: self._on_readable(fd, events)

    def _on_readable(self, fd: int, events: int) -> None:
        if self._must_hold_back():
            self._held_back = True
            for source in self._sources:
                self._loop.unwatch(source)
            return
        if not self._spec.pty and self._loop.now() - self._read_at < _READ_PAUSE_S:
            self._loop.unwatch(fd)
            self._loop.later(_READ_PAUSE_S, self._listen)
            return
        self._read_at = self._loop.now()
        if self._read(fd) is None and events & HUP:
            self._close_source(fd)  # a PTY whose last user left says HUP and, read, EIO or nothing

    def _read(self, fd: int) -> int | None:
        """Bytes read; 0 if the end was reached; None if there is nothing now."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""  # EIO: the last user of a PTY is gone
        if not data:
            self._close_source(fd)
            return 0
        self._registry.add_output(self, self._sources[fd], data)
        for attachment in self.attachments:
            attachment.wake()
        return len(data)

    def _must_hold_back(self) -> bool:
        return bool(self.attachments) and self.output.position - self._slowest() >= KEEP_BYTES

    def _slowest(self) -> int:
        return min((attachment.position for attachment in self.attachments), default=self.output.position)

    def trim(self, limit: int) -> None:
        self.output.trim(limit, self._slowest())

    def reader_moved(self) -> None:
        """A reader took something, or left: perhaps the process can go on."""
        if self._held_back and not self._must_hold_back():
            self._held_back = False
            self._listen()
            if self._exit_status is not None:
                self._drain()

    def _close_source(self, fd: int) -> None:
        if self._sources.pop(fd, None) is None:
            return
        self._loop.unwatch(fd)
        if fd == self._master:
            self._master = -1
        os.close(fd)
        if self._exit_status is not None and not self._sources:
            self._end()

    def _close_ends(self) -> None:
        for fd in list(self._sources):
            self._loop.unwatch(fd)
            os.close(fd)
        self._sources.clear()
        self._master = -1
        if self.inlet is not None:
            self.inlet.close()

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_timeout(self) -> None:
        self._timed_out = True
        self.signal(signal.SIGKILL, tree=True)

    def _on_exit(self) -> None:
        assert self._process is not None
        pid, status = os.waitpid(self._process.pid, os.WNOHANG)
        if pid == 0:
            return
        self._exit_status = status
        self._duration_ms = (time.monotonic() - self._started_at) * 1000
        self._loop.unwatch(self._process.pidfd)
        os.close(self._process.pidfd)
        if self._timer is not None:
            self._timer.cancel()
        self._drain()

    def _drain(self) -> None:
        """All that the first process wrote is in the pipes by now: read it, and hardly wait for those left behind."""
        for fd in list(self._sources):
            for _ in range(_DRAIN_READS):
                if fd not in self._sources or self._must_hold_back() or not self._read(fd):
                    break
        if not self._sources:
            self._end()
        elif not self._held_back and not self._must_hold_back() and self._grace is None:
            self._grace = self._loop.later(_GRACE_S, self._end)

    def _end(self) -> None:
        if not self.running:
            return
        self.running = False
        self.ended_at = time.monotonic()
        if self._grace is not None:
            self._grace.cancel()
        if self.inlet is not None:
            self.inlet.close()
        for attachment in list(self.attachments):
            attachment.wake()
        self._registry.ended(self)

    # ── what can be asked ────────────────────────────────────────────────────────────────────────────────────────

    def signal(self, number: int, *, tree: bool) -> None:
        if tree and self.cgroup is not None:
            if self._exit_status is not None and not self.cgroup.pids():
                raise Failure("conflict", f"exec {self.id} has ended")
            self.cgroup.signal(number)
            return
        if self._exit_status is not None or self._process is None:
            raise Failure("conflict", f"exec {self.id} has ended")
        if tree:
            os.killpg(self._process.pid, number)
        else:
            signal.pidfd_send_signal(self._process.pidfd, number)

    def resize(self, rows: int, cols: int) -> None:
        if not self._spec.pty:
            raise Failure("conflict", f"exec {self.id} has no terminal")
        if self._master < 0 or not self.running:
            raise Failure("conflict", f"exec {self.id} has ended")
        _set_size(self._master, rows, cols)

    def close_stdin(self) -> None:
        if self.inlet is not None:
            if self._spec.pty:
                self.inlet.write(b"\x04", None)  # end of file, as typed
            else:
                self.inlet.finish()

    def outcome(self) -> dict[str, Any]:
        status = self._exit_status
        killed = status is not None and os.WIFSIGNALED(status)
        return {
            "exit_code": None if status is None or killed else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if status is not None and killed else None,
            "timed_out": self._timed_out,
            "duration_ms": self._duration_ms,
        }

    def record(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "command": _shown(self._spec.command),
            "cwd": self._spec.cwd,
            "user": self._spec.account.name,
            "pty": self._spec.pty,
            "label": self._spec.label,
            "trace_id": self.trace_id,
            "running": self.running,
            "pid": self._process.pid if self._process is not None else None,
            "started_at_ns": self._started_at_ns,
            "stdout_bytes": self.output.totals[0],
            "stderr_bytes": self.output.totals[1],
            **self.outcome(),
        }

    def dispose(self) -> None:
        """The record is dropped: nobody can read what may still be written."""
        self._close_ends()


class Execs:
    """All execs that run, and the last that ended."""

    def __init__(self, loop: Loop, cgroups: Cgroups) -> None:
        self.loop = loop
        self.cgroups = cgroups
        self._all: dict[str, Exec] = {}
        self._output_bytes = 0
        # Output is kept in the guest's own memory, of which it must stay a small part.
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._budget_bytes = max(4 << 20, min(64 << 20, memory_bytes // 32))

    def create(self, exec_id: str | None, spec: ExecSpec) -> Exec:
        exec_id = exec_id or os.urandom(8).hex()
        if not _ID.match(exec_id):
            raise Failure(
                "invalid_request", f"an exec id has 1 to 64 letters, digits, `_` or `-`; this is {exec_id!r:.80}"
            )
        if exec_id in self._all:
            raise Failure("conflict", f"there is an exec {exec_id!r} already")
        self._clean_up()
        if len(self._all) >= _MAX_RUNNING:
            raise Failure("no_capacity", f"{_MAX_RUNNING} execs are running")
        created = Exec(exec_id, spec, self)
        self._all[exec_id] = created
        return created

    def get(self, exec_id: str) -> Exec:
        found = self._all.get(exec_id)
        if found is None:
            raise Failure(
                "exec_not_found", f"there is no exec {exec_id!r:.80} (ended ones are remembered for a while only)"
            )
        return found

    def trace_id(self, exec_id: str) -> str | None:
        found = self._all.get(exec_id)
        return None if found is None else found.trace_id

    def all(self) -> list[Exec]:
        self._clean_up()
        return list(self._all.values())

    def add_output(self, source: Exec, stream: int, data: bytes) -> None:
        before = source.output.size
        source.output.add(stream, data)
        self._output_bytes += source.output.size - before
        if self._output_bytes > self._budget_bytes:
            self._clean_up()
        short = self._output_bytes > self._budget_bytes
        before = source.output.size
        source.trim(_KEEP_WHEN_SHORT_BYTES if short else KEEP_BYTES)
        self._output_bytes += source.output.size - before

    def ended(self, ended: Exec) -> None:
        if ended.cgroup is not None and ended.cgroup.remove():
            ended.cgroup = None
        self._clean_up()

    def forget(self, gone: Exec) -> None:
        if self._all.pop(gone.id, None) is not None:
            self._output_bytes -= gone.output.size
            if gone.cgroup is not None:
                gone.cgroup.remove()

    def forget_ended(self) -> None:
        for item in [item for item in self._all.values() if not item.running]:
            item.dispose()
            self.forget(item)

    def _clean_up(self) -> None:
        """Forget the oldest ended execs that are too many, old or large. One with processes left stays known."""
        ended = [item for item in self._all.values() if not item.running and not item.attachments]
        surplus = len(ended) - _KEEP_ENDED
        too_old = time.monotonic() - _KEEP_ENDED_S
        for item in sorted(ended, key=lambda item: item.ended_at):
            if surplus <= 0 and item.ended_at > too_old and self._output_bytes <= self._budget_bytes:
                return
            if item.cgroup is None or item.cgroup.remove():
                item.cgroup = None
                item.dispose()
                self.forget(item)
                surplus -= 1


def _set_size(terminal: int, rows: int, cols: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def _shown(command: str | list[str]) -> str | list[str]:
    if isinstance(command, str):
        return command[:_SHOWN_COMMAND]
    shown: list[str] = []
    left = _SHOWN_COMMAND
    for word in command:
        shown.append(word[:left])
        left -= len(word) + 1
        if left <= 0:
            break
    return shown
