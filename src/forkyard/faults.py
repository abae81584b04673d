"""Named steps of the verbs at which a test can hold the daemon, to kill it, or a hypervisor, exactly there.

Owns: the names. Costs nothing, and does nothing, unless the daemon was started with FORKYARD_FAULT_FILE. Never does: the
killing; a daemon that reaches the step that file names stops itself (SIGSTOP), and whoever wrote it does the rest.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

#: "verb.step", in the order in which they are reached. A test goes through all of them.
STEPS = (
    "capture.copied",  # the memory, while the machine runs on
    "capture.saved",  # the machine stands still; memory and devices are saved, its disk is not sealed
    "capture.sealed",  # it goes on, on its next disk
    "fork.recorded",  # the children are, as being created
    "fork.captured",
    "fork.child_answered",
    "fork.made",  # all machines of the children, before their records say so
    "pause.recorded",
    "pause.stopped",  # the CPUs
    "pause.journalled",
    "cool.captured",
    "cool.written",
    "cool.journalled",
    "cool.ended",  # the process
    "resume_hot.recorded",
    "resume_hot.continued",
    "resume_hot.answered",
    "resume_hot.journalled",
    "resume_cold.loaded",  # the memory, from disk
    "resume_cold.answered",  # the new machine, which nobody knows yet
    "resume_cold.made",
    "snapshot.recorded",
    "snapshot.captured",
    "snapshot.written",
    "rollback.recorded",
    "rollback.loaded",
    "rollback.made",
    "commit.sealed",  # the disk of a volume, in the machine
    "commit.published",  # as a new version
    "fold.copied",  # what lies between, into the disk in use
    "fold.done",
    "evict.recorded",
    "destroy.killed",
    "destroy.removed",  # all but its disk
    "evict.destroyed",
)

_file: Path | None = None


def arm(file: Path | None) -> None:
    """From now on, the step that this file names is where the daemon stops, once."""
    global _file
    _file = file


def reached(step: str) -> None:
    if _file is None:
        return
    try:
        if _file.read_text() != step:
            return
        _file.unlink()
    except OSError:
        return
    os.kill(os.getpid(), signal.SIGSTOP)
