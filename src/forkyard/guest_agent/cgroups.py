"""One cgroup (v2) per exec, so that all it started can be found and killed. Without cgroups the process group must do.

They are below a cgroup of our own and not below the agent's unit: that one would then have controllers *and* processes
in inner nodes, and systemd could not put a restarted agent back into it while execs run.
"""

from __future__ import annotations

import os
import signal

from .loop import log

_PIDS_SHARE = 0.5  # of all processes the machine can have: a fork bomb leaves room for the rest


class Cgroup:
    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def procs(self) -> str:
        """The file a process writes 0 to, to join."""
        return f"{self.path}/cgroup.procs"

    def pids(self) -> list[int]:
        try:
            with open(self.procs) as file:
                return [int(line) for line in file]
        except OSError:
            return []

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            try:
                _write(f"{self.path}/cgroup.kill", "1")
                return
            except OSError:
                pass  # before Linux 5.14
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def remove(self) -> bool:
        """True if it is gone; False while processes are left in it."""
        try:
            os.rmdir(self.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


class Cgroups:
    def __init__(self, parent: str) -> None:
        self.parent = self._parent = parent
        self._pids_max = ""
        self._orphans: list[Cgroup] = []  # of an agent before this one; what runs in them goes on
        self.usable = self._set_up()

    def _set_up(self) -> bool:
        try:
            os.makedirs(self._parent, exist_ok=True)
            os.stat(f"{self._parent}/cgroup.procs")
            with os.scandir(self._parent) as entries:
                self._orphans = [Cgroup(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            log(f"no cgroups, execs are killed by process group: {error}")
            return False
        try:
            for node in (os.path.dirname(self._parent), self._parent):
                _write(f"{node}/cgroup.subtree_control", "+pids")
            self._pids_max = str(int(_PIDS_SHARE * min(_number("pid_max"), _number("threads-max"))))
        except OSError as error:
            log(f"no limit on the number of processes: {error}")
        return True

    def create(self, name: str) -> Cgroup | None:
        if not self.usable:
            return None
        self._orphans = [orphan for orphan in self._orphans if not orphan.remove()]
        path = f"{self._parent}/{name}"
        os.mkdir(path)
        if self._pids_max:
            _write(f"{path}/pids.max", self._pids_max)
        return Cgroup(path)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _number(name: str) -> int:
    with open(f"/proc/sys/kernel/{name}") as file:
        return int(file.read())
