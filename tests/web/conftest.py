"""A browser, and the machines of the VM tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..vm.conftest import daemon, fy, sbx  # noqa: F401, TID252
from .browser import Browser


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program is not None, "these tests need Debian's chromium: scripts/setup --tests installs it"
    with Browser(program, tmp_path / "profile") as browser:
        yield browser
