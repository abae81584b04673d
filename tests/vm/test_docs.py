"""The documentation is true: its Python runs from top to bottom, and so do the examples."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from forkyard import Forkyard

from .conftest import Daemon

ROOT = Path(__file__).parents[2]
# `make demo` runs that one.
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.name != "demo.py")


@pytest.mark.parametrize(
    "page",
    ["README.md", *(f"docs/{name}.md" for name in ("tutorial", "specs", "volumes", "code", "git", "dev-servers"))],
)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, daemon: Daemon, fy: Forkyard, tmp_path: Path) -> None:
    program = tmp_path / f"{Path(page).stem}.py"
    program.write_text(python_of((ROOT / page).read_text()))
    run(daemon, program)
    for build in fy.builds.list():
        build.delete()
    for repo in fy.git.list():
        repo.delete()
    for identity in fy.identities.list():
        fy.identities.delete(identity.id)
    fy.builds.prune()  # layers stay for the next who wants them; here they would look like a leak


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: str, daemon: Daemon, fy: Forkyard) -> None:
    run(daemon, ROOT / "examples" / example)


def run(daemon: Daemon, program: Path) -> None:
    done = subprocess.run([sys.executable, program], env=daemon.env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def python_of(page: str, language: str = "python") -> str:
    """Everything else becomes an empty line, so that a traceback names the lines of the page."""
    inside = False
    lines = []
    for line in page.splitlines():
        fence = re.match(r"```(\w*)", line)
        if fence:
            inside = fence[1] == language
        lines.append(line if inside and not fence else "")
    assert any(lines), f"there is no {language} on this page"
    return "\n".join(lines) + "\n"
