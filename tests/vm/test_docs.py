"""The documentation is true: its Python runs from top to bottom, and so do the examples."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard import Forkyard

from .conftest import Daemon
from .previews import until_served
from .web import web_daemon

ROOT = Path(__file__).parents[2]
# `make demo` runs that one.
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.name != "demo.py")


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(f"docs/{name}.md" for name in ("tutorial", "specs", "volumes", "code", "git", "dev-servers", "runs")),
    ],
)
@pytest.mark.usefixtures("tidy")
@pytest.mark.timeout(600)  # one installs what draws, which takes minutes on an emulated machine
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, daemon: Daemon, tmp_path: Path) -> None:
    run(daemon, program_of(page, tmp_path), timeout_s=540)


@pytest.mark.usefixtures("fy")
def test_the_address_that_the_page_on_previews_prints_answers(daemon: Daemon, tmp_path: Path) -> None:
    printed = run(daemon, program_of("docs/previews.md", tmp_path))
    answer = until_served(printed.strip())
    assert answer.status_code == 200 and "Directory listing" in answer.text


def test_the_page_on_the_network_runs_in_one_that_has_its_hosts(tmp_path: Path) -> None:
    hosts = ("docs.example.com", "api.github.com", "api.openai.com")
    with web_daemon(hosts) as (web, daemon), daemon.client() as fy:
        printed = run(daemon, program_of("docs/network.md", tmp_path))
        assert [(one.host, one.path) for one in web.requests] == [
            ("api.github.com", "/user"),
            ("api.openai.com", "/v1/models"),
            ("docs.example.com", "/"),  # once: what came after it was replayed
        ]
        given = [one.headers.get("authorization", "").encode("latin-1").decode() for one in web.requests]
        assert given == ["Bearer ghp_…", "Bearer sk-…", ""]
        assert "docs.example.com 443" in printed
        assert fy.recordings.list() == []


@pytest.fixture
def tidy(fy: Forkyard) -> Iterator[None]:
    yield
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


def program_of(page: str, directory: Path) -> Path:
    program = directory / f"{Path(page).stem}.py"
    program.write_text(python_of((ROOT / page).read_text()))
    return program


def run(daemon: Daemon, program: Path, timeout_s: float = 240) -> str:
    done = subprocess.run(
        [sys.executable, program], env=daemon.env, cwd=program.parent, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)


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
