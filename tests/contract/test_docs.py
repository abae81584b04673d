"""Python of pages that need no machine: it runs from top to bottom, against the real API and agents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..vm.test_docs import ROOT, python_of  # noqa: TID252
from .sdk_daemon import running_daemon


@pytest.mark.parametrize("page", ["network.md", "previews.md", "runs.md"])
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    program = tmp_path / f"{Path(page).stem}.py"
    program.write_text(python_of((ROOT / "docs" / page).read_text()))
    with running_daemon() as daemon:
        done = subprocess.run(
            [sys.executable, program], env=daemon.env, cwd=tmp_path, capture_output=True, text=True, timeout=240
        )
    assert done.returncode == 0, done.stdout + done.stderr
