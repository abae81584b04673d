"""Fault steps: the names a test goes through are the ones the code has."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import forkyard
from forkyard.faults import STEPS

SOURCE = Path(forkyard.__file__).parent


def test_every_step_is_in_the_code_once_and_every_step_in_the_code_is_named() -> None:
    code = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    assert sorted(re.findall(r'\breached\("([^"]+)"\)', code)) == sorted(STEPS)


def test_a_process_stops_itself_at_the_named_step_once_and_nowhere_else(tmp_path: Path) -> None:
    file = tmp_path / "fault"
    file.write_text("fork.captured")
    program = (
        "import pathlib, sys; from forkyard.faults import arm, reached; arm(pathlib.Path(sys.argv[1]))\n"
        "reached('fork.recorded'); reached('fork.captured'); reached('fork.captured')"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(file)])
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert not file.exists()
    process.send_signal(signal.SIGCONT)
    assert process.wait(30) == 0
