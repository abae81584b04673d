"""Package managers: which one a repository means, how it is fetched, and where it gets packages from."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from forkyard.builds.managers import Tool, wanted
from forkyard.models.specs import Manager

LOCK_1 = """# yarn lockfile v1


left@1.0.0:
  version "1.0.0"
  resolved "https://theirs.example/left/-/left-1.0.0.tgz#abc"

right@1.0.0:
  version "1.0.0"
  resolved "https://npms.example/right/-/right-1.0.0.tgz#abc"

"@corp/own@1.0.0":
  version "1.0.0"
  resolved "https://corp.example/own/-/own-1.0.0.tgz#abc"
"""


def said(manager: str) -> dict[str, str]:
    return {"package.json": json.dumps({"packageManager": manager})}


def metadata(version: int) -> dict[str, str]:
    return {"yarn.lock": f"# generated\n\n__metadata:\n  version: {version}\n  cacheKey: 10\n"}


@pytest.mark.parametrize(
    ("manager", "texts", "fetched"),
    [
        ("pnpm", {}, "pnpm@10"),
        ("pnpm", {"pnpm-lock.yaml": "lockfileVersion: '9.0'\n"}, "pnpm@10"),
        ("pnpm", {"pnpm-lock.yaml": "lockfileVersion: '6.1'\n"}, "pnpm@8"),
        ("pnpm", {"pnpm-lock.yaml": "lockfileVersion: 5.4\n"}, "pnpm@7"),
        ("pnpm", said("pnpm@9.1.0+sha512.x"), "pnpm@9.1.0"),
        ("yarn", {}, "yarn@1"),
        ("yarn", {"yarn.lock": LOCK_1, ".yarnrc.yml": "nodeLinker: node-modules\n"}, "yarn@1"),
        ("yarn", said("yarn@1.22.19"), "yarn@1.22.19"),
        ("yarn", said("yarn@4.1.0"), "@yarnpkg/cli-dist@4.1.0"),
        (
            "yarn",
            {**metadata(8), ".yarnrc.yml": "yarnPath: .yarn/releases/yarn-4.5.3.cjs\n"},
            "@yarnpkg/cli-dist@4.5.3",
        ),
        ("yarn", metadata(6), "@yarnpkg/cli-dist@3"),
        ("yarn", metadata(8), "'@yarnpkg/cli-dist@>=4 <4.14'"),
        ("yarn", metadata(10), "@yarnpkg/cli-dist@4"),
        ("yarn", {".yarnrc.yml": "nodeLinker: node-modules\n"}, "@yarnpkg/cli-dist@4"),
        # What stands there is a stranger's, and another manager's is not this one's.
        ("pnpm", said("pnpm@1; rm -rf /"), "pnpm@1"),
        ("pnpm", said("yarn@4.1.0"), "pnpm@10"),
        ("pnpm", {"package.json": "[" * 100_000}, "pnpm@10"),
    ],
)
def test_the_one_that_wrote_the_lockfile_is_fetched(manager: Manager, texts: dict[str, str], fetched: str) -> None:
    fetch = wanted(manager, texts).fetch
    assert fetch is not None and f"--loglevel=error {fetched} " in fetch


def test_nothing_is_fetched_for_those_that_every_machine_has() -> None:
    assert [Tool("npm").fetch, Tool("pip").fetch] == [None, None]


class Programs:
    """Programs of a machine, which note how they were called."""

    def __init__(self, directory: Path) -> None:
        self.bin, self.work, self.called = directory / "bin", directory / "work", directory / "called"
        self.bin.mkdir()
        self.work.mkdir()
        for name in ("bash", "env", "cat", "sed", "grep", "mktemp", "rm"):
            (self.bin / name).symlink_to(shutil.which(name) or name)

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {self.called}\n{text}\n')
        (self.bin / name).chmod(0o755)

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), "HOME": str(self.work)}
        return subprocess.run([self.bin / "bash", "-c", script], cwd=self.work, env=env, capture_output=True, text=True)


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


@pytest.mark.parametrize(
    ("there", "wants", "fetches"),
    [
        (None, Tool("pnpm"), True),
        ("11.2.0", Tool("pnpm"), False),
        ("9.1.0", Tool("pnpm", "9.1.0"), False),
        ("9.1.01", Tool("pnpm", "9.1.0"), True),
        ("10.1.0", Tool("pnpm", "8"), True),
        ("8.15.9", Tool("pnpm", "8"), False),
        (None, Tool("bun"), True),
        ("1.22.22", Tool("yarn"), False),
        ("4.1.0", Tool("yarn"), True),
        ("1.22.22", Tool("yarn", "4.1.0"), True),
        (None, Tool("yarn", ">=4 <4.14"), True),
        ("4.1.0", Tool("yarn", ">=4 <4.14"), True),
    ],
)
def test_one_that_is_there_in_a_version_that_will_do_is_taken(
    programs: Programs, there: str | None, wants: Tool, fetches: bool
) -> None:
    programs.add("npm", "")
    if there is not None:
        programs.add(wants.manager, f"echo {there}")
    done = programs.run(wants.fetch or "false")
    assert done.returncode == 0, done.stderr
    assert ("npm install --global" in programs.called.read_text() if programs.called.exists() else False) == fetches


def test_yarn_1_takes_packages_from_this_machines_registry_and_leaves_its_lockfile_as_it_was(
    programs: Programs,
) -> None:
    ours = '[ "$HOME" != /nonexistent ]'
    programs.add("npm", f"if {ours}; then echo https://mirror.example/npm/; else echo https://npms.example/; fi")
    programs.add(
        "yarn",
        'case "$1" in config) echo https://theirs.example ;; '
        '*) grep -o "https://[^#]*" yarn.lock; echo "$YARN_REGISTRY"; exit 7 ;; esac',
    )
    (programs.work / "yarn.lock").write_text(LOCK_1)
    done = programs.run(Tool("yarn").script(Tool("yarn").install("yarn.lock")))
    assert (done.returncode, done.stdout.split()) == (
        7,
        [
            "https://mirror.example/npm/left/-/left-1.0.0.tgz",
            "https://mirror.example/npm/right/-/right-1.0.0.tgz",
            "https://corp.example/own/-/own-1.0.0.tgz",
            "https://mirror.example/npm/",
        ],
    ), done.stderr
    assert (programs.work / "yarn.lock").read_text() == LOCK_1
    assert programs.called.read_text().splitlines()[-1] == "yarn install --non-interactive --frozen-lockfile"


def test_a_registry_that_yarn_1_was_told_of_is_the_one(programs: Programs) -> None:
    programs.add("npm", "echo https://npms.example/")
    programs.add(
        "yarn",
        'case "$1" in config) if [ "$HOME" = /nonexistent ]; then echo https://theirs.example; '
        'else echo https://told.example; fi ;; *) echo "$YARN_REGISTRY" ;; esac',
    )
    assert programs.run(Tool("yarn").script("yarn install")).stdout == "https://told.example\n"


def test_a_newer_yarn_is_told_of_npms_registry_unless_it_has_one(programs: Programs) -> None:
    programs.add("npm", "echo https://mirror.example/")
    programs.add("yarn", 'echo "${YARN_NPM_REGISTRY_SERVER:-own}"')
    script = Tool("yarn", "4").script("yarn install --immutable")
    assert programs.run(script).stdout == "https://mirror.example/\n"
    (programs.work / ".yarnrc.yml").write_text("npmRegistryServer: https://corp.example\n")
    assert programs.run(script).stdout == "own\n"
